"""Compiler options: checks of a mesh file's, by the compiler that would get them, and our own.

A compiler has no list of its options that a program could read, and they change with its version.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from jaxtrain.mesh.hardware import PLATFORMS

if TYPE_CHECKING:
    import jax

KEEP_BARRIERS = "cse_barrier_expander"
"""XLA:CPU's pass that drops optimization barriers before equal instructions are merged for the last
time: with it nothing is rematerialised, and gathers are moved. Other platforms keep their barriers
that long anyway."""

FP8_KERNELS = {"xla_gpu_enable_triton_gemm": False}
"""Products in fp8 by cuBLASLt alone. With Triton's kernels to try, Llama 3.2 1B had not told of a
step after 150 s on an H200; so it compiled in 49 s (experiments/LOG.md, 2026-11-26)."""

QUICK_TO_COMPILE: dict[str, bool | int] = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_parallel_codegen_split_count": 1,
}
"""Options of XLA:CPU for programs that compile for longer than they run: LLVM optimises nothing,
and gets fewer and simpler functions. Sums and precision are unchanged."""

SAME_BITS = {"xla_backend_optimization_level": 0}
"""Options of XLA:CPU under which a random number does not depend on the shape of its array. LLVM
otherwise makes other instructions for other shapes, such as rows of fewer than 8 numbers, and
normal ones then differ in the last bit (experiments/LOG.md, 2026-11-28)."""


def with_defaults(options: dict[str, Any], platform: str, *, fp8: bool) -> dict[str, Any]:
    """Returns a mesh's options with ours for the platform, which do not replace any of them. On CPU
    the pass `KEEP_BARRIERS` is disabled beside those that the mesh disables. fp8: whether products
    are in it."""
    if platform == "cpu":
        disabled = filter(None, (options.get("xla_disable_hlo_passes"), KEEP_BARRIERS))
        return options | {"xla_disable_hlo_passes": ",".join(disabled)}
    return FP8_KERNELS | options if platform == "gpu" and fp8 else options


@cache
def quick_to_compile(device: jax.Device) -> dict[str, bool | int]:
    """Returns the options of QUICK_TO_COMPILE that the compiler of `device` accepts: they depend on
    the version of jaxlib, and there are none off CPU."""
    if device.platform != "cpu":
        return {}
    options = QUICK_TO_COMPILE.items()
    return {k: v for k, v in options if not option_violations({k: v}, device)}


def option_violations(
    options: Mapping[str, bool | int | float | str], device: jax.Device
) -> list[str]:
    """Returns a message for each of `options` that the compiler of `device` refuses or ignores.

    The device may be absent. A tiny program is compiled with all options: 0.2 s, and 4 s the first
    time on an absent TPU.
    """
    if not options:
        return []
    import jax
    import jax.numpy as jnp

    sharding = jax.sharding.SingleDeviceSharding(device)
    operand = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=sharding)
    lowered = jax.jit(jnp.negative).lower(operand)

    def refusal(chosen: Mapping[str, Any]) -> str:
        try:
            lowered.compile(compiler_options=dict(chosen))
        except jax.errors.JaxRuntimeError as error:
            return str(error).splitlines()[0].strip()
        return ""

    # A compiler may accept another platform's options and ignore them.
    foreign = tuple(f"xla_{platform}_" for platform in PLATFORMS if platform != device.platform)
    ignored = [name for name in options if name.startswith(foreign)]
    violations = [
        f"compiler_options.{name} does nothing on {device.platform}; remove it from this mesh file"
        for name in ignored
    ]
    own = {name: value for name, value in options.items() if name not in ignored}
    together = refusal(own)
    if not together:
        return violations
    reasons = {name: refusal({name: value}) for name, value in own.items()}
    refused = [_refused(name, own[name], why, device) for name, why in reasons.items() if why]
    return violations + (refused or [f"compiler_options are refused together: {together}"])


def _refused(name: str, value: object, reason: str, device: jax.Device) -> str:
    compiler = f"the compiler of this {device.device_kind}"
    if "No such compile option" in reason:
        return (
            f"compiler_options.{name} is unknown to {compiler}; correct its spelling, or remove it "
            f"if it is another version's"
        )
    return f"compiler_options.{name} = {value!r} is refused by {compiler}: {reason}"
