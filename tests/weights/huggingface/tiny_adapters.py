"""Adapters at random of the tiny models."""

from __future__ import annotations

from fnmatch import fnmatch
from typing import Any

import jax
import numpy as np

from jaxtrain import fsdp, mesh_from_axes, tensor
from jaxtrain.mesh.mesh import make_mesh
from jaxtrain.mesh.sharding import named_sharding, place
from jaxtrain.models.adapters import Adapters, adapter_places, is_adapter
from jaxtrain.models.build import abstract_model
from jaxtrain.transformer.decoder import DecoderConfig

RANK = 3


def every_matrix(config: DecoderConfig, *patterns: str) -> tuple[str, ...]:
    """The model's matrices that can have an adapter; those that a pattern names, if there are
    any."""
    every = tuple(adapter_places(config.describe()))
    return tuple(k for k in every if any(fnmatch(k, pattern) for pattern in patterns or ("*",)))


def adapters_of(config: DecoderConfig, targets: tuple[str, ...], **axes: int) -> dict[str, Any]:
    """Random A and B of these matrices, as fsdp() | tensor() lets them rest on a mesh."""
    split = abstract_model(config, adapters=Adapters(RANK, 2.0, targets))
    mesh = make_mesh(mesh_from_axes(**(axes or {"data": 1})))
    places, _ = place(split.params, split.axes, fsdp() | tensor(), sizes=dict(mesh.shape))
    rng = np.random.default_rng(0)
    return {
        k: jax.device_put(
            rng.normal(size=v.shape).astype(np.float32), named_sharding(mesh, places[k].params)
        )
        for k, v in split.params.items()
        if is_adapter(k)
    }


def shapes(params: dict[str, Any]) -> dict[str, Any]:
    return {
        k: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=v.sharding) for k, v in params.items()
    }
