"""Lowering for GPUs that are not here."""

from __future__ import annotations

from typing import Any

import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from jaxtrain.backends import too_old_for_mosaic

TRITON_IS_DEPRECATED = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
"""What JAX 0.11.2 and later say of each kernel as it is lowered."""

NEW_JAX = pytest.mark.skipif(
    bool(too_old_for_mosaic()), reason="JAX's interface of Mosaic for GPUs came with 0.12"
)


def abstract_gpus(**axes: int) -> AbstractMesh:
    """H100s that have no program but a lowered one: since JAX 0.11 Pallas's Triton kernels need to
    know the GPU, from a shard_map's mesh or from `jax.sharding.use_abstract_mesh`."""
    gpu: Any = AbstractDevice("NVIDIA H100 80GB HBM3", None, "gpu")
    types = (AxisType.Auto,) * len(axes)
    return AbstractMesh(tuple(axes.values()), tuple(axes), types, abstract_device=gpu)
