"""Rows sent to the devices that have their experts: against loops, and against fp64."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxtrain.collectives.exchange import Exchange
from jaxtrain.collectives.ring import Ring
from jaxtrain.collectives.rows import Padded, Ragged
from jaxtrain.moe.across import experts_of_rows, plan_sends
from jaxtrain.moe.layer import ExpertLayer, ExpertLeaves, TokenFacts
from jaxtrain.moe.room import chunk_count, sent_rows
from jaxtrain.moe.router import Capacity
from jaxtrain.moe.rows import combine, dispatch
from jaxtrain.transformer.feed_forward import silu

DEVICES, EXPERTS, EMBED, HIDDEN, TOKENS, K = 4, 8, 6, 8, 12, 2
CHOSEN = {
    "ragged": [[0, 3], [7, 1], [2, 3], [3, 6], [5, 3]],
    "one device has all, the others nothing": [[4, 5], [5, 4], [4, 5], [5, 4], [4, 5]],
    "some are dropped": [[0, 8], [8, 8], [7, 0], [8, 3], [1, 8]],
    "all are dropped": [[8, 8]] * 5,
    "no tokens": np.zeros((0, 2), int),
}


@pytest.mark.parametrize("name", CHOSEN)
def test_rows_lie_device_after_device_as_by_hand(name: str) -> None:
    chosen = np.asarray(CHOSEN[name], np.int32)
    tokens, room = len(chosen), 2 * len(chosen)
    planned = jax.jit(plan_sends, static_argnums=(1, 2, 3), static_argnames="packed")
    sends = planned(chosen, EXPERTS, DEVICES, room, packed=False)
    wanted = np.full((DEVICES, room), chosen.size)
    sizes = np.zeros((DEVICES, EXPERTS // DEVICES), int)
    for device in range(DEVICES):
        row = 0
        for local in range(EXPERTS // DEVICES):
            for slot in np.flatnonzero(chosen.ravel() == device * (EXPERTS // DEVICES) + local):
                wanted[device, row], row = slot, row + 1
                sizes[device, local] += 1
    np.testing.assert_array_equal(sends.plan.slots, wanted.ravel())
    np.testing.assert_array_equal(sends.sizes, sizes)
    found = np.asarray(experts_of_rows(sends.sizes, room)).reshape(DEVICES, room)
    for device in range(DEVICES):
        filled = np.repeat(np.arange(2), sizes[device])
        np.testing.assert_array_equal(found[device], [*filled, *[2] * (room - len(filled))])
    np.testing.assert_array_equal(sends.begins, np.arange(DEVICES) * room)
    # Close together: the same rows without what is empty between.
    packed = planned(chosen, EXPERTS, DEVICES, room, packed=True)
    taken = [slot for slot in wanted.ravel() if slot < chosen.size]
    rest = [chosen.size] * (chosen.size - len(taken))
    np.testing.assert_array_equal(packed.plan.slots, [*taken, *rest])
    np.testing.assert_array_equal(packed.begins, np.cumsum(sizes.sum(1)) - sizes.sum(1))
    np.testing.assert_array_equal(packed.sizes, sizes)
    # There and back again.
    x = np.random.default_rng(0).normal(size=(tokens, 3)).astype(np.float32)
    back = combine(dispatch(jnp.asarray(x), sends.plan), sends.plan)
    np.testing.assert_array_equal(back, np.where((chosen < EXPERTS)[..., None], x[:, None], 0.0))


def test_room_is_for_the_worst_case_and_no_more() -> None:
    assert sent_rows(16, 2, 8, 4, None, None) == 32
    assert sent_rows(16, 3, 8, 8, None, None) == 16, "a token has one choice of one expert"
    assert sent_rows(16, 2, 8, 4, *Capacity(1.0, 8).of_group(8, 2)) == 2 * 2 * 2
    assert sent_rows(16, 2, 8, 4, *Capacity(100.0, 8).of_group(8, 2)) == 32


@pytest.mark.parametrize(
    ("tokens", "chunk", "group", "count"),
    [(16, None, None, 1), (16, 16, None, 1), (16, 5, None, 4), (15, 6, None, 3), (7, 2, None, 7),
     (16, 4, 8, 2), (24, 17, 8, 3)],
)  # fmt: skip
def test_chunks_are_equal_and_hold_whole_groups(
    tokens: int, chunk: int | None, group: int | None, count: int
) -> None:
    assert chunk_count(tokens, chunk, group) == count


def problem(favour: int | None = None) -> tuple[Any, Any, ExpertLeaves]:
    """x and dy of all devices, and the leaves; all tokens to this expert and the next."""
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.normal(size=shape)  # noqa: E731
    x, dy, router = normal(DEVICES * TOKENS, EMBED), normal(DEVICES * TOKENS, EMBED), None
    router = normal(EMBED, EXPERTS)
    if favour is not None:
        x[:, 0] = 1.0
        router[0, favour : favour + 2] += 40.0
    into = (EXPERTS, EMBED, HIDDEN)
    weights = (normal(*into), normal(*into), normal(EXPERTS, HIDDEN, EMBED))
    return x, dy, ExpertLeaves(router, weights)


def dense(x: Any, dy: Any, leaves: ExpertLeaves) -> Any:
    """Every expert of every token in fp64, weighted by its share, and gradients."""

    def out(x: Any, leaves: ExpertLeaves) -> Any:
        z = x @ leaves.router
        chosen = jax.lax.top_k(jax.lax.stop_gradient(z), K)[1]
        kept = jax.nn.one_hot(chosen, EXPERTS).any(1)
        shares = jax.nn.softmax(jnp.where(kept, z, -jnp.inf))
        gate, up, down = leaves.weights
        h = silu(jnp.einsum("td,edh->teh", x, gate)) * jnp.einsum("td,edh->teh", x, up)
        return jnp.einsum("te,teh,ehd->td", shares, h, down)

    with jax.enable_x64(True):
        y, back = jax.vjp(out, x, leaves)
        return jax.tree.map(np.asarray, (y, *back(jnp.asarray(dy))))


@lru_cache
def sharded(layer: ExpertLayer, exchange: Exchange) -> Any:
    mesh = Mesh(np.array(jax.devices()[:DEVICES]), ("expert",))
    split = P("expert")
    specs = ExpertLeaves(P(), (split,) * 3)

    def on_device(x: Any, dy: Any, leaves: ExpertLeaves) -> Any:
        used = leaves._replace(router=jax.lax.pcast(leaves.router, ("expert",), to="varying"))
        y, back = jax.vjp(lambda x, leaves: layer(x, leaves, TokenFacts(), exchange), x, used)
        dx, grads = back(dy)
        return y, dx, grads._replace(router=jax.lax.psum(grads.router, "expert"))

    run = jax.shard_map(
        on_device, mesh=mesh, in_specs=(split, split, specs), out_specs=(split, split, specs)
    )
    return jax.jit(run)


ALL = Exchange(("expert",), 1.0, ("expert",))
EXCHANGES = {
    "at once": ALL,
    "in chunks": Exchange(("expert",), 1.0, ("expert",), chunk=5),
    "ring": Exchange(("expert",), 1.0, ("expert",), Padded(Ring())),
    "ragged": Exchange(("expert",), 1.0, ("expert",), Ragged()),
}


def ragged_by_hand(
    rows: Any, out: Any, begins: Any, sizes: Any, places: Any, coming: Any, *, axis_name: str
) -> Any:
    """What `lax.ragged_all_to_all` is said to do, which XLA:CPU does not: from all that all devices
    have. What comes in other numbers than it was said to spoils everything."""
    gathered = partial(jax.lax.all_gather, axis_name=axis_name)
    me, devices = jax.lax.axis_index(axis_name), jax.lax.axis_size(axis_name)
    given, begins, sizes, places = map(gathered, (rows, begins, sizes, places))
    at = jnp.arange(len(out))
    for sender in range(devices):
        number = at - places[sender, me]
        here = (number >= 0) & (number < sizes[sender, me])
        sent = jnp.take(given[sender], begins[sender, me] + number, axis=0, mode="clip")
        out = jnp.where(here[:, None], sent, out)
    return jnp.where((sizes[:, me] == coming).all(), out, jnp.nan)


@pytest.mark.parametrize(
    ("name", "favour"),
    [("at once", None), ("at once", 6), ("in chunks", None), ("ragged", None), ("ragged", 6),
     pytest.param("in chunks", 0, marks=pytest.mark.slow),
     pytest.param("ring", None, marks=pytest.mark.slow)],
)  # fmt: skip
def test_outputs_and_gradients_are_those_of_fp64(
    name: str, favour: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one favoured, three of the devices are sent nothing, and the fourth everything."""
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", ragged_by_hand)
    x, dy, leaves = problem(favour)
    wanted = dense(x, dy, leaves)
    narrow = jax.tree.map(partial(np.asarray, dtype=np.float32), (x, dy, leaves))
    found = sharded(ExpertLayer(K, silu), EXCHANGES[name])(*narrow)
    for a, b in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        assert np.abs(a - b).max() <= 1e-5 * np.abs(b).max() + 1e-12


def test_what_is_dropped_is_the_same_where_experts_are_apart() -> None:
    x, dy, leaves = problem()
    narrow = jax.tree.map(partial(np.asarray, dtype=np.float32), (x, dy, leaves))
    layer = ExpertLayer(K, silu, capacity=Capacity(0.8, routing_group=6))
    y = jax.jit(layer)(narrow[0], narrow[2])
    found = sharded(layer, ALL)(*narrow)[0]
    np.testing.assert_allclose(found, y, rtol=1e-5, atol=1e-5)
    free = jax.jit(ExpertLayer(K, silu))(narrow[0], narrow[2])
    assert (np.abs(free - y).max(axis=1) > 1e-3).any()
