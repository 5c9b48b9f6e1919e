"""The eight collectives, differentiable, by whichever algorithm: each is one line of the source.

An `Algorithm` moves the data (`Lax`, `Ring`, `Recursive`); here the adjoints are written out once
for all of them. A collective's adjoint is a collective of the same algorithm: gather and scatter,
sum and sum, broadcast and reduce, exchange and exchange. Inside `jax.shard_map` only; `axes` are
mesh axis names, major first, and a device's number is its index along them together. Dims count
from either end, as NumPy's do; an `Algorithm` is given them from 0.
"""

from __future__ import annotations

from functools import partial
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain.collectives.vary import vary
from jaxtrain.mesh.axes import MeshAxes


@runtime_checkable
class Algorithm(Protocol):
    """Algorithm of the collectives over n devices. Operands and results are typed as varying over
    `axes`. Sums travel in the operand's dtype, and are rounded to it after each addition, as NCCL's
    are: cast the operand first for a more exact sum."""

    def all_gather(self, x: jax.Array, axes: MeshAxes, dim: int) -> jax.Array:
        """The devices' arrays joined along `dim` in order of their numbers: the dim grows n times
        (`lax.all_gather(tiled=True)`)."""
        ...

    def reduce_scatter(self, x: jax.Array, axes: MeshAxes, dim: int) -> jax.Array:
        """The sum of the devices' arrays, of which device i keeps tile i of n along `dim`: the dim
        becomes an n-th (`lax.psum_scatter(tiled=True)`)."""
        ...

    def all_reduce(self, x: jax.Array, axes: MeshAxes) -> jax.Array:
        """The sum of the devices' arrays, on all of them (`lax.psum`)."""
        ...

    def all_to_all(self, x: jax.Array, axes: MeshAxes, split: int, concat: int) -> jax.Array:
        """Device i's tile j along `split` goes to device j, which joins what comes along
        `concat` in order of the senders (`lax.all_to_all(tiled=True)`)."""
        ...

    def broadcast(self, x: jax.Array, axes: MeshAxes, root: int) -> jax.Array:
        """Device `root`'s array, on all devices."""
        ...

    def reduce(self, x: jax.Array, axes: MeshAxes, root: int) -> jax.Array:
        """The sum of the devices' arrays on `root`, zeros elsewhere."""
        ...

    def gather(self, x: jax.Array, axes: MeshAxes, dim: int, root: int) -> jax.Array:
        """`all_gather` on `root`, zeros elsewhere."""
        ...

    def scatter(self, x: jax.Array, axes: MeshAxes, dim: int, root: int) -> jax.Array:
        """Tile i along `dim` of `root`'s array, on device i."""
        ...


def all_gather(x: jax.Array, axes: MeshAxes, dim: int, algorithm: Algorithm) -> jax.Array:
    """Runs `Algorithm.all_gather`; adjoint: `reduce_scatter`. Like all functions here, raises
    ValueError for a dim that `x` does not have."""
    return _run(vary(x, axes), "all_gather", axes, (dim_of(x, dim),), algorithm) if axes else x


def reduce_scatter(x: jax.Array, axes: MeshAxes, dim: int, algorithm: Algorithm) -> jax.Array:
    """Runs `Algorithm.reduce_scatter`; adjoint: `all_gather`. Raises ValueError if n does not
    divide the dim."""
    if not axes:
        return x
    dim = dim_of(x, dim)
    check_divides(x, axes, dim)
    return _run(vary(x, axes), "reduce_scatter", axes, (dim,), algorithm)


def all_reduce(x: jax.Array, axes: MeshAxes, algorithm: Algorithm) -> jax.Array:
    """Runs `Algorithm.all_reduce`, which is its own adjoint."""
    return _run(vary(x, axes), "all_reduce", axes, (), algorithm) if axes else x


def all_to_all(
    x: jax.Array, axes: MeshAxes, split: int, concat: int, algorithm: Algorithm
) -> jax.Array:
    """Runs `Algorithm.all_to_all`; adjoint: itself with the dims exchanged. Raises ValueError if n
    does not divide dim `split`."""
    if not axes:
        return x
    split, concat = dim_of(x, split), dim_of(x, concat)
    check_divides(x, axes, split)
    return _run(vary(x, axes), "all_to_all", axes, (split, concat), algorithm)


def broadcast(x: jax.Array, axes: MeshAxes, root: int, algorithm: Algorithm) -> jax.Array:
    """Runs `Algorithm.broadcast`; adjoint: `reduce`. Raises ValueError for an unknown root."""
    if not axes:
        return x
    check_root(axes, root)
    return _run(vary(x, axes), "broadcast", axes, (root,), algorithm)


def reduce(x: jax.Array, axes: MeshAxes, root: int, algorithm: Algorithm) -> jax.Array:
    """Runs `Algorithm.reduce`; adjoint: `broadcast`. Raises ValueError for an unknown root."""
    if not axes:
        return x
    check_root(axes, root)
    return _run(vary(x, axes), "reduce", axes, (root,), algorithm)


def gather(x: jax.Array, axes: MeshAxes, dim: int, root: int, algorithm: Algorithm) -> jax.Array:
    """Runs `Algorithm.gather`; adjoint: `scatter`. Raises ValueError for an unknown root."""
    if not axes:
        return x
    check_root(axes, root)
    return _run(vary(x, axes), "gather", axes, (dim_of(x, dim), root), algorithm)


def scatter(x: jax.Array, axes: MeshAxes, dim: int, root: int, algorithm: Algorithm) -> jax.Array:
    """Runs `Algorithm.scatter`; adjoint: `gather`. Raises ValueError for an unknown root, and if n
    does not divide the dim."""
    if not axes:
        return x
    check_root(axes, root)
    dim = dim_of(x, dim)
    check_divides(x, axes, dim)
    return _run(vary(x, axes), "scatter", axes, (dim, root), algorithm)


def dim_of(x: jax.Array, dim: int) -> int:
    """`dim` counted from 0. Raises ValueError for one that `x` has not."""
    if -x.ndim <= dim < x.ndim:
        return dim % x.ndim
    dims = f"0 to {x.ndim - 1}, or {-x.ndim} to -1" if x.ndim else "x.reshape(1), a scalar has none"
    raise ValueError(f"dim={dim} is no dim of {x.shape}; use {dims}")


def check_divides(x: jax.Array, axes: MeshAxes, dim: int) -> None:
    """Raises ValueError where the devices of `axes` do not divide the dim."""
    n, size = lax.axis_size(axes), x.shape[dim]
    if size % n:
        raise ValueError(
            f"dim {dim} of {x.shape} has {size} entries, which do not split over "
            f"{' x '.join(axes)} = {n} devices; pad it to {-(-size // n) * n}"
        )


def check_root(axes: MeshAxes, root: int) -> None:
    """Raises ValueError for a root that is no device of `axes`."""
    n = lax.axis_size(axes)
    if not 0 <= root < n:
        raise ValueError(f"root={root} is no device of {' x '.join(axes)}; use 0 to {n - 1}")


def only_on(root: int, x: jax.Array, axes: MeshAxes) -> jax.Array:
    """`x` on device `root`, zeros elsewhere."""
    return jnp.where(lax.axis_index(axes) == root, x, jnp.zeros((), x.dtype))


_ADJOINT = {
    "all_gather": "reduce_scatter",
    "reduce_scatter": "all_gather",
    "all_reduce": "all_reduce",
    "all_to_all": "all_to_all",
    "broadcast": "reduce",
    "reduce": "broadcast",
    "gather": "scatter",
    "scatter": "gather",
}


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4))
def _run(
    x: jax.Array, name: str, axes: MeshAxes, places: tuple[int, ...], algorithm: Algorithm
) -> jax.Array:
    """Runs the collective `name` with its adjoint. places: its dims and its root. Empty arrays are
    not sent: compilers refuse them."""
    if not x.size:
        return _empty(x, name, lax.axis_size(axes), places)
    return getattr(algorithm, name)(x, axes, *places)


def _empty(x: jax.Array, name: str, n: int, places: tuple[int, ...]) -> jax.Array:
    """Returns `x`, which has no elements, in the shape of the collective's result."""
    shape = list(x.shape)
    if name in ("reduce_scatter", "scatter", "all_to_all"):
        shape[places[0]] //= n
    if name in ("all_gather", "gather", "all_to_all"):
        shape[places[name == "all_to_all"]] *= n
    return x.reshape(shape)


def _run_backward(
    name: str, axes: MeshAxes, places: tuple[int, ...], algorithm: Algorithm, _: None, dy: jax.Array
) -> tuple[jax.Array]:
    dims = places[::-1] if name == "all_to_all" else places  # the joined dim is split again
    return (_run(dy, _ADJOINT[name], axes, dims, algorithm),)


_run.defvjp(lambda x, *static: (_run(x, *static), None), _run_backward)
