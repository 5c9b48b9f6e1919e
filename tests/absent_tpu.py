"""Small programs compiled for TPUs that are not here."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from jaxtrain.mesh.absent import ENVIRONMENT, absent_mesh
from jaxtrain.mesh.mesh import load_mesh

tpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="compiles for an absent TPU: pip install '.[tpu]'",
)
# A program for an absent chip can be written to JAX's cache of programs, but not read back.
no_cache = pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache entry")


def for_tpu(monkeypatch, mesh_file: str, topology: str, axis: str, function, *shapes, out: P):
    """`function` compiled for a slice of four such chips on one mesh axis, its arrays bf16: the
    program's text."""
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    spec = replace(load_mesh(mesh_file), devices=4, topology=topology, axes=((axis, 4),))
    mesh = absent_mesh(spec)
    run = jax.shard_map(function, mesh=mesh, in_specs=tuple(s for _, s in shapes), out_specs=out)
    arrays = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=jax.sharding.NamedSharding(mesh, split))
        for shape, split in shapes
    ]
    options = dict(spec.compiler_options) or None
    return jax.jit(run).lower(*arrays).compile(compiler_options=options).as_text()
