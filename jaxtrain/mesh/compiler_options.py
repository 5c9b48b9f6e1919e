"""Whether a compiler takes the options of a mesh file, asked of that compiler itself.

Its options are in no list that a program could read, and change with its version.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from jaxtrain.mesh.hardware import PLATFORMS

if TYPE_CHECKING:
    import jax

QUICK_TO_COMPILE: dict[str, bool | int] = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_parallel_codegen_split_count": 1,
}
"""Of XLA:CPU, for programs that are compiled for longer than they run: LLVM optimises nothing, and
gets fewer and simpler functions. The same sums in the same precision."""


@cache
def quick_to_compile(device: jax.Device) -> dict[str, bool | int]:
    """Those of QUICK_TO_COMPILE that the compiler of `device` takes: not the same ones in every
    version of jaxlib, and none off CPU."""
    if device.platform != "cpu":
        return {}
    options = QUICK_TO_COMPILE.items()
    return {k: v for k, v in options if not option_violations({k: v}, device)}


def option_violations(
    options: Mapping[str, bool | int | float | str], device: jax.Device
) -> list[str]:
    """What is wrong with each of `options` for the compiler of `device`, present or absent.

    A tiny program is compiled with all of them: 0.2 s, after the first one's 4 s on an absent TPU.
    """
    if not options:
        return []
    import jax
    import jax.numpy as jnp

    here = jax.sharding.SingleDeviceSharding(device)
    lowered = jax.jit(jnp.negative).lower(jax.ShapeDtypeStruct((8,), jnp.float32, sharding=here))

    def refusal(chosen: Mapping[str, Any]) -> str:
        try:
            lowered.compile(compiler_options=dict(chosen))
        except jax.errors.JaxRuntimeError as error:
            return str(error).splitlines()[0].strip()
        return ""

    # A compiler may take another platform's options, and do nothing with them.
    others = tuple(f"xla_{other}_" for other in PLATFORMS if other != device.platform)
    idle = [name for name in options if name.startswith(others)]
    found = [
        f"compiler_options.{name} does nothing on {device.platform}; remove it from this mesh file"
        for name in idle
    ]
    own = {name: value for name, value in options.items() if name not in idle}
    together = refusal(own)
    if not together:
        return found
    alone = {name: refusal({name: value}) for name, value in own.items()}
    refused = [_taught(name, own[name], why, device) for name, why in alone.items() if why]
    return found + (refused or [f"compiler_options are refused together: {together}"])


def _taught(name: str, value: object, why: str, device: jax.Device) -> str:
    where = f"the compiler of this {device.device_kind}"
    if "No such compile option" in why:
        return (
            f"compiler_options.{name} is unknown to {where}; correct its spelling, or remove it if "
            f"it is another version's"
        )
    return f"compiler_options.{name} = {value!r} is refused by {where}: {why}"
