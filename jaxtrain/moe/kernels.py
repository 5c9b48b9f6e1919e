"""Choice of the kernel that multiplies experts' rows."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import jax

from jaxtrain.backends import gpu_capability
from jaxtrain.moe.block_loop import BlockLoop
from jaxtrain.moe.grouped import Asked, GroupedMatmul
from jaxtrain.moe.megablox import Megablox
from jaxtrain.moe.mosaic_blocks import MosaicBlocks
from jaxtrain.moe.triton_blocks import TritonBlocks

FUSED: dict[str, tuple[GroupedMatmul, ...]] = {
    "tpu": (Megablox(),),
    "gpu": (TritonBlocks(), MosaicBlocks()),
    "cuda": (TritonBlocks(), MosaicBlocks()),
}
"""By platform, what is tried in turn before the portable loop. Mosaic's kernels stand behind
Triton's, as long as JAX has those: they have not run on a chip."""


def choose(platform: str, problem: Asked, capability: int | None = None) -> GroupedMatmul:
    """Returns the platform's fastest kernel for this problem, else `BlockLoop`. The fused ones are
    for 16-bit inputs: they would multiply fp32 in passes of fewer bits. capability: the major
    compute capability of the GPU; None where it is not known, which no kernel of one kind of GPU
    is chosen for."""
    fused = FUSED.get(platform, ()) if problem.dtype.itemsize <= 2 else ()
    for kernel in fused:
        if not _reasons(kernel, problem, capability):
            return kernel
    return BlockLoop()


def _reasons(kernel: GroupedMatmul, problem: Asked, capability: int | None) -> list[str]:
    """Returns why a fused kernel is not chosen."""
    needed = getattr(kernel, "gpu_capability", capability)
    if needed != capability:
        gpu = "an unknown one" if capability is None else f"{capability}"
        return [f"it is for compute capability {needed}, and the GPU has {gpu}"]
    return kernel.violations(problem)


@dataclass(frozen=True)
class PlatformGroupedMatmul:
    """The kernel that `choose` picks for a platform, which need not be this machine's. capability:
    of its GPU, as `choose` takes it. Warns where that is `BlockLoop` on an accelerator."""

    platform: str
    capability: int | None = None


def settled(kernel: GroupedMatmul | PlatformGroupedMatmul | None, problem: Asked) -> GroupedMatmul:
    """Returns the kernel that runs; None is the default backend's. Raises ValueError if a kernel
    that the user named cannot compute this problem."""
    if isinstance(kernel, GroupedMatmul):
        if problems := kernel.violations(problem):
            raise ValueError(
                f"grouped_matmul={kernel!r} cannot compute this: {'; '.join(problems)}; use "
                "BlockLoop(), or None for the platform's choice"
            )
        return kernel
    asked = kernel or PlatformGroupedMatmul(jax.default_backend(), gpu_capability())
    chosen = choose(asked.platform, problem, asked.capability)
    if isinstance(chosen, BlockLoop) and asked.platform != "cpu":
        warnings.warn(portable(asked, problem), stacklevel=2)
    return chosen


def portable(asked: PlatformGroupedMatmul, problem: Asked) -> str:
    """Returns a warning that `BlockLoop` runs on an accelerator, with the reasons and its cost."""
    reasons = [
        f"{type(kernel).__name__}: {reason}"
        for kernel in FUSED.get(asked.platform, ())
        for reason in _reasons(kernel, problem, asked.capability)
    ]
    if problem.dtype.itemsize > 2:
        reasons = [f"{problem.dtype} is not of 16 bits"]
    because = f" ({'; '.join(reasons)})" if reasons else ""
    return (
        f"{problem.experts} experts of {problem.dtype} [{problem.embed}, {problem.hidden}] with "
        f"{problem.rows} rows have no fused kernel for {asked.platform} here{because} and run "
        f"as a loop over blocks: on an H100 about 4 times the time of their products"
    )
