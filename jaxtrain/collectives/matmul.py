"""Collective matmul: a ring's hops hidden behind the products they feed (Wang et al. 2023,
"Overlap communication with dependent computation via decomposition").

Tokens are gathered for a column-split weight, and the product of a row-split one is summed and
scattered back. Neither waits for a whole collective: while a tile travels, the one that came
before it is multiplied. Inside `jax.shard_map` only.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxtrain.collectives.algorithm import accumulator, check_divides
from jaxtrain.collectives.ring import Moving, Ring, put, room_for, shift, take
from jaxtrain.collectives.vary import Index, MeshAxes, vary

Matrices = tuple[Float[Array, "_ _"], ...]
Whole = Float[Array, "all_tokens k"]
"""The tokens of all devices, gathered."""
Gathered = tuple[Matrices, Whole]
"""Products with the gathered tokens, and these tokens: what has come so far."""


def gather_matmul(
    x: Float[Array, "tokens k"],
    weights: tuple[Float[Array, "k _"], ...],
    axes: MeshAxes,
    ring: Ring,
) -> tuple[Float[Array, "all_tokens _"], ...]:
    """all_gather(x) @ w for each of the weights, all fed by one gather over `axes`.

    x: this device's 1/n of the tokens. weights: its columns of each weight. Returns its columns of
    each product, for the tokens of all. Adjoint: `matmul_scatter` for x; the gathered x is kept for
    the weights' gradients.
    """
    if not axes:
        return tuple(x @ w for w in weights)
    return _gather_matmul(vary(x, axes), tuple(vary(w, axes) for w in weights), axes, ring)


def matmul_scatter(
    xs: tuple[Float[Array, "all_tokens _"], ...],
    weights: tuple[Float[Array, "_ columns"], ...],
    axes: MeshAxes,
    ring: Ring,
) -> Float[Array, "tokens columns"]:
    """The sum of x @ w over the pairs and over the n devices of `axes`, of which each device gets
    its 1/n of the tokens: a reduce-scatter over dim 0.

    xs: of all tokens, this device's part of the inner dim; weights: its rows of each. Partial sums
    travel in `accumulator` of the dtype. Adjoint: `gather_matmul` for xs, whose gathered cotangent
    serves the weights too. Raises ValueError where n does not divide the tokens.
    """
    if not axes:
        first, *others = (x @ w for x, w in zip(xs, weights, strict=True))
        return sum(others, start=first)
    check_divides(xs[0], axes, 0)
    varied = (tuple(vary(each, axes) for each in held) for held in (xs, weights))
    return _matmul_scatter(*varied, axes, ring)


def gather_products(
    x: Float[Array, "tokens k"],
    weights: tuple[Float[Array, "k _"], ...],
    axes: MeshAxes,
    ring: Ring,
) -> Gathered:
    """The products of `gather_matmul`, and the gathered x itself."""
    n, me = lax.axis_size(axes), lax.axis_index(axes)
    chains = ring.chains(n)

    def multiplied(outs: Gathered, tile: Float[Array, "tokens k"], at: Index) -> Gathered:
        products, whole = outs
        placed = tuple(
            put(out, tile @ w, at, n, 0) for out, w in zip(products, weights, strict=True)
        )
        return placed, put(whole, tile, at, n, 0)

    def hop(carry: tuple[Gathered, Moving], way: int, h: Index) -> tuple[Gathered, Moving]:
        outs, moving = carry
        # Both from the carry: the next tile is on its way while this one is multiplied.
        following = shift(moving[way], axes, way)
        outs = multiplied(outs, moving[way], me - way * h)
        # Every hop its product: left free, a scheduler puts all products behind one of them.
        outs, following = lax.optimization_barrier((outs, following))
        return outs, moving | {way: following}

    moving = {way: shift(x, axes, way) for way, _ in chains}
    outs = tuple(room_for(x @ w, axes, 0) for w in weights), room_for(x, axes, 0)
    outs, moving = lax.optimization_barrier((outs, moving))
    short = [(way, hops - 1) for way, hops in chains]
    outs, moving = ring.travel(short, hop, (outs, moving))
    for way, hops in chains:
        outs = multiplied(outs, moving[way], me - way * hops)
    return outs


def scattered_products(
    xs: tuple[Float[Array, "all_tokens _"], ...],
    weights: tuple[Float[Array, "_ columns"], ...],
    axes: MeshAxes,
    ring: Ring,
) -> Float[Array, "tokens columns"]:
    """reduce_scatter of the sum of x @ w over the pairs, along dim 0: what `matmul_scatter` is."""
    n, me = lax.axis_size(axes), lax.axis_index(axes)
    chains = ring.chains(n)
    length = dict(chains)
    wide = accumulator(xs[0].dtype)

    def product(at: Index) -> Float[Array, "tokens columns"]:
        """Tile `at` of this device's own partial product."""
        first, *others = (
            jnp.matmul(take(x, at, n, 0), w, preferred_element_type=wide)
            for x, w in zip(xs, weights, strict=True)
        )
        return sum(others, start=first)

    def hop(sums: Moving, way: int, h: Index) -> Moving:
        arrived = shift(sums[way], axes, way)
        own = product(me + way * (length[way] - h))
        arrived, own = lax.optimization_barrier((arrived, own))
        return sums | {way: arrived + own}

    started = {way: product(me + way * hops) for way, hops in chains}
    sums = ring.travel([(way, hops - 1) for way, hops in chains], hop, started)
    arrived = [shift(sums[way], axes, way) for way, _ in chains]
    arrived, own = lax.optimization_barrier((arrived, product(me)))
    return sum(arrived, start=own).astype(xs[0].dtype)


PRODUCT_SCATTERS: dict[str, Callable[[Matrices, Matrices, MeshAxes, Ring], jax.Array]] = {
    "row matmul": scattered_products,
    "column gradients matmul": scattered_products,
}
"""Reductions by name, as `named.SUM_SCATTERS`: outputs of row-split matmuls, and the input
gradient of column-split ones."""


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _gather_matmul(
    x: Float[Array, "tokens k"], weights: Matrices, axes: MeshAxes, ring: Ring
) -> Matrices:
    return gather_products(x, weights, axes, ring)[0]


def _gather_matmul_forward(
    x: Float[Array, "tokens k"], weights: Matrices, axes: MeshAxes, ring: Ring
) -> tuple[Matrices, tuple[Whole, Matrices]]:
    outs, whole = gather_products(x, weights, axes, ring)
    return outs, (whole, weights)


def _gather_matmul_backward(
    axes: MeshAxes, ring: Ring, saved: tuple[Whole, Matrices], dys: Matrices
) -> tuple[Float[Array, "tokens k"], Matrices]:
    whole, weights = saved
    dx = PRODUCT_SCATTERS["column gradients matmul"](dys, tuple(w.T for w in weights), axes, ring)
    return dx, tuple(whole.T @ dy for dy in dys)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _matmul_scatter(
    xs: Matrices, weights: Matrices, axes: MeshAxes, ring: Ring
) -> Float[Array, "tokens columns"]:
    return PRODUCT_SCATTERS["row matmul"](xs, weights, axes, ring)


def _matmul_scatter_backward(
    axes: MeshAxes,
    ring: Ring,
    saved: tuple[Matrices, Matrices],
    dy: Float[Array, "tokens columns"],
) -> tuple[Matrices, Matrices]:
    xs, weights = saved
    dxs, whole = gather_products(dy, tuple(w.T for w in weights), axes, ring)
    return dxs, tuple(x.T @ whole for x in xs)


_gather_matmul.defvjp(_gather_matmul_forward, _gather_matmul_backward)
_matmul_scatter.defvjp(
    lambda xs, weights, axes, ring: (
        PRODUCT_SCATTERS["row matmul"](xs, weights, axes, ring),
        (xs, weights),
    ),
    _matmul_scatter_backward,
)
