"""Routing that is kept, and replayed: against routers that choose by themselves, and by hand."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.collectives.exchange import Exchange
from jaxtrain.moe.layer import ExpertLayer, ExpertLeaves, TokenFacts
from jaxtrain.moe.replay import OWN, Replay, Routing
from jaxtrain.moe.router import Balance, Capacity, Groups, SigmoidRouter, SoftmaxRouter
from jaxtrain.moe.tally import tally_size
from jaxtrain.transformer.feed_forward import silu

EMBED, HIDDEN, EXPERTS, TOKENS, BATCH, K = 6, 10, 8, 24, 40, 2
LAYERS = {
    "softmax": ExpertLayer(K, silu),
    "biased, in groups": ExpertLayer(
        K, silu, SigmoidRouter(bias=True, groups=Groups(4, 2, best=2)), balance=Balance(0.1, 0.1)
    ),
    "with capacity": ExpertLayer(K, silu, capacity=Capacity(0.7, routing_group=8)),
}
PLACES = np.random.default_rng(3).permutation(BATCH)[:TOKENS].astype(np.int32)
"""Of the tokens of one device, in the batch of all."""


def problem(layer: ExpertLayer) -> tuple[Any, ExpertLeaves, Replay]:
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    weights = (normal(EXPERTS, EMBED, HIDDEN),) * 2 + (normal(EXPERTS, HIDDEN, EMBED),)
    leaves = ExpertLeaves(normal(EMBED, EXPERTS), weights)
    if layer.router.bias:
        leaves = leaves._replace(bias=normal(EXPERTS), tally=jnp.ones(tally_size(EXPERTS)))
    return normal(TOKENS, EMBED), leaves, Replay(layer.router, BATCH, K, EXPERTS)


def run(layer: ExpertLayer, x: Any, leaves: ExpertLeaves, counted: float = 1.0) -> tuple[Any, Any]:
    """The outputs, and the gradients of x and of all leaves."""
    facts, exchange = TokenFacts(places=jnp.asarray(PLACES)), Exchange(counted=counted)

    @jax.jit
    def both(x: Any, leaves: ExpertLeaves) -> tuple[Any, Any]:
        out, back = jax.vjp(lambda x, leaves: layer(x, leaves, facts, exchange), x, leaves)
        return out, back(jnp.sin(out))

    return jax.tree.map(np.asarray, both(x, leaves))


def in_batch(chosen: np.ndarray) -> np.ndarray:
    """Of these tokens, with OWN for those that are elsewhere."""
    whole = np.full((BATCH, K), OWN)
    whole[PLACES] = chosen
    return whole


@pytest.mark.parametrize("name", LAYERS)
def test_own_choices_given_change_no_bit_and_are_what_is_kept(name: str) -> None:
    layer = LAYERS[name]
    x, leaves, replay = problem(layer)
    out, (dx, moved) = run(layer, x, leaves)
    logits = np.asarray(x @ leaves.router)
    wanted = np.asarray(layer.router.choose(jnp.asarray(logits), leaves.bias, K))
    for chosen in (np.full((BATCH, K), OWN), in_batch(wanted)):
        found, (df, kept) = run(layer, x, leaves._replace(replay=replay.value(chosen)))
        routing = replay.routing(kept.replay)
        np.testing.assert_array_equal(routing.chosen[PLACES], wanted)
        numbers = logits
        if leaves.bias is not None:
            numbers = 1 / (1 + np.exp(-logits)) + np.asarray(leaves.bias)
        np.testing.assert_allclose(routing.compared[PLACES], numbers, rtol=1e-5, atol=1e-6)
        elsewhere = np.setdiff1d(np.arange(BATCH), PLACES)
        assert not routing.chosen[elsewhere].any() and not routing.compared[elsewhere].any()
        one, other = (out, dx, moved), (found, df, kept._replace(replay=None))
        for a, b in zip(*map(jax.tree.leaves, (one, other)), strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", LAYERS)
def test_tokens_go_where_they_are_sent_by_their_own_shares(name: str) -> None:
    layer = LAYERS[name]
    x, leaves, replay = problem(layer)
    sent = np.stack([np.arange(TOKENS) % EXPERTS, (np.arange(TOKENS) + 3) % EXPERTS], axis=1)
    given = leaves._replace(replay=replay.value(in_batch(sent)))
    found, (_, kept) = run(layer, x, given)
    logits = np.asarray(x @ leaves.router, np.float64)
    scores = 1 / (1 + np.exp(-logits)) if leaves.bias is not None else np.exp(logits)
    shares = np.take_along_axis(scores, sent, 1)
    shares /= shares.sum(1, keepdims=True)
    if layer.capacity is not None:
        shares = shares * np.asarray(layer.capacity.fits(jnp.asarray(sent), EXPERTS))
    gate, up, down = (np.asarray(w, np.float64) for w in leaves.weights)
    wide = np.einsum("te,nem->tnm", x, gate)
    hidden = wide / (1 + np.exp(-wide)) * np.einsum("te,nem->tnm", x, up)
    dense = np.einsum("tnm,nme->tne", hidden, down)
    wanted = sum(
        shares[:, j, None] * np.take_along_axis(dense, sent[:, j, None, None], 1)[:, 0]
        for j in range(K)
    )
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)
    own = layer.router.choose(jnp.asarray(logits, jnp.float32), leaves.bias, K)
    np.testing.assert_array_equal(replay.routing(kept.replay).chosen[PLACES], own)


def test_a_device_that_does_not_count_keeps_nothing() -> None:
    layer = LAYERS["softmax"]
    x, leaves, replay = problem(layer)
    leaves = leaves._replace(replay=replay.value(np.full((BATCH, K), OWN)))
    assert not run(layer, x, leaves, counted=0.0)[1][1].replay.any()


@pytest.mark.parametrize("groups", [Groups(4, 1), Groups(2, 1, best=2)])
def test_a_margin_between_groups_is_what_a_worth_must_move(groups: Groups) -> None:
    """With a little more another group is open, and with a little less it is not."""
    router, size = SoftmaxRouter(groups=groups), EXPERTS // groups.count
    compared = np.random.default_rng(1).random((200, EXPERTS)).astype(np.float32)

    def choose(numbers: np.ndarray) -> np.ndarray:
        given = jnp.asarray(numbers, jnp.float32)
        return np.asarray(router.choose(jnp.log(given), None, K))  # softmax: numbers up to a sum

    compared /= compared.sum(1, keepdims=True)
    own = choose(compared)
    for group in range(groups.count):
        raised = np.arange(EXPERTS) // size == group
        others = choose(compared + 10.0 * raised)
        margins, moved = Routing(own, compared, router).margins(others), (others != own).any(1)
        assert moved.any() and not margins[~moved].any()
        step = np.where(raised, margins[:, None] / groups.best, 0.0)
        for share, there in ((1.001, True), (0.999, False)):
            entered = (choose(compared + share * step) // size == group).all(1)
            assert (entered == there)[moved].all()


def test_margins_between_experts_by_hand() -> None:
    compared = np.array([[0.5, 0.4, 0.3, 0.1]] * 4, np.float32)
    routing = Routing(np.array([[0, 1]] * 4), compared, SoftmaxRouter())
    others = np.array([[0, 1], [1, 0], [0, 2], [3, 2]])
    np.testing.assert_allclose(routing.margins(others), [0, 0.1, 0.1, 0.4], atol=1e-7)


def test_margins_where_several_groups_are_open_by_hand() -> None:
    """Another group's expert may be near while an open group's is far; and a group that is just
    closed sends a token to the next expert of those that are open."""
    router = SoftmaxRouter(groups=Groups(3, 2))
    compared = np.array([[0.5, 0.05, 0.2, 0.01, 0.1999999, 0.04]] * 3, np.float32)
    others = np.array([[0, 2], [1, 4], [0, 4]])
    found = Routing(np.array([[0, 2]] * 3), compared, router).margins(others)
    np.testing.assert_allclose(found, [0, 0.45, 1e-7], atol=2e-8)
    pairs = SoftmaxRouter(groups=Groups(3, 2, best=2))
    compared = np.array([[0.30, 0.25, 0.20, 0.219998, 3e-6, 0, 0.11, 0.11, 0]], np.float32)
    routing = Routing(np.array([[0, 1, 3]]), compared, pairs)
    np.testing.assert_allclose(routing.margins(np.array([[0, 1, 2]])), [1e-6], atol=3e-7)
    np.testing.assert_allclose(routing.margins(np.array([[0, 1, 6]])), [0.09], rtol=1e-3)
    np.testing.assert_allclose(routing.margins(np.array([[0, 3, 1]])), [0.030002], rtol=1e-3)
