"""The kernels that are told of are those that the traced step chooses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from absent_gpu import NEW_JAX

import jaxtrain
from jaxtrain.hopper import FlashAttention
from jaxtrain.mesh.hardware import CHIPS
from jaxtrain.mesh.mesh import make_mesh
from jaxtrain.moe import BlockLoop, Megablox, MosaicBlocks, TritonBlocks, layer, triton_blocks
from jaxtrain.operations.block import attentions, mixtures
from jaxtrain.optim.precision import bf16, fp32
from jaxtrain.scores import Alibi
from jaxtrain.step.assembly import Assembly, active_mesh, assemble
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
    experiment = replace(
        mixture_of(decoder, 32, 32), precision=precision, execution=jaxtrain.Execution(**execution)
    )
    assembly = told_and_traced(experiment, chip, expected, monkeypatch)
    assert kernels_of(assembly, attentions) != ()


@NEW_JAX
@pytest.mark.filterwarnings("ignore:.*run(s)? as")
@pytest.mark.parametrize(
    ("chip", "expected"), [("h100_sxm", MosaicBlocks()), ("a100_80g", BlockLoop())]
)
def test_the_choice_knows_the_gpu_of_the_mesh(
    chip: str, expected: Any, decoder: jaxtrain.Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen where JAX has no kernels by Triton."""
    monkeypatch.setattr(triton_blocks, "TRITON", "experimental/pallas/gone.py")
    experiment = replace(mixture_of(decoder, 64, 128), precision=bf16, batch=16)
    told_and_traced(experiment, chip, expected, monkeypatch)


@NEW_JAX
@pytest.mark.filterwarnings("ignore:.*run(s)? as")
@pytest.mark.parametrize("scores", [None, Alibi()], ids=str)
@pytest.mark.parametrize(
    ("axes", "mode"),
    [
        ({"fsdp": 2, "tensor": 2}, "explicit"),
        ({"fsdp": 2, "tensor": 2}, "gspmd"),
        ({"data": 2, "context": 2}, "explicit"),
    ],
    ids=str,
)
def test_attention_for_hopper_runs_in_each_mode(
    axes: dict[str, int], mode: str, scores: Any, decoder: jaxtrain.Experiment
) -> None:
    """With functions of scores, whose derivatives are traced in the step, and on parts of rows."""
    (block,) = decoder.model.period
    attends = replace(block.attention, head_dim=64, scores=scores)
    model = replace(decoder.model, embed=128, period=(replace(block, attention=attends),))
    experiment = replace(
        decoder,
        model=model,
        data=replace(decoder.data, seq=256, isolate_documents=False),
        precision=bf16,
        execution=jaxtrain.Execution(attention=FlashAttention(), mode=mode),
    )
    here = jaxtrain.mesh_from_axes(**axes)
    assembly = assemble(experiment, replace(here, chip=CHIPS["h100_sxm"], simulated=False))
    mesh = active_mesh(make_mesh(here), assembly.sizes)
    traced = trace_step(assembly, mesh, shardings(assembly.abstract, assembly.splits, mesh))
    program = str(traced.jaxpr)
    assert all(f"attention_{name}" in program for name in ("forward", *GRADIENTS))


GRADIENTS = ("query_gradients", "key_gradients")


def mixture_of(decoder: jaxtrain.Experiment, embed: int, hidden: int) -> jaxtrain.Experiment:
    (block,) = decoder.model.period
    block = replace(block, mlp=jaxtrain.MoeConfig(hidden=hidden, experts=4))
    model = replace(decoder.model, embed=embed, period=(block,))
    return replace(decoder, model=model, data=replace(decoder.data, seq=128))


def told_and_traced(
    experiment: jaxtrain.Experiment, chip: str, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> Assembly:
    here = jaxtrain.mesh_from_axes(fsdp=2, tensor=2)
    assembly = assemble(experiment, replace(here, chip=CHIPS[chip], simulated=False))
    assert kernels_of(assembly, mixtures) == (str(expected),)
    traced, settled = set(), layer.settled

    def noted(*given: Any) -> Any:
        traced.add(settled(*given))
        return settled(*given)

    monkeypatch.setattr(layer, "settled", noted)
    mesh = active_mesh(make_mesh(here), assembly.sizes)
    trace_step(assembly, mesh, shardings(assembly.abstract, assembly.splits, mesh))
    assert traced == {expected}
    return assembly
