"""Choice of the kernel that multiplies experts' rows."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import jax

from jaxtrain.moe.block_loop import BlockLoop
from jaxtrain.moe.grouped import Asked, GroupedMatmul
from jaxtrain.moe.megablox import Megablox
from jaxtrain.moe.triton_blocks import TritonBlocks

FUSED: dict[str, GroupedMatmul] = {
    "tpu": Megablox(),
    "gpu": TritonBlocks(),
    "cuda": TritonBlocks(),
}
"""By platform, what is tried before the portable loop."""


def choose(platform: str, problem: Asked) -> GroupedMatmul:
    """Returns the platform's fastest kernel for this problem, else `BlockLoop`. The fused ones are
    for 16-bit inputs: they would multiply fp32 in passes of fewer bits."""
    fused = FUSED.get(platform)
    if fused is None or problem.dtype.itemsize > 2 or fused.violations(problem):
        return BlockLoop()
    return fused


@dataclass(frozen=True)
class PlatformGroupedMatmul:
    """The kernel that `choose` picks for a platform, which need not be this machine's. Warns where
    that is `BlockLoop` on an accelerator."""

    platform: str


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
    platform = jax.default_backend() if kernel is None else kernel.platform
    chosen = choose(platform, problem)
    if isinstance(chosen, BlockLoop) and platform != "cpu":
        warnings.warn(portable(platform, problem), stacklevel=2)
    return chosen


def portable(platform: str, problem: Asked) -> str:
    """Returns a warning that `BlockLoop` runs on an accelerator, with the reason and its cost."""
    fused = FUSED.get(platform)
    reasons = "; ".join(fused.violations(problem)) if fused else ""
    because = f" ({reasons})" if reasons else ""
    return (
        f"{problem.experts} experts of {problem.dtype} [{problem.embed}, {problem.hidden}] with "
        f"{problem.rows} rows have no fused kernel for {platform} here{because} and run "
        f"as a loop over blocks: on an H100 about 4 times the time of their products"
    )
