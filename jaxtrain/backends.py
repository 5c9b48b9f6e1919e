"""Back ends of kernels that the installed JAX has, and the GPU that is here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax

Ref = Any
"""An array in the memory of the device, of which a kernel reads and writes parts, or a tile of one
in shared memory."""
TRITON = "experimental/pallas/triton.py"
"""Pallas's back end by way of Triton, which JAX deprecates since 0.11.2."""
TRITON_ATTENTION = "experimental/pallas/ops/gpu/attention.py"
"""JAX's flash attention of that back end, deprecated likewise."""
MOSAIC_JAX = (0, 12)
"""Version of JAX whose interface of Mosaic for GPUs is the one that our kernels use."""
HOPPER_SHARED_BYTES = 227 * 2**10
"""Shared memory of a block of threads on a GPU of compute capability 9.0 (CUDA C++ programming
guide)."""


def missing(*files: str) -> list[str]:
    """Returns a violation if the installed JAX lacks one of its own files. Imports nothing: Pallas
    takes a second to import."""
    home = Path(jax.__file__).parent
    absent = [file for file in files if not (home / file).is_file()]
    if not absent:
        return []
    modules = (f"jax.{file.removesuffix('.py').replace('/', '.')}" for file in absent)
    return [f"JAX {jax.__version__} has no {' and no '.join(modules)} any more"]


def too_old_for_mosaic() -> list[str]:
    """Returns a violation if kernels by Mosaic for GPUs cannot be built with the installed JAX."""
    if jax.__version_info__ >= MOSAIC_JAX:
        return []
    return [
        f"it needs JAX {'.'.join(map(str, MOSAIC_JAX))} or newer, and this is {jax.__version__}"
    ]


def mosaic_options(*, interpret: bool, approx_math: bool = False) -> dict[str, Any]:
    """Returns the options of `mosaic_gpu.kernel` that all our kernels have. interpret: run it in
    JAX's simulator of a GPU, which raises for races. approx_math: functions with fewer bits."""
    from jax.experimental.pallas import mosaic_gpu

    return dict(
        compiler_params=mosaic_gpu.CompilerParams(
            approx_math=approx_math,
            lowering_semantics=mosaic_gpu.LoweringSemantics.Warpgroup,
        ),
        interpret=mosaic_gpu.InterpretGPUParams(detect_races=True) if interpret else None,
    )


def gpu_capability() -> int | None:
    """Returns the major compute capability of this process's first device: 9 is Hopper. None where
    it is no NVIDIA GPU, or does not say."""
    major = str(getattr(jax.devices()[0], "compute_capability", "")).split(".")[0]
    return int(major) if major.isdigit() else None
