"""Sums layer by layer: where they stand and what they send. That they are right certify tells."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

import jaxtrain
from jaxtrain.mesh.mesh import make_mesh
from jaxtrain.program.collectives import collectives
from jaxtrain.step.assembly import active_mesh, assemble
from jaxtrain.step.state import shardings
from jaxtrain.step.train_step import compile_step

LAYERS = 3


def sums(experiment: jaxtrain.Experiment, **execution: Any) -> tuple[int, Counter[int]]:
    """(bytes of all all-reduces in one step, how many run how often)."""
    loop = jaxtrain.LayerLoop(unroll=False, remat="none")
    execution = jaxtrain.Execution(loop=loop, **execution)
    model = replace(experiment.model, layers=LAYERS)
    given = replace(experiment, model=model, execution=execution, batch=8)
    spec = jaxtrain.mesh_from_axes(data=2)
    assembly = assemble(given, spec)
    mesh = active_mesh(make_mesh(spec), assembly.sizes)
    where = shardings(assembly.abstract, assembly.splits, mesh)
    text = compile_step(assembly, mesh, where).as_text()
    found = [c for c in collectives(text) if c.kind == "all-reduce"]
    return sum(c.buffer_bytes * c.count for c in found), Counter(c.count for c in found)


def gradient_bytes(experiment: jaxtrain.Experiment, name: str) -> int:
    model = replace(experiment.model, layers=LAYERS)
    assembly = assemble(replace(experiment, model=model), jaxtrain.mesh_from_axes(data=1))
    params = assembly.abstract.params
    return sum(4 * leaf.size for k, leaf in params.items() if name in k)


@pytest.mark.slow
@pytest.mark.parametrize("microbatches", [2, 1])
@pytest.mark.sampled(2)
def test_each_microbatch_sends_what_the_end_sends_once(
    decoder: jaxtrain.Experiment, microbatches: int
) -> None:
    given = replace(decoder, microbatches=microbatches)
    stacked, every = gradient_bytes(given, "period."), gradient_bytes(given, "")
    assert 0 < stacked < every
    at_the_end, often = sums(given)
    assert 0 <= at_the_end - every <= 64, "besides: the loss, and norms"
    assert set(often) == {1}
    by_layer, often = sums(given, reduce_layers=True)
    assert by_layer == at_the_end + (microbatches - 1) * stacked
    # The first of the backward pass is made before the loop, whose body runs for the others.
    assert max(often) == microbatches * (LAYERS - 1)
