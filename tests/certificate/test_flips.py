"""Choices of experts in a certificate: compared first, near ties replayed, others told by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtrain
from jaxtrain.certificate import certify
from jaxtrain.certificate.layouts import Layout
from jaxtrain.certificate.outcome import STEPS, Outcome, Program, program
from jaxtrain.certificate.routing import NumberedRows, flips
from jaxtrain.moe import layer as moe_layer
from jaxtrain.moe.replay import Routing
from jaxtrain.moe.router import SoftmaxRouter

CUT = Layout(
    (("stage", 2), ("context", 2)),
    microbatches=2,
    pipeline="1F1B",
    periods=3,
    loop="scanned, remat dots_and_attention",
)
PAIR = Layout((("data", 2),), microbatches=1)


@pytest.fixture
def mixture(decoder: jaxtrain.Experiment) -> jaxtrain.Experiment:
    """A tiny decoder whose feed-forward layers are mixtures of four experts."""
    routed = replace(decoder.model.period[0], mlp=jaxtrain.MoeConfig(8, 4, 3))
    model = replace(decoder.model, period=(routed,))
    return replace(decoder, model=model, optimizer=jaxtrain.SGD(0.1))


def outcomes_equal(one: Outcome, other: Outcome) -> None:
    for a, b in zip(*map(jax.tree.leaves, (one[:-1], other[:-1])), strict=True):
        np.testing.assert_array_equal(a, b)


def test_routing_is_kept_in_natural_order_and_its_own_replayed_changes_no_bit(
    mixture: jaxtrain.Experiment, fresh_programs: None
) -> None:
    """On stages that layers do not divide, with rows cut, in microbatches."""
    reference, run = program(mixture, CUT.reference())(), program(mixture, CUT)
    found = run()
    assert len(found.routing) == STEPS
    for mine, own in zip(found.routing, reference.routing, strict=True):
        assert mine.keys() == own.keys() == {0, 1, 2}
        for layer, (chosen, compared, _) in mine.items():
            np.testing.assert_array_equal(chosen, own[layer].chosen)
            np.testing.assert_allclose(compared, own[layer].compared, rtol=1e-4, atol=1e-5)
            assert len(np.unique(chosen)) == 4
    outcomes_equal(run(found.routing), found)
    others = [{k: 3 - r.chosen for k, r in each.items()} for each in found.routing]
    away = [{k: routed(c) for k, c in each.items()} for each in others]
    sent = run(away)
    moved, still = (each.grads[0]["period.0.mlp.up"] for each in (sent, found))
    assert np.abs(moved - still).max() > 0.1 * np.abs(still).max()
    for mine, own in zip(sent.routing[:1], found.routing[:1], strict=True):
        np.testing.assert_array_equal(mine[0].chosen, own[0].chosen)  # its own, not those given


SMALL, LARGE = PAIR, PAIR._replace(microbatches=2)


def test_a_flip_of_a_small_margin_is_replayed_and_one_of_a_large_margin_fails_by_name(
    mixture: jaxtrain.Experiment, monkeypatch: pytest.MonkeyPatch, fresh_programs: None
) -> None:
    """A layout prefers 1 to 0, another one 3 to 2; by how little one device does not, is theirs."""
    right, logits_of = certify.program, moe_layer.router_logits
    more = {SMALL.reference(): (-1e-6, -1e-4), SMALL: (1e-6, -1e-4), LARGE: (-1e-6, 1e-4)}

    def compiled(experiment: Any, layout: Layout, *_: Any) -> Program:
        def router_logits(x: Any, router: Any) -> jax.Array:
            left = logits_of(x, router)[:, ::2]
            pairs = jnp.stack([left, left + jnp.asarray(more[layout])[None]], axis=-1)
            return pairs.reshape(len(x), 4)

        with monkeypatch.context() as patch:
            patch.setattr(moe_layer, "router_logits", router_logits)
            return right(experiment, layout)

    monkeypatch.setattr(certify, "program", compiled)
    monkeypatch.setattr(certify, "layouts", lambda devices, which, **_: ([SMALL, LARGE], 2))
    monkeypatch.setattr("os.cpu_count", lambda: 0)  # one program at a time is patched
    near, far = (found for found, _ in certify.certify(mixture, full=True))
    assert near.passed and near.layout == SMALL, str(near)
    assert near.flips.count > STEPS and 0.5e-6 < near.flips.margin < 2e-6
    assert f"flips {near.flips.count} ({near.flips.margin:.1e})" in str(near)
    assert not far.passed and not far.explained
    assert 0.5e-4 < far.flips.margin < 2e-4
    assert "FAILED step 1 layer 0 token" in str(far)
    assert f"a margin of {far.flips.margin:.1e} (bound 1e-05)" in str(far)


# The verdict, with routing made up.

COMPARED = np.array([[0.4, 0.2, 0.0, -0.2]] * 3, np.float32)
OWN = np.array([[0, 1]] * 3)


def routed(chosen: Any = OWN, compared: np.ndarray = COMPARED) -> Routing:
    return Routing(np.asarray(chosen), compared, SoftmaxRouter())


def test_flips_are_counted_and_the_worst_is_named() -> None:
    reference = [{0: routed(), 2: routed()}] * 2
    found = [
        {0: routed(), 2: routed([[0, 1], [0, 2], [1, 0]])},
        {0: routed([[0, 1], [0, 1], [3, 1]])},
    ]
    count, margin, where = flips(found, reference)
    assert count == 3 and margin == pytest.approx(0.6)
    assert where == "step 2 layer 0 token 2: experts [3, 1] for [0, 1] of one device"
    assert flips([{}, {0: routed()}], reference) == (0, 0.0, "")
    lost = [{0: routed(compared=np.full_like(COMPARED, np.nan))}]
    assert flips([{0: routed([[1, 0]] * 3)}], lost).margin == np.inf


@pytest.mark.parametrize(
    ("margin", "failing"),
    [(0.9e-5, set()), (1.1e-5, {"fp32"}), (5.9e-2, {"fp32"}), (6.1e-2, {"fp32", "bf16"})],
)
def test_a_margin_fails_from_the_bound_of_its_precision_on(margin: float, failing: Any) -> None:
    seen = certify.Flips(4, margin, "somewhere")
    for precision in ("fp32", "bf16"):
        layout = PAIR._replace(precision=precision)
        found = certify.Difference(
            layout, 0.0, 0.0, 0.0, True, "a", 0.0, 0.0, "params a", flips=seen
        )
        assert found.passed == (precision not in failing)
        summary = certify.Certificate(1, [found])
        assert f"4 {precision} flips of experts" in summary.summary()
        assert summary.as_json()["flips"] == 4


def test_places_are_those_of_a_batch_whatever_row_it_begins_with() -> None:
    class Rows:
        seq = 3

        def rows(self, indices: np.ndarray) -> dict[str, np.ndarray]:
            return {"tokens": np.zeros((len(indices), 3), np.int32)}

    found: Any = NumberedRows(Rows(), 4)  # type: ignore[arg-type]
    np.testing.assert_array_equal(found.rows(np.array([5, 6]))["places"], [[3, 4, 5], [6, 7, 8]])
    every = found.rows(np.arange(6, 10))["places"]
    assert sorted(every.reshape(-1)) == list(range(12))
