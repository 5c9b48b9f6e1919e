"""Routers, capacity and auxiliary losses against formulas in fp64."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtrain
from jaxtrain.moe.layer import ExpertLayer, ExpertLeaves, TokenFacts
from jaxtrain.moe.router import (
    Balance,
    Capacity,
    Groups,
    Router,
    SigmoidRouter,
    SoftmaxRouter,
)
from jaxtrain.moe.rows import plan_rows
from jaxtrain.moe.tally import BESIDE_LOADS, tally_size
from jaxtrain.transformer.decoder import DecoderConfig
from jaxtrain.transformer.feed_forward import silu
from jaxtrain.transformer.mixture import SharedExpert

EMBED, HIDDEN, EXPERTS, TOKENS = 6, 10, 8, 24


def leaves(seed: int = 0, experts: int = EXPERTS, **extra: Any) -> tuple[Any, ExpertLeaves]:
    rng = np.random.default_rng(seed)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    weights = (
        normal(experts, EMBED, HIDDEN),
        normal(experts, EMBED, HIDDEN),
        normal(experts, HIDDEN, EMBED),
    )
    return normal(TOKENS, EMBED), ExpertLeaves(normal(EMBED, experts), weights, **extra)


def sigmoid(z: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-z))


def softmax(z: np.ndarray) -> np.ndarray:
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def by_hand(router: Router, z: np.ndarray, bias: np.ndarray, k: int) -> Any:
    """(chosen, shares) of each token, by loops over DeepSeek's description."""
    scores = sigmoid(z) if isinstance(router, SigmoidRouter) else softmax(z)
    chosen, shares = [], []
    for own, compared in zip(scores, scores + bias, strict=True):
        open_to = np.ones(len(own), bool)
        if (groups := router.groups) is not None:
            parts = compared.reshape(groups.count, -1)
            worth = np.sort(parts, -1)[:, ::-1][:, : groups.best].sum(-1)
            best = np.argsort(-worth, kind="stable")[: groups.chosen]
            open_to = np.isin(np.arange(len(own)) // parts.shape[1], best)
        order = np.argsort(-np.where(open_to, compared, -np.inf), kind="stable")[:k]
        share = own[order] / (own[order].sum() if router.renormalise else 1.0)
        chosen.append(order)
        shares.append(share * router.scale)
    return np.stack(chosen), np.stack(shares)


ROUTERS = {
    "Mixtral": SoftmaxRouter(),
    "Switch, Qwen2-MoE": SoftmaxRouter(renormalise=False),
    "DeepSeek-V2": SoftmaxRouter(renormalise=False, scale=16.0, groups=Groups(4, 2)),
    "DeepSeek-V3": SigmoidRouter(scale=2.5, bias=True, groups=Groups(4, 2, best=2)),
    "sigmoid": SigmoidRouter(),
    "softmax, biased": SoftmaxRouter(bias=True, scale=2.0),
}


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("name", ROUTERS)
def test_choices_and_shares_are_those_of_the_formula(name: str, k: int) -> None:
    router = ROUTERS[name]
    rng = np.random.default_rng(k)
    z, bias = rng.normal(size=(TOKENS, EXPERTS)), 0.3 * rng.normal(size=EXPERTS)
    bias = bias if router.bias else np.zeros(EXPERTS)
    given = jnp.asarray(bias, jnp.float32) if router.bias else None
    chosen = router.choose(jnp.asarray(z, jnp.float32), given, k)
    shares = router.shares(jnp.asarray(z, jnp.float32), chosen)
    wanted, oracle = by_hand(router, z, bias, k)
    np.testing.assert_array_equal(chosen, wanted)
    np.testing.assert_allclose(shares, oracle, rtol=2e-6)


class Products(Router):
    """Scores that are no probabilities; low logits have scores of zero."""

    def scores(self, logits: jax.Array) -> jax.Array:
        return jnp.exp(logits)


@pytest.mark.parametrize("router", [SigmoidRouter(scale=2.5), Products(scale=2.5)])
@pytest.mark.parametrize("logit", [-40.0, -60.0])
def test_shares_of_low_logits_are_those_of_the_formula_with_their_gradients(
    router: Router, logit: float
) -> None:
    """Their scores are so small that the square of their sum is none."""
    z, chosen = logit + np.arange(4.0)[None], jnp.array([[3, 1]])
    scores = sigmoid(z) if isinstance(router, SigmoidRouter) else np.exp(z)
    own = scores[:, [3, 1]]
    expected = own / own.sum()
    shares = lambda z: router.shares(z, chosen)[0]  # noqa: E731
    found, slopes = shares(jnp.float32(z)), jax.jacobian(shares)(jnp.float32(z))[:, 0]
    np.testing.assert_allclose(found, 2.5 * expected[0], rtol=1e-5)
    product = 2.5 * expected[0, 0] * expected[0, 1]  # both scores are an exponential there
    np.testing.assert_allclose(
        slopes[:, [3, 1]], [[product, -product], [-product, product]], rtol=1e-5
    )
    assert not slopes[:, [0, 2]].any()
    if isinstance(router, SigmoidRouter):
        np.testing.assert_allclose(
            router.probabilities(jnp.float32(z)), scores / scores.sum(), rtol=1e-5
        )


@pytest.mark.parametrize("router", [SigmoidRouter(), Products()])
def test_a_token_whose_scores_are_all_zero_has_finite_gradients(router: Router) -> None:
    z = jnp.full((1, 4), -200.0)
    shares = lambda z: router.shares(z, jnp.array([[3, 1]]))  # noqa: E731
    assert np.isfinite(shares(z)).all() and np.isfinite(jax.jacobian(shares)(z)).all()
    balance = Balance(1.0)
    x, given = leaves(tally=jnp.ones(tally_size(EXPERTS)))
    layer = ExpertLayer(2, silu, SigmoidRouter(), balance=balance)
    low = given._replace(router=given.router - 300.0 * jnp.sign(given.router))
    gradients = jax.jit(jax.grad(lambda g: layer(x, g).sum()))(low)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))


def test_a_router_that_does_not_renormalise_learns_with_one_expert_a_token() -> None:
    x, given = leaves()

    def moved(router: Router) -> jax.Array:
        layer = ExpertLayer(1, silu, router)
        run = jax.grad(lambda r: layer(x, given._replace(router=r)).sum())
        return jax.jit(run)(given.router)

    np.testing.assert_array_equal(moved(SoftmaxRouter()), 0.0)
    assert np.abs(moved(SoftmaxRouter(renormalise=False))).max() > 1e-3
    assert np.abs(moved(SigmoidRouter(renormalise=False))).max() > 1e-3


def test_one_expert_is_the_dense_layer_and_a_shared_one_is_added_to_the_others() -> None:
    x, given = leaves(experts=1)
    gate, up, down = (w[0] for w in given.weights)
    dense = (silu(x @ gate) * (x @ up)) @ down
    np.testing.assert_allclose(jax.jit(ExpertLayer(1, silu))(x, given), dense, rtol=1e-5, atol=1e-5)
    x, many = leaves(1)
    layer = jax.jit(ExpertLayer(2, silu))
    alone = layer(x, many)
    beside = many._replace(shared=(gate, up, down))
    shared = (silu(x @ gate) * (x @ up)) @ down
    found = layer(x, beside)
    np.testing.assert_allclose(found - alone, shared, rtol=1e-4, atol=1e-4)
    weigh = jnp.ones((EMBED, 1))
    found = layer(x, beside._replace(shared_router=weigh))
    wanted = shared * jax.nn.sigmoid(x @ weigh)
    np.testing.assert_allclose(found - alone, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("factor", [0.3, 1.0, 1.2])
def test_later_choices_are_dropped_and_their_shares_are_lost(factor: float, padding: bool) -> None:
    capacity = Capacity(factor, routing_group=8)
    x, given = leaves(2)
    real = np.random.default_rng(1).random(TOKENS) < (0.6 if padding else 2.0)
    facts = TokenFacts(real=jnp.asarray(real) if padding else None)
    free = ExpertLayer(2, silu).route(x, given)
    found = ExpertLayer(2, silu, capacity=capacity).route(x, given, facts)
    room, chosen = capacity.rows(EXPERTS, 2), np.asarray(free.chosen)
    assert room == max(int(np.ceil(factor * 8 * 2 / EXPERTS)), 1)
    for group in range(TOKENS // 8):
        taken = np.zeros(EXPERTS, int)
        for j in range(2):
            for t in range(8 * group, 8 * group + 8):
                expert = chosen[t, j]
                kept = taken[expert] < room and real[t]
                taken[expert] += kept
                assert found.chosen[t, j] == (expert if kept else EXPERTS)
                assert found.shares[t, j] == (free.shares[t, j] if kept else 0.0)
    assert (np.asarray(found.chosen) == EXPERTS).any()


def test_capacity_for_all_is_dropless_and_what_is_dropped_has_no_row() -> None:
    x, given = leaves(3)
    loss = lambda layer, g: jnp.sum(layer(x, g) ** 2)  # noqa: E731
    run = lambda layer: jax.jit(jax.value_and_grad(partial(loss, layer)))(given)  # noqa: E731
    wide = run(ExpertLayer(2, silu, capacity=Capacity(EXPERTS / 2, TOKENS)))
    for a, b in zip(*map(jax.tree.leaves, (wide, run(ExpertLayer(2, silu)))), strict=True):
        np.testing.assert_array_equal(a, b)
    chosen = np.array([[0, 3], [3, 3], [1, 3]])
    plan = plan_rows(jnp.asarray(chosen), 3, 1, most=3)
    np.testing.assert_array_equal(plan.slots, [0, 4, 6])
    np.testing.assert_array_equal(plan.places, [[0, 3], [3, 3], [1, 3]])
    np.testing.assert_array_equal(plan.owners[:2], [0, 1])
    # None at all.
    plan = plan_rows(jnp.full((4, 2), 3), 3, 8, most=4)
    assert (np.asarray(plan.slots) == 8).all() and (plan.places == len(plan.slots)).all()


def auxiliary(router: Router, x: Any, r: Any, w: Any, k: int, balance: Balance) -> Any:
    """W times both losses, by their formulas in fp64."""
    z = x @ r
    p = jax.nn.softmax(z) if isinstance(router, SoftmaxRouter) else jax.nn.sigmoid(z)
    p = p / p.sum(-1, keepdims=True)
    chosen = jax.lax.top_k(jax.lax.stop_gradient(p), k)[1]
    f = jnp.einsum("t,tke->e", w, jax.nn.one_hot(chosen, EXPERTS)) / (k * w.sum())
    even = EXPERTS * jnp.sum(f * jnp.einsum("t,te->e", w, p))
    z2 = jnp.sum(w * jax.nn.logsumexp(z, axis=-1) ** 2)
    return balance.loss_weight * even + balance.z_loss_weight * z2, (even, z2, f)


@pytest.mark.parametrize("router", [SoftmaxRouter(), SigmoidRouter()])
def test_auxiliary_losses_reach_the_router_and_its_inputs_and_are_counted(router: Router) -> None:
    """Their gradients are those of the formula, times what the tally holds; and the tally's is
    what was counted."""
    balance, seed, k = Balance(0.7, 0.3), 0.125, 2
    x, given = leaves(4, tally=jnp.full(tally_size(EXPERTS), seed))
    w = jnp.asarray(np.random.default_rng(0).integers(0, 2, TOKENS), jnp.float32)
    dy = jnp.asarray(np.random.default_rng(1).normal(size=x.shape), jnp.float32)

    def out(layer: ExpertLayer, x: Any, leaves: ExpertLeaves) -> jax.Array:
        return jnp.sum(layer(x, leaves, TokenFacts(w)) * dy)

    grad = lambda layer: jax.jit(jax.grad(partial(out, layer), argnums=(0, 1)))(x, given)  # noqa: E731
    plain = ExpertLayer(k, silu, router)
    (dx, with_both), (dx0, without) = grad(replace(plain, balance=balance)), grad(plain)
    with jax.enable_x64(True):
        wide = (np.asarray(each, np.float64) for each in (x, given.router, w))
        formula = jax.grad(auxiliary, argnums=(1, 2), has_aux=True)
        found = jax.tree.map(np.asarray, formula(router, *wide, k, balance))
    (ax, ar), (even, z2, f) = found
    np.testing.assert_allclose(dx - dx0, seed * ax, rtol=1e-4, atol=3e-6)
    np.testing.assert_allclose(with_both.router - without.router, seed * ar, rtol=1e-4, atol=1e-5)
    tally = np.asarray(with_both.tally)
    np.testing.assert_allclose(tally[:EXPERTS], f * k * w.sum(), rtol=1e-6)
    found = dict(zip(BESIDE_LOADS, tally[EXPERTS:], strict=True))
    np.testing.assert_allclose(found["balance"], even, rtol=1e-6)
    np.testing.assert_allclose(found["z"], z2, rtol=1e-6)
    assert found["dropped"] == 0.0
    assert 0 < found["entropy"] < np.log(EXPERTS) * w.sum()
    sure = leaves(4, tally=jnp.ones(tally_size(EXPERTS)))[1]
    sure = sure._replace(router=300.0 * sure.router)  # some probabilities are zero
    tally = jax.grad(lambda g: ExpertLayer(k, silu, router, balance=balance)(x, g).sum())(
        sure
    ).tally
    assert np.isfinite(tally).all()


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"router": "softmax"}, "mlp.router='softmax'; use SoftmaxRouter() or SigmoidRouter()"),
    ({"router": Router()}, "use SoftmaxRouter() or SigmoidRouter()"),
    ({"router": SoftmaxRouter(scale=0.0)}, "mlp.router.scale=0.0 must be a finite number above 0"),
    ({"router": SoftmaxRouter(groups=Groups(3, 1))}, "count=3 does not divide experts=8"),
    ({"router": SoftmaxRouter(groups=Groups(8, 1))}, "are fewer than experts_per_token=2; use ch"),
    ({"router": SoftmaxRouter(groups=Groups(4, 5))}, "chosen=5 of count=4 groups; use at most"),
    ({"router": SoftmaxRouter(groups=Groups(4, 2, 3))}, "best=3 of 2 experts in a group"),
    ({"capacity": Capacity(-1.0)}, "mlp.capacity.factor=-1.0 must be a finite number above 0"),
    ({"capacity": 2.0}, "mlp.capacity=2.0; use Capacity(1.25), or None"),
    ({"balance": Balance(-1)}, "mlp.balance.loss_weight=-1 must be a finite number of 0 or more"),
    ({"balance": Balance(bias_rate=1e-3)}, "moves a router's bias; give it bias=True"),
    ({"shared": SharedExpert(0)}, "mlp.shared.hidden=0; use a whole number of at least 1"),
]


@pytest.mark.parametrize(("fields", "said"), WRONG, ids=[said for _, said in WRONG])
def test_what_is_wrong_with_the_parts_of_a_mixture(fields: dict[str, Any], said: str) -> None:
    moe = jaxtrain.MoeConfig(8, experts=8, **fields)
    block = jaxtrain.BlockConfig(jaxtrain.AttentionConfig(heads=2), moe)
    (found,) = DecoderConfig(vocab=8, embed=8, layers=1, period=(block,)).violations()
    assert said in found
