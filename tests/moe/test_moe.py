"""Experts against a loop over all of them, and the laws of how rows are laid out."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.mesh.mesh import make_mesh, mesh_from_axes
from jaxtrain.mesh.sharding import fsdp, tensor
from jaxtrain.moe.block_loop import BlockLoop
from jaxtrain.moe.grouped import block_rows, grouped_matmul
from jaxtrain.moe.layer import ExpertLayer, ExpertLeaves, TokenFacts
from jaxtrain.moe.rows import combine, dispatch, plan_rows
from jaxtrain.nn.gspmd import Gspmd
from jaxtrain.nn.local import Local
from jaxtrain.transformer.feed_forward import gelu_tanh, silu

EMBED, HIDDEN = 6, 10
Weights = tuple[jax.Array, ...]


def moe_layer(
    x: jax.Array, router: jax.Array, weights: Weights, *, k: int, activation: Any
) -> jax.Array:
    return ExpertLayer(k, activation)(x, ExpertLeaves(router, weights))


def route(x: jax.Array, router: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    return ExpertLayer(k, silu).route(x, ExpertLeaves(router, ()))


def problem(
    tokens: int, experts: int, *, gated: bool = True, seed: int = 0
) -> tuple[jax.Array, jax.Array, Weights]:
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    into = [normal(experts, EMBED, HIDDEN) for _ in range(1 + gated)]
    down = normal(experts, HIDDEN, EMBED)
    return normal(tokens, EMBED), normal(EMBED, experts), (*into, down)


def by_hand(
    x: jax.Array, router: jax.Array, weights: Weights, chosen: np.ndarray, activation: Any
) -> jax.Array:
    """Every expert of every token; then Mixtral's formula: softmax over all experts, all but the
    chosen struck out, divided by what is left."""
    *into, down = weights
    shares = jnp.where(chosen, jax.nn.softmax(x @ router, axis=-1), 0.0)
    shares = shares / shares.sum(-1, keepdims=True)
    out = jnp.zeros_like(x)
    for expert in range(len(down)):
        h = activation(x @ into[0][expert])
        h = h * (x @ into[1][expert]) if len(into) > 1 else h
        out = out + shares[:, expert, None] * (h @ down[expert])
    return out


def compared(x: jax.Array, router: jax.Array, weights: Weights, k: int, activation: Any) -> Any:
    """Checks the output and all gradients; returns the gradients."""
    dy = np.random.default_rng(9).normal(size=x.shape).astype(np.float32)
    likeliest = np.argsort(-(np.asarray(x) @ np.asarray(router)), axis=-1, kind="stable")[:, :k]
    chosen = (likeliest[:, :, None] == np.arange(router.shape[1])).any(1)

    @partial(jax.jit, static_argnums=0)
    def both(run: Any, *inputs: Any) -> Any:
        y, back = jax.vjp(run, *inputs)
        return y, back(dy)

    found, grads = both(partial(moe_layer, k=k, activation=activation), x, router, weights)
    wanted, oracle = both(lambda x, r, w: by_hand(x, r, w, chosen, activation), x, router, weights)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(oracle), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
    return grads


# (tokens, experts, k): tokens that no number of experts divides, one or none, all experts.
TABLE = [(13, 2, 1), (13, 3, 2), (1, 4, 2), (37, 8, 4), (5, 8, 1), (64, 4, 4), (7, 1, 1), (0, 4, 2)]


@pytest.mark.parametrize(("tokens", "experts", "k"), TABLE)
def test_outputs_and_gradients_are_the_loops(tokens: int, experts: int, k: int) -> None:
    compared(*problem(tokens, experts), k, silu)


def test_without_a_gate_and_with_another_activation() -> None:
    compared(*problem(11, 4, gated=False), 2, gelu_tanh)


@pytest.mark.parametrize(("favour", "k"), [(0, 1), (3, 1), (1, 2)])
def test_an_expert_that_nobody_chooses_has_no_gradient(favour: int, k: int) -> None:
    """One that all choose, and with k=1 others that none does; with 2 one is kept out."""
    x, router, weights = problem(29, 4)
    x = x.at[:, 0].set(1.0)
    others = [e for e in range(4) if e != favour]
    shunned = others if k == 1 else others[-1:]
    router = router.at[0, favour].add(40.0).at[0, jnp.array(shunned)].add(-40.0)
    _, chosen = route(x, router, k)
    assert (np.asarray(chosen)[:, 0] == favour).all() and not np.isin(chosen, shunned).any()
    _, _, grads = compared(x, router, weights, k, silu)
    for leaf in grads:
        for expert in range(4):
            assert np.any(np.asarray(leaf[expert])) == (expert in np.asarray(chosen))


def test_equal_experts_go_by_number_and_shares_sum_to_one() -> None:
    x, router, _ = problem(9, 6)
    shares, chosen = route(x, jnp.tile(router[:, :1], (1, 6)), 3)
    np.testing.assert_array_equal(chosen, np.tile([0, 1, 2], (9, 1)))
    np.testing.assert_allclose(shares, 1 / 3, rtol=1e-6)
    shares, _ = route(x, router, 4)
    np.testing.assert_allclose(shares.sum(-1), 1.0, rtol=1e-6)
    assert (np.diff(shares, axis=-1) <= 0).all()


@pytest.mark.parametrize("slices", [2, 5])
def test_slices_of_the_hidden_dim_are_parts_of_a_sum(slices: int) -> None:
    """Output, and gradients of x and of the router: what tensor parallelism rests on."""
    x, router, weights = problem(13, 4)
    dy = np.random.default_rng(5).normal(size=x.shape).astype(np.float32)

    @jax.jit
    def both(x: jax.Array, router: jax.Array, weights: Weights) -> Any:
        y, back = jax.vjp(lambda x, r: moe_layer(x, r, weights, k=2, activation=silu), x, router)
        return y, *back(dy)

    def part(i: int) -> Weights:
        mine = slice(i * HIDDEN // slices, (i + 1) * HIDDEN // slices)
        *into, down = weights
        return (*(w[:, :, mine] for w in into), down[:, mine])

    whole = both(x, router, weights)
    parts = [both(x, router, part(i)) for i in range(slices)]
    for wanted, *found in zip(whole, *parts, strict=True):
        np.testing.assert_allclose(sum(found), wanted, rtol=1e-4, atol=1e-4)


PLANNED = jax.jit(plan_rows, static_argnums=(1, 2))
LARGEST = BlockLoop().largest_block


def choices(tokens: int, experts: int, k: int, seed: int) -> np.ndarray:
    """Each token's k different experts; with an odd seed most choose the same."""
    rng = np.random.default_rng(seed)
    odds = rng.dirichlet(np.full(experts, 0.3 if seed % 2 else 10.0)) + 1e-9
    rows = [rng.choice(experts, k, replace=False, p=odds / odds.sum()) for _ in range(tokens)]
    return np.stack(rows).astype(np.int32)


@pytest.mark.parametrize("largest", [LARGEST, 16, 1])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("tokens", "experts", "k"), [(1, 8, 2), (50, 3, 2), (200, 8, 1), (9, 9, 9)]
)
def test_every_slot_has_one_row_in_a_block_of_its_expert(
    tokens: int, experts: int, k: int, seed: int, largest: int
) -> None:
    chosen = choices(tokens, experts, k, seed)
    slots, places, owners = map(np.asarray, PLANNED(chosen, experts, largest))
    block = len(slots) // len(owners)
    assert block == block_rows(tokens * k, experts, largest)
    if largest == 1:
        assert len(slots) == tokens * k, "nothing is padded"
    real = slots < chosen.size
    assert sorted(slots[real]) == list(range(chosen.size))
    np.testing.assert_array_equal(slots[places.ravel()], np.arange(chosen.size))
    np.testing.assert_array_equal(owners[places // block], chosen)
    for expert in range(experts):  # tokens stay in order: what a device sums does not hang on ties
        mine = slots[real & (np.repeat(owners, block) == expert)]
        assert (np.diff(mine) > 0).all()


@pytest.mark.parametrize("experts", [1, 2, 8, 64])
def test_there_are_blocks_for_the_worst_case_and_no_more(experts: int) -> None:
    """Every expert but the first one row over a whole block is what needs the most."""
    for rows in (1, 7, 64, 1000, 4097):
        block = block_rows(rows, experts, LARGEST)
        assert block & (block - 1) == 0 and 8 <= block <= LARGEST
        taken = min(rows, experts)
        sizes = np.ones(taken, int)
        sizes[0] += rows - taken
        needed = int((-(-sizes // block)).sum())
        chosen = np.repeat(np.arange(taken), sizes)[:, None]
        have = len(
            jax.eval_shape(partial(plan_rows, experts=experts, largest=LARGEST), chosen).owners
        )
        assert have == needed
        if rows >= 32 * experts:
            assert have * block <= 1.25 * rows + block


def test_rows_and_slots_are_each_others_adjoints_and_no_gradient_is_a_scatter() -> None:
    plan, rng = PLANNED(choices(10, 4, 2, 0), 4, LARGEST), np.random.default_rng(0)
    x, rows, slots = (
        rng.normal(size=(*n, 3)).astype(np.float32) for n in ((10,), (len(plan.slots),), (10, 2))
    )
    for run, at, dy in ((dispatch, x, rows), (combine, rows, slots)):

        def pulled_back(at: Any, dy: Any, run: Any = run) -> Any:
            y, back = jax.vjp(lambda a: run(a, plan), at)
            return y, back(dy)[0]

        y, back = jax.jit(pulled_back)(at, dy)
        np.testing.assert_allclose(np.vdot(y, dy), np.vdot(at, back), rtol=1e-4)
        text = str(jax.make_jaxpr(pulled_back)(at, dy))
        assert "gather" in text and "scatter" not in text


def test_gradients_of_a_token_s_rows_are_added_up_in_fp32() -> None:
    """256 + 1 + 1 is 258, which bf16 has, but not 257, which rounds to 256."""
    plan = plan_rows(jnp.array([[0, 1, 2]]), 3, 1, most=3)
    dy = jnp.zeros((len(plan.slots), 1), jnp.bfloat16)
    dy = dy.at[plan.places[0]].set(jnp.array([[256.0], [1.0], [1.0]], jnp.bfloat16))
    (dx,) = jax.vjp(lambda x: dispatch(x, plan), jnp.ones((1, 1), jnp.bfloat16))[1](dy)
    assert float(dx[0, 0]) == 258.0


def test_in_bf16_weights_gradients_are_summed_in_fp32_and_routers_stay_as_they_are() -> None:
    """4096 rows of ones to one expert, in blocks: in bf16 the sum of blocks would be off."""
    rows, owners = np.full((4096, 2), 1.0078125, jnp.bfloat16), np.zeros(64, np.int32)
    weights = np.ones((2, 2, 1), jnp.bfloat16)

    def total(weights: jax.Array, rows: jax.Array, owners: jax.Array) -> jax.Array:
        return grouped_matmul(BlockLoop(), rows, weights, owners).astype(jnp.float32).sum()

    dw = jax.jit(jax.grad(total))(weights, rows, owners)
    np.testing.assert_array_equal(np.asarray(dw[0], np.float32), 4128.0)
    router = jnp.ones((3, 4))
    used = Local(jnp.bfloat16).fetch({"mlp.router": router, "mlp.up": router}, "")
    assert used["mlp.router"].dtype == jnp.float32 and used["mlp.up"].dtype == jnp.bfloat16
    x, router, wide = problem(13, 4)
    x = x.astype(jnp.bfloat16)
    experts = jax.jit(partial(moe_layer, k=2, activation=silu))
    found = experts(x, router, tuple(w.astype(jnp.bfloat16) for w in wide))
    assert found.dtype == jnp.bfloat16
    wanted = np.asarray(experts(x.astype(jnp.float32), router, wide))
    error = np.abs(np.asarray(found, np.float32) - wanted).max()
    assert error < 0.03 * np.abs(wanted).max()


def test_logits_of_routers_are_whole_fp32_where_products_are_not() -> None:
    x, router, _ = problem(13, 4)
    with jax.default_matmul_precision("default"):
        made = jax.make_jaxpr(partial(route, k=2))(x.astype(jnp.bfloat16), router)
    (product,) = [each for each in made.eqns if each.primitive.name == "dot_general"]
    assert product.params["precision"] == (jax.lax.Precision.HIGHEST,) * 2
    assert product.outvars[0].aval.dtype == jnp.float32


@pytest.mark.slow
def test_under_gspmd_a_mixture_saves_its_inputs_and_nothing_else() -> None:
    """What leaves a shard_map to be saved is as many copies as there are devices."""
    x, router, weights = problem(16, 4)
    mesh = make_mesh(mesh_from_axes(data=2, fsdp=2, tensor=2))
    comm = Gspmd(mesh=mesh, rules=fsdp() | tensor(), places={})
    layer, given = ExpertLayer(2, silu), (x, ExpertLeaves(router, weights))

    def out(x: Any, leaves: Any) -> jax.Array:
        return comm.experts(layer, x, leaves, TokenFacts())

    y, back = jax.vjp(out, *given)
    shapes = sorted(each.shape for each in jax.tree.leaves(given))
    assert sorted(each.shape for each in jax.tree.leaves(back)) == shapes
    wanted, alone = jax.vjp(layer, *given)
    np.testing.assert_allclose(y, wanted, rtol=1e-5, atol=1e-5)
    for found, each in zip(*map(jax.tree.leaves, (back(y), alone(wanted))), strict=True):
        np.testing.assert_allclose(found, each, rtol=1e-4, atol=1e-4)
