"""Gradients that are scattered while they are made, in the loop over layers, against one device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxtrain.collectives.choice import Collectives
from jaxtrain.collectives.lax_form import Lax
from jaxtrain.collectives.matmul import PRODUCT_SCATTERS
from jaxtrain.collectives.ring import Ring
from jaxtrain.collectives.vary import vary
from jaxtrain.mesh.roles import roles_of
from jaxtrain.mesh.sharding import ShardingRules, fsdp, place, table, tensor
from jaxtrain.nn.explicit import Explicit
from jaxtrain.nn.local import Local
from jaxtrain.nn.stack import LayerLoop, Layers

SIZES = {"data": 2, "fsdp": 2, "tensor": 2}
AXES = tuple(SIZES)
TOKENS, EMBED, MLP, LAYERS = 24, 8, 20, 3
LEAVES = {
    "up": ((EMBED, MLP), ("embed", "mlp")),
    "gate": ((EMBED, MLP), ("embed", "mlp")),
    "down": ((MLP, EMBED), ("mlp", "embed")),
    "held": ((EMBED, MLP), ("embed", "mlp")),
    "twice": ((EMBED, MLP), ("embed", "mlp")),
    "read": ((EMBED, MLP), ("embed", "mlp")),
    "scale": ((EMBED,), ("embed",)),
}
TILED = {"up", "gate", "down"}
"""What the body gives `column` or `row` once and reads nowhere else, and is trained."""
FROZEN = frozenset({"held"})
PLACES, _ = place(
    {k: jax.ShapeDtypeStruct((LAYERS, *shape), jnp.float32) for k, (shape, _) in LEAVES.items()},
    {k: ("layers", *axes) for k, (_, axes) in LEAVES.items()},
    fsdp() | tensor(),
    sizes=SIZES,
)
REST = {
    **dict.fromkeys(("up", "gate", "held", "twice", "read"), P(None, "fsdp", "tensor")),
    "down": P(None, "tensor", "fsdp"),
    "scale": P(),
}
ROWS = P(("data", "fsdp", "tensor"))


def body_of(comm: Any) -> Any:
    def body(p: Any, x: jax.Array, extras: Any, layer: Any) -> jax.Array:
        up, gate, held = comm.column(x * p["scale"][None], p["up"], p["gate"], p["held"])
        once, again = comm.column(x, p["twice"], p["read"])
        (twice,) = comm.column(jnp.sin(x), p["twice"])
        hidden = jnp.tanh(up + held) * gate + once * twice + again * p["read"][:1]
        return x + jnp.tanh(comm.row(jnp.sin(hidden), p["down"])) * extras[layer]

    return body


def layers(comm: Any, loop: LayerLoop) -> Layers:
    return Layers(
        body_of(comm),
        fetch=lambda p: comm.fetch(p, ""),
        scatter=lambda g: comm.scatter(g, ""),
        loop=loop,
        frozen=comm.frozen_of(problem()[0], ""),
        tiled=comm.tiled_products("", body_of),
    )


def explicit(tensor_by: Any = Lax(), **fields: Any) -> Explicit:  # noqa: B008 (frozen)
    collectives = Collectives(Lax(), tensor_by, Ring(1))
    return Explicit(
        sizes=SIZES,
        places=PLACES,
        roles=roles_of(tensor().activations, SIZES),
        frozen=FROZEN,
        collectives=collectives,
        products=frozenset(LEAVES) - {"scale"},
        **fields,
    )


def problem() -> tuple[dict[str, jax.Array], jax.Array, jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    params = {
        k: jnp.asarray(0.2 * rng.normal(size=(LAYERS, *s)), jnp.float32)
        for k, (s, _) in LEAVES.items()
    }
    x, dy = (jnp.asarray(rng.normal(size=(TOKENS, EMBED)), jnp.float32) for _ in range(2))
    return params, x, dy, jnp.arange(1.0, LAYERS + 1)


def grads_of(run: Any, params: Any, x: jax.Array, dy: jax.Array) -> tuple[Any, jax.Array]:
    trained = {k: p for k, p in params.items() if k not in FROZEN}
    held = {k: p for k, p in params.items() if k in FROZEN}
    return jax.grad(lambda p, x: jnp.sum(run({**p, **held}, x) * dy), (0, 1))(trained, x)


@pytest.fixture(scope="module")
def wanted() -> Any:
    params, x, dy, extras = problem()

    def plain(params: Any, x: jax.Array) -> jax.Array:
        for layer in range(LAYERS):
            x = body_of(Local())({k: p[layer] for k, p in params.items()}, x, extras, layer)
        return x

    return grads_of(plain, params, x, dy)


def on_mesh(comm: Explicit, loop: LayerLoop, *, check_vma: bool = True) -> Any:
    """The gradients, by the problem's arrays."""
    mesh = jax.make_mesh(
        tuple(SIZES.values()), AXES, axis_types=(jax.sharding.AxisType.Auto,) * len(AXES)
    )
    trained = {k: spec for k, spec in REST.items() if k not in FROZEN}

    def on_device(params: Any, x: Any, dy: Any, extras: Any) -> Any:
        params, x, dy, extras = jax.tree.map(lambda a: vary(a, AXES), (params, x, dy, extras))
        run = layers(comm, loop)
        grads, dx = grads_of(lambda p, x: run(p, x, extras), params, x, dy)
        axes = {k: AXES if k == "scale" else ("data",) for k in grads}
        return {k: jax.lax.psum(g, axes[k]) for k, g in grads.items()}, dx

    return jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(REST, ROWS, ROWS, P()),
        out_specs=(trained, ROWS),
        check_vma=check_vma,
    )


CASES = [
    (LayerLoop(unroll=True, remat="none"), Lax(), True),
    (LayerLoop(unroll=True, remat="dots"), Ring(), True),
    (LayerLoop(prefetch=True, remat="full"), Ring(1), False),
    (LayerLoop(prefetch=True, remat="dots", reshard_after_forward=False), Lax(), False),
    (LayerLoop(prefetch=False, remat="dots_and_attention"), Ring(1, unroll=False), True),
]


@pytest.mark.parametrize(("loop", "by", "check_vma"), CASES, ids=str)
def test_gradients_equal_one_device(loop: Any, by: Any, check_vma: bool, wanted: Any) -> None:
    grads, dx = jax.jit(on_mesh(explicit(by), loop, check_vma=check_vma))(*problem())
    assert grads.keys() == LEAVES.keys() - FROZEN
    for name, gradient in {**grads, "x": dx}.items():
        expected = {**wanted[0], "x": wanted[1]}[name]
        scale = np.abs(expected).max()
        np.testing.assert_allclose(gradient, expected, rtol=0, atol=1e-5 * scale, err_msg=name)


def made_in_tiles(comm: Explicit, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """(shape of x or dy transposed, of the other, mesh axes) of every product that makes a tile."""
    found: list[Any] = []
    right = PRODUCT_SCATTERS["weight gradients matmul"]

    def noted(xs: Any, weights: Any, axes: Any, *how: Any) -> Any:
        found.append((xs[0].shape, weights[0].shape, axes))
        return right(xs, weights, axes, *how)

    monkeypatch.setitem(PRODUCT_SCATTERS, "weight gradients matmul", noted)
    jax.eval_shape(on_mesh(comm, LayerLoop(prefetch=False)), *problem())
    return found


def test_what_is_used_once_in_a_product_alone_goes_in_tiles(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows of column-split weights, columns of row-split ones: dim `embed` of all three. Tokens are
    those of a row of devices along `tensor`."""
    tokens, hidden = TOKENS // 4, MLP // 2
    found = made_in_tiles(explicit(), monkeypatch)
    assert found == [((EMBED, tokens), (tokens, hidden), ("fsdp",))] * 3


BOTH_DIMS, _ = place(
    {k: jax.ShapeDtypeStruct((LAYERS, *shape), jnp.float32) for k, (shape, _) in LEAVES.items()},
    {k: ("layers", *axes) for k, (_, axes) in LEAVES.items()},
    ShardingRules(params=table({"embed": "fsdp", "mlp": "data"})),
    sizes=SIZES,
)


def test_nothing_else_does() -> None:
    params = {k: p[0] for k, p in problem()[0].items()}
    assert explicit().tiles(params, "").keys() == TILED | {"twice", "read"}
    assert explicit().pregathered().tiled_products("", body_of) is None
    assert not replace(explicit(), places=BOTH_DIMS).tiles(params, "")
    assert Local().tiled_products("", body_of) is None


def test_no_weight_and_no_tile_is_kept_for_the_backward_pass() -> None:
    comm, kept = explicit(), []

    def on_device(params: Any, x: Any) -> Any:
        params, x, extras = jax.tree.map(lambda a: vary(a, AXES), (params, x, problem()[3]))
        loop = LayerLoop(prefetch=False, remat="none")
        saved = layers(comm, loop).forward_with_residuals(params, x, extras)[1]
        kept.extend(leaf.shape[1:] for leaf in jax.tree.leaves(saved))
        return x

    mesh = jax.make_mesh(
        tuple(SIZES.values()), AXES, axis_types=(jax.sharding.AxisType.Auto,) * len(AXES)
    )
    params, x, *_ = problem()
    run = jax.shard_map(on_device, mesh=mesh, in_specs=(REST, ROWS), out_specs=ROWS)
    jax.eval_shape(run, params, x)
    wholes = {(EMBED, MLP // 2), (MLP // 2, EMBED)}
    tiles = {(EMBED // 2, MLP // 2), (MLP // 2, EMBED // 2)}
    assert kept and (wholes | tiles).isdisjoint(kept)
