"""The kernels that are told of are those that the traced step chooses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import jaxtrain
from jaxtrain.mesh.hardware import CHIPS
from jaxtrain.mesh.mesh import make_mesh
from jaxtrain.moe import BlockLoop, Megablox, TritonBlocks, layer
from jaxtrain.operations.block import attentions, mixtures
from jaxtrain.optim.precision import bf16, fp32
from jaxtrain.step.assembly import active_mesh, assemble
from jaxtrain.step.running_kernels import kernels_of
from jaxtrain.step.state import shardings
from jaxtrain.step.train_step import trace_step

CASES = [
    ("tpu_v5e", bf16, {}, Megablox()),
    ("tpu_v5e", bf16, {"check_vma": True}, BlockLoop()),
    ("tpu_v5e", bf16, {"mode": "gspmd"}, BlockLoop()),
    ("h100_sxm", bf16, {}, TritonBlocks()),
    ("h100_sxm", bf16, {"mode": "gspmd"}, TritonBlocks()),
    ("h100_sxm", fp32, {}, BlockLoop()),
    ("h100_sxm", fp32, {"grouped_matmul": BlockLoop(64)}, BlockLoop(64)),
]


@pytest.mark.parametrize(("chip", "precision", "execution", "expected"), CASES, ids=str)
@pytest.mark.filterwarnings("ignore:.*run(s)? as")
def test_what_is_told_is_what_is_traced(
    chip: str,
    precision: Any,
    execution: dict[str, Any],
    expected: Any,
    decoder: jaxtrain.Experiment,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (block,) = decoder.model.period
    block = replace(block, mlp=jaxtrain.MoeConfig(hidden=32, experts=4))
    experiment = replace(
        decoder,
        model=replace(decoder.model, embed=32, period=(block,)),
        data=replace(decoder.data, seq=128),
        precision=precision,
        execution=jaxtrain.Execution(**execution),
    )
    here = jaxtrain.mesh_from_axes(fsdp=2, tensor=2)
    assembly = assemble(experiment, replace(here, chip=CHIPS[chip], simulated=False))
    assert kernels_of(assembly, mixtures) == (str(expected),)
    assert kernels_of(assembly, attentions) != ()
    traced, settled = set(), layer.settled

    def noted(*given: Any) -> Any:
        traced.add(settled(*given))
        return settled(*given)

    monkeypatch.setattr(layer, "settled", noted)
    mesh = active_mesh(make_mesh(here), assembly.sizes)
    trace_step(assembly, mesh, shardings(assembly.abstract, assembly.splits, mesh))
    assert traced == {expected}
