"""Permutes of weights in a whole step: tied to products of layers, and by which pace."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import jaxtrain
from jaxtrain.certificate.shrink import shrink
from jaxtrain.collectives import Collectives, Lax, Recursive, Ring
from jaxtrain.mesh.hardware import CHIPS, LINKS
from jaxtrain.mesh.mesh import load_mesh, make_mesh
from jaxtrain.nn import stack
from jaxtrain.nn.stack import LayerLoop
from jaxtrain.optim.precision import int8
from jaxtrain.overlap.alongside import alongside
from jaxtrain.session.check import check
from jaxtrain.step import communicators
from jaxtrain.step.assembly import active_mesh, assemble
from jaxtrain.step.communicators import explicit_communicator
from jaxtrain.step.state import shardings
from jaxtrain.step.train_step import trace_step
from tests.permutes import bodies, tied_permutes

EXPERIMENT = Path(__file__).parents[2] / "experiments" / "stdlib_lm.py"


def loops(axes, collectives, *, remat="dots_and_attention", layers=2, dropout=0.0, **execution):
    """The equations of each loop of a step that has permutes in it."""
    small = shrink(jaxtrain.load_experiment(EXPERIMENT), devices=4)
    period = tuple(replace(block, dropout=dropout) for block in small.model.period)
    small = replace(small, model=replace(small.model, period=period, layers=layers))
    loop = LayerLoop(remat=remat)
    chosen = replace(small.execution, collectives=collectives, loop=loop, **execution)
    assembly = assemble(replace(small, execution=chosen), jaxtrain.mesh_from_axes(**axes))
    mesh = active_mesh(make_mesh(assembly.spec), assembly.sizes)
    where = shardings(assembly.abstract, assembly.splits, mesh)
    found = bodies(trace_step(assembly, mesh, where).jaxpr.jaxpr)[2:]
    return [each for each in found if any(e.primitive.name == "ppermute" for e in each)]


@pytest.mark.parametrize(
    "collectives",
    [Collectives(Recursive()), Collectives(Ring(1), weight_gradients=Recursive())],
    ids=["recursive", "ring, recursive"],
)
def test_permutes_of_the_loop_over_layers_are_tied(collectives):
    """All of them: there is a product for each hop."""
    found = loops(dict(fsdp=4), collectives)
    assert found
    for equations in found:
        permutes = [e for e in equations if e.primitive.name == "ppermute"]
        assert len(tied_permutes(equations)) == len(permutes)


def test_those_of_a_pipelines_stage_too():
    pipeline = jaxtrain.Pipeline("gpipe", save="residuals")
    found = loops(dict(stage=2, fsdp=2), Collectives(Recursive()), pipeline=pipeline)
    assert any(tied_permutes(equations) for equations in found)


@pytest.mark.parametrize("remat", ["full", "dots_and_attention"])
@pytest.mark.parametrize("layers", [2, 4])
def test_residuals_of_dropout_come_back_from_a_stages_buffers(layers, remat):
    """What a layer keeps (its number, a key) is equal on all stages when it is made, and differs
    between them, as far as types know, when it is read from such a buffer."""
    found = loops(
        dict(stage=2, fsdp=2),
        Collectives(Ring(1)),
        remat=remat,
        layers=layers,
        dropout=0.1,
        pipeline=jaxtrain.Pipeline("gpipe", save="residuals"),
    )
    assert any(tied_permutes(equations) for equations in found)


def test_the_compilers_own_collectives_are_left_to_it():
    comm = communicator("h100_64")
    assert comm.tied_flops_per_byte is None
    for mixed in (Collectives(Recursive()), Collectives(weight_gradients=Ring(1))):
        assert replace(comm, collectives=mixed).tied_flops_per_byte is not None
    assert replace(comm, collectives=Collectives(Lax(), Ring())).tied_flops_per_byte is None
    gathered_before = replace(comm, collectives=Collectives(Recursive()), gather_weights=False)
    assert gathered_before.tied_flops_per_byte is None


def communicator(mesh, experiment="experiments/llama3_8b.py"):
    return explicit_communicator(check(experiment, mesh, data_here=False).assembly)


@pytest.mark.parametrize(
    ("axes", "pipeline"),
    [(dict(fsdp=4), {}), (dict(stage=2, fsdp=2), dict(pipeline=jaxtrain.Pipeline("gpipe")))],
    ids=["layers", "a stage's layers"],
)
def test_the_loop_is_told_the_pace(monkeypatch, axes, pipeline):
    paces = []

    def noted(*calls, flops_per_byte):
        paces.append(flops_per_byte)
        return alongside(*calls, flops_per_byte=flops_per_byte)

    monkeypatch.setattr(stack, "alongside", noted)
    monkeypatch.setattr(communicators, "flops_per_byte", lambda *known: 7.0)
    loops(axes, Collectives(Recursive()), **pipeline)
    assert set(paces) == {7.0}


def test_the_pace_is_that_of_the_links_that_weights_travel():
    """Of one port of the slice's torus; not of the network between slices, which `data` crosses."""
    spec = load_mesh("v5p_512")
    chip, link = CHIPS["tpu_v5p"].bf16_flops, LINKS["ici_v5p"]
    per_byte = chip / (link.bandwidth_gbytes * 1e9 / link.ports)
    assert communicator(spec).tied_flops_per_byte == pytest.approx(per_byte)
    experiment = jaxtrain.load_experiment("experiments/llama3_8b.py")
    in_8_bits = communicator(spec, replace(experiment, precision=int8))
    assert in_8_bits.tied_flops_per_byte == pytest.approx(2 * per_byte)
    two = dict(devices=1024, axes=(("data", 2), ("fsdp", 64), ("tensor", 8)))
    assert communicator(replace(spec, **two)).tied_flops_per_byte == pytest.approx(per_byte)
    # Rows of experts travel along `expert` alone, weights along none where they rest whole.
    mixture = jaxtrain.load_experiment("experiments/mixtral_8x7b.py")
    mixture = replace(mixture, sharding=jaxtrain.mesh.data_parallel())
    apart = communicator(replace(spec, axes=(("data", 64), ("expert", 8))), mixture)
    assert (apart.flops_per_byte, apart.flops_per_byte_of_rows) == (0.0, pytest.approx(per_byte))
    # Stages are on other hosts, and what `fsdp` splits within each is gathered there.
    hosts = replace(load_mesh("h100_64"), axes=(("stage", 2), ("data", 4), ("fsdp", 8)))
    nvlink = CHIPS["h100_sxm"].bf16_flops / (LINKS["nvlink4"].bandwidth_gbytes * 1e9)
    assert communicator(hosts).flops_per_byte == pytest.approx(nvlink)
