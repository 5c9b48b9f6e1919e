"""Which kernel multiplies experts' rows where."""

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


def choose(platform: str, asked: Asked) -> GroupedMatmul:
    """The platform's fastest kernel that computes what is asked, else `BlockLoop`. The fused ones
    are for 16-bit inputs: in fp32 they would multiply in passes of fewer bits."""
    fused = FUSED.get(platform)
    if fused is None or asked.dtype.itemsize > 2 or fused.violations(asked):
        return BlockLoop()
    return fused


@dataclass(frozen=True)
class PlatformGroupedMatmul:
    """The kernel that `choose` picks for a platform, which need not be this machine's. Warns where
    that is `BlockLoop` on an accelerator."""

    platform: str


def settled(kernel: GroupedMatmul | PlatformGroupedMatmul | None, asked: Asked) -> GroupedMatmul:
    """The kernel that runs; None is the default backend's. Raises ValueError where one that was
    asked for by name cannot compute this."""
    if isinstance(kernel, GroupedMatmul):
        if problems := kernel.violations(asked):
            raise ValueError(
                f"grouped_matmul={kernel!r} cannot compute this: {'; '.join(problems)}; use "
                "BlockLoop(), or None for the platform's choice"
            )
        return kernel
    platform = jax.default_backend() if kernel is None else kernel.platform
    chosen = choose(platform, asked)
    if isinstance(chosen, BlockLoop) and platform != "cpu":
        warnings.warn(portable(platform, asked), stacklevel=2)
    return chosen


def portable(platform: str, asked: Asked) -> str:
    """What it means that `BlockLoop` runs on an accelerator."""
    fused = FUSED.get(platform)
    why = "; ".join(fused.violations(asked)) if fused else ""
    return (
        f"{asked.experts} experts of {asked.dtype} [{asked.embed}, {asked.hidden}] with "
        f"{asked.rows} rows have no fused kernel for {platform} here{why and f' ({why})'} and run "
        f"as a loop over blocks: on an H100 about 4 times the time of their products"
    )
