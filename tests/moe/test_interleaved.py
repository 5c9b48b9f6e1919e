"""Chunks whose rows travel during products of others: against all tokens on one device, in fp64."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxtrain.collectives.exchange import ALONE, Exchange
from jaxtrain.collectives.recursive import Recursive
from jaxtrain.collectives.ring import Ring
from jaxtrain.collectives.rows import Padded
from jaxtrain.moe.layer import ExpertLayer, ExpertLeaves, TokenFacts
from jaxtrain.moe.router import Capacity
from jaxtrain.transformer.feed_forward import silu

DEVICES, EXPERTS, EMBED, HIDDEN, TOKENS, K, RANK = 4, 8, 6, 8, 12, 2, 3
E = "expert"


def problem(*, shared: bool, favour: int | None = None) -> tuple[Any, Any, ExpertLeaves]:
    """x and dy of all devices, and leaves with adapters; all tokens to this expert and the next."""
    rng = np.random.default_rng(1)
    normal = lambda *shape: rng.normal(size=shape)  # noqa: E731
    x, dy = normal(DEVICES * TOKENS, EMBED), normal(DEVICES * TOKENS, EMBED)
    router = normal(EMBED, EXPERTS)
    if favour is not None:
        x[:, 0] = 1.0
        router[0, favour : favour + 2] += 40.0
    shapes = [(EMBED, HIDDEN), (EMBED, HIDDEN), (HIDDEN, EMBED)]
    pair = lambda rows, columns, *first: (normal(*first, rows, RANK), normal(*first, RANK, columns))  # noqa: E731
    leaves = ExpertLeaves(
        router,
        tuple(normal(EXPERTS, *shape) for shape in shapes),
        adapters=tuple(pair(*shape, EXPERTS) for shape in shapes),
    )
    if not shared:
        return x, dy, leaves
    return (
        x,
        dy,
        leaves._replace(
            shared=tuple(normal(*shape) for shape in shapes),
            shared_router=normal(EMBED, 1),
            shared_adapters=tuple(pair(*shape) for shape in shapes),
        ),
    )


def run(layer: ExpertLayer, exchange: Exchange, x: Any, dy: Any, leaves: ExpertLeaves) -> Any:
    y, pull_back = jax.vjp(lambda x, w: layer(x, w, TokenFacts(), exchange), x, leaves)
    return y, *pull_back(dy)


@lru_cache
def sharded(layer: ExpertLayer, exchange: Exchange, shared: bool) -> Any:
    mesh, split, whole = Mesh(np.array(jax.devices()[:DEVICES]), (E,)), P(E), P()
    leaves = jax.tree.map(lambda _: whole, problem(shared=shared)[2])
    specs = leaves._replace(weights=(split,) * 3, adapters=((split,) * 2,) * 3)
    places = dict(in_specs=(split, split, specs), out_specs=(split, split, specs))
    return jax.jit(jax.shard_map(partial(run, layer, exchange), mesh=mesh, **places))


def exchange(chunk: int, by: Any = Ring()) -> Exchange:  # noqa: B008 (frozen)
    return Exchange((E,), 1.0, (E,), Padded(by), chunk, 1.0)


def slow(*case: Any) -> Any:
    return pytest.param(*case, marks=pytest.mark.slow)


EXCHANGES = {"two": exchange(6), "three": exchange(4), "by doubling": exchange(3, Recursive())}


@pytest.mark.parametrize(
    ("name", "shared", "favour"),
    [("three", True, None), slow("two", True, 2), slow("two", False, None),
     slow("three", False, 6), slow("by doubling", True, None)],
)  # fmt: skip
def test_outputs_and_gradients_are_those_of_all_tokens_at_once(
    name: str, shared: bool, favour: int | None
) -> None:
    """With one favoured, three devices receive nothing, and the fourth all rows."""
    x, dy, leaves = problem(shared=shared, favour=favour)
    layer = ExpertLayer(K, silu, adapter_scale=1.7)
    with jax.enable_x64(True):
        wide = jax.tree.map(jnp.asarray, (x, dy, leaves))
        wanted = jax.tree.map(np.asarray, run(layer, ALONE, *wide))
    narrow = jax.tree.map(partial(np.asarray, dtype=np.float32), (x, dy, leaves))
    found = sharded(layer, EXCHANGES[name], shared)(*narrow)
    for a, b in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        assert np.abs(a - b).max() <= 1e-5 * np.abs(b).max() + 1e-12


def test_what_does_not_fit_is_dropped_as_on_one_device() -> None:
    x, dy, leaves = problem(shared=False)
    narrow = jax.tree.map(partial(np.asarray, dtype=np.float32), (x, dy, leaves))
    layer = ExpertLayer(K, silu, capacity=Capacity(0.8, routing_group=6))
    y = jax.jit(layer)(narrow[0], narrow[2])
    found = sharded(layer, EXCHANGES["two"], False)(*narrow)[0]
    np.testing.assert_allclose(found, y, rtol=1e-4, atol=1e-4)


def equations(jaxpr: Any) -> list[Any]:
    """All equations, those within others too."""
    inner = [equations(sub) for e in jaxpr.eqns for sub in core.jaxprs_in_params(e.params)]
    return sum(inner, [*jaxpr.eqns])


@pytest.mark.parametrize(("shared", "open_chunks"), [(True, 0), (False, 1)])
def test_rows_wait_for_products_and_for_the_chunk_before(shared: bool, open_chunks: int) -> None:
    """By barriers, of which the compiled schedules for TPUs follow (`test_interleaved_on_tpus.py`).
    Without a shared expert no product is there for the first rows and the last outputs."""
    narrow = jax.tree.map(partial(np.asarray, dtype=np.float32), problem(shared=shared))
    layer, chunks = ExpertLayer(K, silu), 3
    traced = equations(jax.make_jaxpr(sharded(layer, EXCHANGES["three"], shared))(*narrow).jaxpr)
    barriers = [e for e in traced if e.primitive.name == "optimization_barrier"]
    behind = {id(var) for barrier in barriers for var in barrier.outvars}
    permutes = [e for e in traced if e.primitive.name == "ppermute"]
    # Rows there and outputs back; both again for gradients, and the gradients of both.
    assert len(permutes) == 6 * (DEVICES - 1) * chunks
    tied = [permute for permute in permutes if id(permute.invars[0]) in behind]
    assert len(tied) == len(permutes) * (chunks - open_chunks) / chunks
    # A chunk's tokens are dispatched once the rows of the one before it have arrived.
    tokens, room = TOKENS // chunks, TOKENS // chunks * K
    shapes = [[var.aval.shape for var in barrier.invars] for barrier in barriers]
    assert shapes.count([(tokens, EMBED), (DEVICES * room, EMBED)]) == 2 * (chunks - 1)


def test_chunks_of_one_device_send_nothing() -> None:
    """On meshes without the axis `expert`, where a communicator ties permutes all the same."""
    x, _, leaves = jax.tree.map(partial(np.asarray, dtype=np.float32), problem(shared=True))
    layer, alone = ExpertLayer(K, silu), Exchange(rows=Padded(Ring()), chunk=4, flops_per_byte=1.0)
    found = jax.jit(lambda x, leaves: layer(x, leaves, TokenFacts(), alone))(x, leaves)
    np.testing.assert_allclose(found, jax.jit(layer)(x, leaves), rtol=1e-4, atol=1e-4)
