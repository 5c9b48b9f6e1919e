"""Collective matmul: a ring's hops hidden behind the products they feed (Wang et al. 2023,
"Overlap communication with dependent computation via decomposition").

Tokens are gathered for a column-split weight, and the product of a row-split one is summed and
scattered back; so is the product that makes a weight's gradient, where FSDP wants a tile of it.
None waits for a whole collective: while a tile travels, the one that came before it, or that is
added to it, is multiplied. Inside `jax.shard_map` only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from operator import matmul
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PyTree, Shaped

from jaxtrain.collectives.algorithm import check_divides
from jaxtrain.collectives.ring import Moving, Ring, put, room_for, shift, take
from jaxtrain.collectives.vary import Index, vary
from jaxtrain.mesh.axes import MeshAxes

Matrices = tuple[Float[Array, "_ _"], ...]
WholeTokens = Shaped[Array, "all_tokens k"]
"""The tokens of all devices, gathered."""
Multiplied = tuple[Matrices, WholeTokens]
"""Products with the gathered tokens, and these: what has come."""
Multiply = Callable[[jax.Array, Any], jax.Array]
"""(a tile of x, a weight) -> their product, where that is not `x @ w`: then a weight is whatever
this knows to multiply by, and the numbers of x may be mere bytes that travel."""


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("whole", "tile"),
    meta_fields=("dim", "axes", "ring", "dtype"),
)
@dataclass(frozen=True)
class Tiled:
    """A weight whose gradient is summed over the mesh axes `axes` while it is computed.

    Products read `whole`, [k, columns], whose gradient is None. Each device gets its tile along
    `dim` of the summed gradient, by `ring`, as the gradient of `tile`.

    tile: of that shape and `dtype`, in which sums travel; its numbers are not read.
    """

    whole: PyTree  # arrays, or what JAX puts in their place
    tile: PyTree
    dim: int
    axes: MeshAxes
    ring: Ring
    dtype: DTypeLike

    def gradient(
        self,
        x: Shaped[Array, "tokens k"],
        dy: Shaped[Array, "tokens columns"],
        product: Multiply | None = None,
    ) -> Tiled:
        """Returns the gradient for x @ w, from x and the cotangent dy of the product. For dim 1 the
        transpose is computed. product: as in `scattered_products`."""
        left, right = (x, dy) if self.dim == 0 else (dy, x)
        scatter = PRODUCT_SCATTERS["weight gradients matmul"]
        option: Any = {} if product is None else {"product": product}
        tile = scatter((left.T,), (right,), self.axes, self.ring, self.dtype, **option)
        return replace(self, whole=None, tile=tile if self.dim == 0 else tile.T)


WeightMatrix = Float[Array, "_ _"] | Tiled
MatmulWeights = tuple[WeightMatrix, ...]


def multiply(x: Float[Array, "tokens k"], weight: WeightMatrix) -> Float[Array, "tokens columns"]:
    """x @ w of what lies on the device."""
    return _tiled_product(x, weight) if isinstance(weight, Tiled) else x @ weight


def gather_matmul(
    x: Float[Array, "tokens k"],
    weights: tuple[Float[Array, "k _"] | Tiled, ...],
    axes: MeshAxes,
    ring: Ring,
) -> tuple[Float[Array, "all_tokens _"], ...]:
    """all_gather(x) @ w for each of the weights, all fed by one gather over `axes`.

    x: this device's 1/n of the tokens. weights: its columns of each weight. Returns its columns of
    each product, for the tokens of all. Adjoint: `matmul_scatter` for x; the gathered x is kept for
    the weights' gradients.
    """
    if not axes:
        return tuple(multiply(x, w) for w in weights)
    return _gather_matmul(vary(x, axes), _varied(weights, axes), axes, ring)


def matmul_scatter(
    xs: tuple[Float[Array, "all_tokens _"], ...],
    weights: tuple[Float[Array, "_ columns"] | Tiled, ...],
    axes: MeshAxes,
    ring: Ring,
) -> Float[Array, "tokens columns"]:
    """The sum of x @ w over the pairs and over the n devices of `axes`, of which each device gets
    its 1/n of the tokens: a reduce-scatter over dim 0.

    xs: of all tokens, this device's part of the inner dim; weights: its rows of each. Partial sums
    travel in the dtype of xs. Adjoint: `gather_matmul` for xs, whose gathered cotangent
    serves the weights too. Raises ValueError where n does not divide the tokens.
    """
    if not axes:
        first, *following = (multiply(x, w) for x, w in zip(xs, weights, strict=True))
        return sum(following, start=first)
    check_divides(xs[0], axes, 0)
    return _matmul_scatter(_varied(xs, axes), _varied(weights, axes), axes, ring)


def _varied(weights: MatmulWeights, axes: MeshAxes) -> MatmulWeights:
    return jax.tree.map(lambda leaf: vary(leaf, axes), weights)


def _wholes(weights: MatmulWeights) -> Matrices:
    return tuple(w.whole if isinstance(w, Tiled) else w for w in weights)


def _kept(weights: MatmulWeights) -> MatmulWeights:
    return tuple(replace(w, tile=None) if isinstance(w, Tiled) else w for w in weights)


def _gradient(weight: WeightMatrix, x: jax.Array, dy: jax.Array) -> WeightMatrix:
    return weight.gradient(x, dy) if isinstance(weight, Tiled) else x.T @ dy


def gather_products(
    x: Shaped[Array, "tokens k"],
    weights: tuple[Any, ...],
    axes: MeshAxes,
    ring: Ring,
    product: Multiply = matmul,
) -> Multiplied:
    """The products of `gather_matmul`, and the gathered x itself."""
    n, me = lax.axis_size(axes), lax.axis_index(axes)
    chains = ring.chains(n)

    def multiplied(outs: Multiplied, tile: Shaped[Array, "tokens k"], number: Index) -> Multiplied:
        products, gathered = outs
        placed = tuple(
            put(out, product(tile, w), number, n, 0)
            for out, w in zip(products, weights, strict=True)
        )
        return placed, put(gathered, tile, number, n, 0)

    def hop(carry: tuple[Multiplied, Moving], way: int, h: Index) -> tuple[Multiplied, Moving]:
        outs, moving = carry
        # Both from the carry: the next tile is on its way while this one is multiplied.
        following = shift(moving[way], axes, way)
        outs = multiplied(outs, moving[way], me - way * h)
        # Every hop its product: left free, a scheduler puts all products behind one of them.
        outs, following = lax.optimization_barrier((outs, following))
        return outs, moving | {way: following}

    moving = {way: shift(x, axes, way) for way, _ in chains}
    outs = tuple(room_for(product(x, w), axes, 0) for w in weights), room_for(x, axes, 0)
    outs, moving = lax.optimization_barrier((outs, moving))
    short = [(way, hops - 1) for way, hops in chains]
    outs, moving = ring.travel(short, hop, (outs, moving))
    for way, hops in chains:
        outs = multiplied(outs, moving[way], me - way * hops)
    return outs


def scattered_products(
    xs: tuple[Shaped[Array, "all_tokens _"], ...],
    weights: tuple[Any, ...],
    axes: MeshAxes,
    ring: Ring,
    dtype: DTypeLike,
    product: Multiply | None = None,
) -> Float[Array, "tokens columns"]:
    """reduce_scatter of the sum of x @ w over the pairs, along dim 0: what `matmul_scatter` is, in
    `dtype`. Sums travel in it, and what a device adds to them is added before it is rounded:
    `product`, where one is given, makes it in fp32 or wider."""
    n, me = lax.axis_size(axes), lax.axis_index(axes)
    chains = ring.chains(n)
    length = dict(chains)
    if product is None:
        product = partial(wide_product, wide=jnp.promote_types(xs[0].dtype, jnp.float32))

    def own_product(
        xs: tuple[Shaped[Array, "_ _"], ...], number: Index
    ) -> Float[Array, "tokens columns"]:
        """Returns tile `number` of this device's own partial product."""
        pairs = zip(xs, weights, strict=True)
        first, *following = (product(take(x, number, n, 0), w) for x, w in pairs)
        return sum(following, start=first)

    def hop(sums: Moving, way: int, h: Index) -> Moving:
        # No product before its hop: left free, a scheduler puts those of several rings behind the
        # first hops of each, and keeps all their tiles.
        leaving, ready = lax.optimization_barrier((sums[way], xs))
        arrived = shift(leaving, axes, way)
        own = own_product(ready, me + way * (length[way] - h))
        arrived, own = lax.optimization_barrier((arrived, own))
        return sums | {way: (arrived + own).astype(dtype)}

    started = {way: own_product(xs, me + way * hops).astype(dtype) for way, hops in chains}
    sums = ring.travel([(way, hops - 1) for way, hops in chains], hop, started)
    sums, ready = lax.optimization_barrier((sums, xs))
    arrived = [shift(sums[way], axes, way) for way, _ in chains]
    arrived, own = lax.optimization_barrier((arrived, own_product(ready, me)))
    return sum(arrived, start=own).astype(dtype)


def wide_product(x: jax.Array, w: jax.Array, wide: DTypeLike) -> jax.Array:
    """x @ w summed in `wide`. XLA:CPU multiplies 16-bit matrices in fp32 anyway, and of JAX 0.11's
    some such products do not run unless they are written so."""
    if x.dtype == wide:
        return x @ w
    return lax.platform_dependent(
        x,
        w,
        cpu=lambda x, w: x.astype(wide) @ w.astype(wide),
        default=lambda x, w: jnp.matmul(x, w, preferred_element_type=wide),
    )


PRODUCT_SCATTERS: dict[str, Callable[..., jax.Array]] = {
    "row matmul": scattered_products,
    "column gradients matmul": scattered_products,
    "weight gradients matmul": scattered_products,
}
"""Reductions by name, as `named.SUM_SCATTERS`: outputs of row-split matmuls; the input gradient of
column-split ones; gradients of weights that FSDP has gathered."""


@jax.custom_vjp
def _tiled_product(x: Float[Array, "tokens k"], weight: Tiled) -> Float[Array, "tokens columns"]:
    return x @ weight.whole


_tiled_product.defvjp(
    lambda x, weight: (x @ weight.whole, (x, replace(weight, tile=None))),
    lambda saved, dy: (dy @ saved[1].whole.T, saved[1].gradient(saved[0], dy)),
)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _gather_matmul(
    x: Float[Array, "tokens k"], weights: MatmulWeights, axes: MeshAxes, ring: Ring
) -> Matrices:
    return gather_products(x, _wholes(weights), axes, ring)[0]


def _gather_matmul_forward(
    x: Float[Array, "tokens k"], weights: MatmulWeights, axes: MeshAxes, ring: Ring
) -> tuple[Matrices, tuple[WholeTokens, MatmulWeights]]:
    outs, gathered = gather_products(x, _wholes(weights), axes, ring)
    return outs, (gathered, _kept(weights))


def _gather_matmul_backward(
    axes: MeshAxes, ring: Ring, saved: tuple[WholeTokens, MatmulWeights], dys: Matrices
) -> tuple[Float[Array, "tokens k"], MatmulWeights]:
    gathered, weights = saved
    transposed = tuple(w.T for w in _wholes(weights))
    scatter = PRODUCT_SCATTERS["column gradients matmul"]
    dx = scatter(dys, transposed, axes, ring, gathered.dtype)
    dws = tuple(_gradient(w, gathered, dy) for w, dy in zip(weights, dys, strict=True))
    return dx, dws


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _matmul_scatter(
    xs: Matrices, weights: MatmulWeights, axes: MeshAxes, ring: Ring
) -> Float[Array, "tokens columns"]:
    return PRODUCT_SCATTERS["row matmul"](xs, _wholes(weights), axes, ring, xs[0].dtype)


def _matmul_scatter_backward(
    axes: MeshAxes,
    ring: Ring,
    saved: tuple[Matrices, MatmulWeights],
    dy: Float[Array, "tokens columns"],
) -> tuple[Matrices, MatmulWeights]:
    xs, weights = saved
    dxs, gathered = gather_products(dy, tuple(w.T for w in _wholes(weights)), axes, ring)
    return dxs, tuple(_gradient(w, x, gathered) for w, x in zip(weights, xs, strict=True))


_gather_matmul.defvjp(_gather_matmul_forward, _gather_matmul_backward)
_matmul_scatter.defvjp(
    lambda xs, weights, axes, ring: (
        _matmul_scatter(xs, weights, axes, ring),
        (xs, _kept(weights)),
    ),
    _matmul_scatter_backward,
)
