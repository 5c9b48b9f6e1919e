"""What a step counts of its routers, and does about it: the same on every mesh."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import jax
import numpy as np
import pytest

import jaxtrain
from jaxtrain.context import RingAttention, TwoLevel
from jaxtrain.mesh.mesh import make_mesh
from jaxtrain.moe.router import Balance, Capacity, SoftmaxRouter
from jaxtrain.step.assembly import active_mesh, assemble, try_assemble
from jaxtrain.step.initial import initial_state
from jaxtrain.step.state import shardings
from jaxtrain.step.train_step import make_train_step
from jaxtrain.transformer.mixture import SharedExpert

VOCAB, SEQ, RATE = 64, 8, 1e-3
MOE = jaxtrain.MoeConfig(
    16,
    experts=4,
    router=SoftmaxRouter(bias=True),
    shared=SharedExpert(16, weighed=True),
    capacity=Capacity(0.25, routing_group=8),  # one choice of an expert, of 16 in a group
    balance=Balance(0.5, 0.1, RATE),
)
BLOCK = jaxtrain.BlockConfig(jaxtrain.AttentionConfig(heads=4), MOE)
EXPERIMENT = jaxtrain.Experiment(
    model=jaxtrain.DecoderConfig(VOCAB, 16, layers=2, period=(BLOCK,), vocab_multiple=8),
    data=jaxtrain.data.BigramChain(VOCAB, SEQ),
    optimizer=jaxtrain.SGD(0.1),
    steps=2,
    batch=32,
    microbatches=2,
)


def of_documents() -> jaxtrain.Experiment:
    """With groups of two tokens, on rows that end in padding."""
    block = replace(BLOCK, mlp=replace(MOE, capacity=Capacity(0.25, routing_group=2)))
    return replace(
        EXPERIMENT,
        model=replace(EXPERIMENT.model, period=(block,)),
        data=replace(EXPERIMENT.data, isolate_documents=True),
    )


@lru_cache
def two_steps(mode: str, *axes: tuple[str, int], padded: bool = False) -> Any:
    """Metrics of both, and the parameters after them; tokens have weights of 0 and 1."""
    spec = jaxtrain.mesh_from_axes(**dict(axes))
    e = of_documents() if padded else EXPERIMENT
    e = replace(e, execution=jaxtrain.Execution(mode=mode or None))
    assembly = assemble(e, spec)
    mesh = active_mesh(make_mesh(spec), assembly.sizes)
    where = shardings(assembly.abstract, assembly.splits, mesh)
    layout = None if assembly.pipeline is None else assembly.pipeline.layout
    trained, parts = frozenset(assembly.places), assembly.parts

    def begin() -> Any:
        given = (assembly.transform, parts, layout, trained)
        return initial_state(assembly, *given, derivative=assembly.first_derivative)

    state = jax.jit(begin, out_shardings=where)()
    step = jax.jit(
        make_train_step(assembly, mesh), in_shardings=(where, assembly.batch_shardings(mesh))
    )
    rng, found = np.random.default_rng(0), []
    for _ in range(2):
        batch = {k: np.zeros(s.shape, s.dtype) for k, s in assembly.abstract_batch().items()}
        for name in ("tokens", "targets"):
            batch[name] = rng.integers(0, VOCAB, batch[name].shape).astype(batch[name].dtype)
        batch["weights"] = (rng.random(batch["tokens"].shape) < 0.7).astype(np.float32)
        if padded:
            place = np.arange(SEQ, dtype=np.int32) + 0 * batch["tokens"]
            real = place < rng.integers(1, SEQ, (*place.shape[:-1], 1))
            batch |= {"segments": real.astype(np.int32), "positions": place}
            batch["weights"] *= real
        for name, order in assembly.row_orders.items():
            batch[name] = batch[name][..., order]
        state, metrics = step(state, batch)
        found.append(metrics)
    return jax.tree.map(np.asarray, (*found, state.params))


ONE = ("", ("data", 1))
BY_HAND = [
    ("explicit", ("data", 2), ("fsdp", 2), ("tensor", 2)),
    ("gspmd", ("data", 2), ("expert", 2), ("tensor", 2)),
    ("explicit", ("expert", 2), ("stage", 2), ("tensor", 2)),
    ("gspmd", ("data", 2), ("fsdp", 2), ("tensor", 2)),
    ("explicit", ("fsdp", 2), ("stage", 2), ("tensor", 2)),
]
MESHES = [
    ("explicit", ("fsdp", 2), ("expert", 2), ("tensor", 2)),
    *(pytest.param(mesh, marks=pytest.mark.exhaustive) for mesh in BY_HAND),
]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_loads_losses_and_biases_are_the_same_on_every_mesh(mesh: Any) -> None:
    (_, metrics, params), (_, wanted, oracle) = two_steps(*mesh), two_steps(*ONE)
    assert metrics.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-6, atol=1e-6, err_msg=name)
    for name, value in oracle.items():
        if not name.endswith("tally"):
            np.testing.assert_allclose(params[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    "mesh",
    [
        ("explicit", ("context", 2)),
        pytest.param(("gspmd", ("context", 2), ("expert", 2)), marks=pytest.mark.slow),
        pytest.param(("explicit", ("expert", 2), ("stage", 2)), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_padding_takes_no_place_on_any_mesh(mesh: Any) -> None:
    (_, metrics, params), (_, wanted, oracle) = (
        two_steps(*axes, padded=True) for axes in (mesh, ONE)
    )
    for name in ("loss", "grad_norm", "dropped", "balance_loss"):
        np.testing.assert_allclose(metrics[name], wanted[name], rtol=1e-6, err_msg=name)
    for name, value in oracle.items():
        if not name.endswith("tally"):
            np.testing.assert_allclose(params[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


def test_metrics_are_of_each_layer_and_biases_go_against_loads() -> None:
    *both, params = two_steps(*ONE)
    for metrics in both:
        for layer in range(2):
            load = metrics[f"layer_{layer}/expert_load"]
            assert load.shape == (4,) and load.mean() == pytest.approx(1.0) and load.std() > 0
            assert 0.6 < metrics[f"layer_{layer}/dropped"] < 1
            assert 0 < metrics[f"layer_{layer}/router_entropy"] < np.log(4)
        assert metrics["balance_loss"] == pytest.approx(1.0, rel=0.1)
        assert metrics["router_z_loss"] > 0
    loads = np.stack([[m[f"layer_{layer}/expert_load"] for layer in range(2)] for m in both])
    assert both[1]["expert_load_max"] == loads[1].max()
    biases = params["period.0.mlp.router_bias"]
    np.testing.assert_allclose(biases, -RATE * np.sign(loads - 1).sum(0), atol=1e-7)
    assert biases.any()


def test_groups_that_a_device_has_a_part_of_are_refused() -> None:
    block = replace(BLOCK, mlp=replace(MOE, capacity=Capacity(1.0, routing_group=48)))
    given = replace(EXPERIMENT, model=replace(EXPERIMENT.model, period=(block,)))
    with pytest.raises(
        ValueError, match=r"routing_group=48 does not divide the 32 tokens .*use routing_group=16"
    ):
        assemble(given, jaxtrain.mesh_from_axes(data=4, tensor=2))
    # Of a row that is cut each device has two runs of two tokens, an early and a late one.
    with pytest.raises(
        ValueError, match=r"routing_group=8 does not divide the 2 tokens .*use routing_group=2"
    ):
        assemble(EXPERIMENT, jaxtrain.mesh_from_axes(context=2))
    # Of two devices that trade heads, four: half of an early chunk or half of a late one.
    of_four = replace(BLOCK, mlp=replace(MOE, capacity=Capacity(1.0, routing_group=4)))
    longer = replace(EXPERIMENT.data, seq=16)
    given = replace(EXPERIMENT, data=longer, model=replace(EXPERIMENT.model, period=(of_four,)))
    for method, fits in ((TwoLevel(2), True), (RingAttention(), False)):
        tried = replace(given, execution=jaxtrain.Execution(context=method))
        violations = try_assemble(tried, jaxtrain.mesh_from_axes(context=4))[1]
        assert fits == (not violations), violations
