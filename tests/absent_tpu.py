"""Small programs compiled for TPUs that are not here."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from jaxtrain.mesh.absent import ENVIRONMENT, absent_mesh
from jaxtrain.mesh.hardware import CHIPS
from jaxtrain.mesh.mesh import load_mesh
from jaxtrain.program.roofline import (
    Peaks,
    Roofline,
    fused_computations,
    is_kernel,
    kernel_roofline,
)
from jaxtrain.program.text import parse

tpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="compiles for an absent TPU: pip install '.[tpu]'",
)
# A program for an absent chip can be written to JAX's cache of programs, but not read back.
no_cache = pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache entry")


def for_tpu(
    monkeypatch, mesh_file: str, topology: str, axis: str, function, *shapes, out: P, check_vma=True
):
    """`function` compiled for a slice of four such chips on one mesh axis, its arrays bf16: the
    program's text."""
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    spec = replace(load_mesh(mesh_file), devices=4, topology=topology, axes=((axis, 4),))
    mesh = absent_mesh(spec)
    specs = tuple(split for _, split in shapes)
    run = jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=out, check_vma=check_vma)
    arrays = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=jax.sharding.NamedSharding(mesh, split))
        for shape, split in shapes
    ]
    options = dict(spec.compiler_options) or None
    return jax.jit(run).lower(*arrays).compile(compiler_options=options).as_text()


def estimated_kernels(text: str, chip_name: str) -> dict[str, tuple[Roofline, float]]:
    """The roofline of each kernel of a program, and its seconds by the compiler's estimate, where
    the compiler states one."""
    chip, module = CHIPS[chip_name], parse(text)
    assert chip.clock_ghz is not None
    peak, fused = chip.bf16_flops, fused_computations(module)
    peaks = Peaks(peak, chip.int8_flops or peak, chip.hbm_bandwidth_gbytes * 1e9)
    kernels = {
        name: kernel_roofline(module, body, instruction, peaks)
        for body in module.computations.values()
        if body.name not in fused
        for name, instruction in body.instructions.items()
        if is_kernel(instruction)
    }
    return {k: (r, r.cycles / chip.clock_ghz / 1e9) for k, r in kernels.items() if r.cycles}
