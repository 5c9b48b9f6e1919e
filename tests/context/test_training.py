"""Training with rows that are cut: the same run as on one device, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jaxtrain
from jaxtrain.certificate.certify import difference
from jaxtrain.certificate.layouts import Layout
from jaxtrain.certificate.outcome import program
from jaxtrain.certificate.shrink import shrink
from jaxtrain.context import GatheredKeys, RingAttention, TwoLevel, Ulysses
from jaxtrain.context.choice import Heads, choose
from jaxtrain.context.order import Order
from jaxtrain.experiment import Execution, load_experiment
from jaxtrain.mesh.mesh import mesh_from_axes
from jaxtrain.step.assembly import assemble, try_assemble
from jaxtrain.step.batches import PlacedRows
from jaxtrain.weights.generate import generate_ids

EXPERIMENT = Path(__file__).parents[2] / "experiments" / "stdlib_lm.py"
LAYOUTS = [
    pytest.param(Layout((("context", 2),)), marks=pytest.mark.exhaustive),
    Layout(
        (("fsdp", 2), ("context", 2), ("tensor", 2)),
        loop="scanned, prefetch, remat full",
        dropout=0.1,
    ),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_packed_documents_train_as_on_one_device(layout, fresh_programs):
    experiment = shrink(load_experiment(EXPERIMENT), devices=8)
    found = program(experiment, layout)()
    against = difference(layout, found, program(experiment, layout.reference())())
    assert against.passed, against
    assert against.loss_rel < 1e-6 and against.eval_rel < 1e-6


def test_a_device_has_its_places_of_a_row_and_no_others():
    class Numbered:
        def rows(self, indices):
            at = np.arange(8, dtype=np.int32)
            rows = np.asarray(indices, np.int32)
            return {
                "tokens": 100 * rows[:, None] + at[None],
                "segments": np.tile(at, (len(rows), 1)),
            }

    shape, names = (2, 2), ("data", "context")
    devices = np.array(jax.devices()[:4]).reshape(shape)
    mesh = Mesh(devices, names, axis_types=(AxisType.Auto,) * 2)
    where = {
        "tokens": NamedSharding(mesh, PartitionSpec(None, "data", "context")),
        "segments": NamedSharding(mesh, PartitionSpec(None, "data")),
        "rows": NamedSharding(mesh, PartitionSpec(None, "data")),
    }
    orders = {"tokens": Order(2, zigzag=True).permutation(8)}
    batch = PlacedRows(Numbered(), where, 1, orders).rows(np.arange(2))
    shards = batch["tokens"].addressable_shards
    parts = {shard.device.id: np.asarray(shard.data)[0] for shard in shards}
    assert {k: v.tolist() for k, v in parts.items()} == {
        0: [[0, 1, 6, 7]],
        1: [[2, 3, 4, 5]],
        2: [[100, 101, 106, 107]],
        3: [[102, 103, 104, 105]],
    }
    assert all(
        (np.asarray(x.data) == np.arange(8)).all() for x in batch["segments"].addressable_shards
    )


@pytest.mark.parametrize("order", [Order(4, zigzag=True), Order(2, zigzag=True), Order(4, False)])
def test_devices_know_where_their_tokens_are(order):
    mesh = jax.make_mesh((4,), ("context",), axis_types=(AxisType.Auto,))
    local = jax.shard_map(
        lambda _: order.positions(4, ("context",)),
        mesh=mesh,
        in_specs=PartitionSpec("context"),
        out_specs=PartitionSpec("context"),
    )
    np.testing.assert_array_equal(local(jnp.zeros(4)), order.permutation(16))


def test_the_method_follows_mesh_and_heads():
    many = [Heads(8, 8, True)]
    assert choose(many, 4, 16) == RingAttention()
    assert choose(many, 4, 12) == Ulysses(), "12 tokens make no 8 chunks"
    assert choose([Heads(8, 2, True)], 4, 12) == RingAttention(zigzag=False)
    assert choose([Heads(8, 8, False)], 4, 16) == RingAttention(zigzag=False)
    assert choose([Heads(8, 8, False), *many], 4, 16) == RingAttention()


def test_what_does_not_fit_a_mesh_that_cuts_rows_is_told(decoder):
    odd = replace(decoder, data=replace(decoder.data, seq=12))
    cut = mesh_from_axes(context=4)

    def told(experiment, mode=None, method=None):
        given = replace(experiment, execution=Execution(mode, context=method))
        return try_assemble(given, cut)[1]

    assert told(decoder) == told(odd) == []
    assert told(odd, method=RingAttention()) == [
        "execution.context: seq=12 is no multiple of 8, by which context=4 divides rows in zig-zag "
        "order; use seq=8 or 16, or zigzag=False"
    ]
    assert "which do not divide a device's heads=2" in told(decoder, method=Ulysses())[0]
    assert told(decoder, method=TwoLevel(2)) == told(decoder, method=GatheredKeys()) == []
    assert "is for mode='explicit'" in told(decoder, "gspmd", RingAttention())[0]
    short = replace(decoder, data=replace(decoder.data, seq=6))
    (line,) = told(short, "gspmd")
    assert line.startswith("data.seq=6 is not cut evenly over context=4; use seq=4 or 8")
    with pytest.raises(ValueError, match="context='ring' is a str; use"):
        Execution(context="ring")


def test_a_model_says_whether_it_can_be_given_parts_of_rows(decoder, monkeypatch):
    described = type(decoder.model).describe
    monkeypatch.setattr(
        type(decoder.model),
        "describe",
        lambda self: replace(described(self), can=frozenset({"explicit"})),
    )
    found = try_assemble(decoder, mesh_from_axes(context=2))[1]
    assert "does not say that it can be given parts of them; set context=1" in found[0]


def test_a_batch_is_cut_and_documents_are_not(decoder):
    packed = replace(decoder, data=replace(decoder.data, isolate_documents=True))
    assembly = assemble(packed, mesh_from_axes(data=2, context=2))
    assert assembly.batch_splits["tokens"] == ((), ("data",), ("context",))
    assert assembly.batch_splits["segments"] == ((), ("data",), ())
    assert set(assembly.row_orders) == {"tokens", "targets", "weights", "positions"}
    assert assemble(decoder, mesh_from_axes(data=2)).row_orders == {}


def test_a_run_on_cut_rows_evaluates_and_continues_a_text(decoder):
    experiment = replace(decoder, steps=2, evaluation=jaxtrain.Evaluation(every=2, batches=1))
    found = [
        jaxtrain.train(experiment, mesh_from_axes(**{name: 2})) for name in ("data", "context")
    ]
    assert found[0].loss == pytest.approx(found[1].loss, rel=1e-6)
    whole, cut = (result.evaluation["eval_loss"] for result in found)
    assert whole == pytest.approx(cut, rel=1e-6)
    ids = [
        generate_ids(r.session.assembly, r.session.state.params, [3, 1], tokens=5, temperature=0.0)
        for r in found
    ]
    assert ids[0] == ids[1]
