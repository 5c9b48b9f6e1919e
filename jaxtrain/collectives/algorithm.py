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

from jaxtrain.collectives.vary import MeshAxes, vary


@runtime_checkable
class Algorithm(Protocol):
    """How bytes move over n devices. Values are typed as varying over `axes` going in and coming
    out. Sums travel in the dtype of what is summed, and are rounded to it wherever a device has
    added its own, as NCCL's are: cast what should be summed more exactly before."""

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


def all_gather(x: jax.Array, axes: MeshAxes, dim: int, by: Algorithm) -> jax.Array:
    """`Algorithm.all_gather`; adjoint: `reduce_scatter`. As everywhere here, raises ValueError for
    a dim that `x` has not."""
    return _run(vary(x, axes), "all_gather", axes, (dim_of(x, dim),), by) if axes else x


def reduce_scatter(x: jax.Array, axes: MeshAxes, dim: int, by: Algorithm) -> jax.Array:
    """`Algorithm.reduce_scatter`; adjoint: `all_gather`. Raises ValueError where n does not divide
    the dim."""
    if not axes:
        return x
    dim = dim_of(x, dim)
    check_divides(x, axes, dim)
    return _run(vary(x, axes), "reduce_scatter", axes, (dim,), by)


def all_reduce(x: jax.Array, axes: MeshAxes, by: Algorithm) -> jax.Array:
    """`Algorithm.all_reduce`; its own adjoint."""
    return _run(vary(x, axes), "all_reduce", axes, (), by) if axes else x


def all_to_all(x: jax.Array, axes: MeshAxes, split: int, concat: int, by: Algorithm) -> jax.Array:
    """`Algorithm.all_to_all`; adjoint: itself with the dims exchanged. Raises ValueError where n
    does not divide dim `split`."""
    if not axes:
        return x
    split, concat = dim_of(x, split), dim_of(x, concat)
    check_divides(x, axes, split)
    return _run(vary(x, axes), "all_to_all", axes, (split, concat), by)


def broadcast(x: jax.Array, axes: MeshAxes, root: int, by: Algorithm) -> jax.Array:
    """`Algorithm.broadcast`; adjoint: `reduce`. Raises ValueError for a root that is no device."""
    if not axes:
        return x
    check_root(axes, root)
    return _run(vary(x, axes), "broadcast", axes, (root,), by)


def reduce(x: jax.Array, axes: MeshAxes, root: int, by: Algorithm) -> jax.Array:
    """`Algorithm.reduce`; adjoint: `broadcast`. Raises ValueError for a root that is no device."""
    if not axes:
        return x
    check_root(axes, root)
    return _run(vary(x, axes), "reduce", axes, (root,), by)


def gather(x: jax.Array, axes: MeshAxes, dim: int, root: int, by: Algorithm) -> jax.Array:
    """`Algorithm.gather`; adjoint: `scatter`. Raises ValueError for a root that is no device."""
    if not axes:
        return x
    check_root(axes, root)
    return _run(vary(x, axes), "gather", axes, (dim_of(x, dim), root), by)


def scatter(x: jax.Array, axes: MeshAxes, dim: int, root: int, by: Algorithm) -> jax.Array:
    """`Algorithm.scatter`; adjoint: `gather`. Raises ValueError for a root that is no device, or
    where n does not divide the dim."""
    if not axes:
        return x
    check_root(axes, root)
    dim = dim_of(x, dim)
    check_divides(x, axes, dim)
    return _run(vary(x, axes), "scatter", axes, (dim, root), by)


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
    x: jax.Array, name: str, axes: MeshAxes, where: tuple[int, ...], by: Algorithm
) -> jax.Array:
    """The collective `name` by the algorithm `by`, with its adjoint; `where`: the dims and the root
    it takes. Of an empty array nothing moves: compilers refuse to."""
    if not x.size:
        return _empty(x, name, lax.axis_size(axes), where)
    return getattr(by, name)(x, axes, *where)


def _empty(x: jax.Array, name: str, n: int, where: tuple[int, ...]) -> jax.Array:
    """`x`, which has no elements, in the shape of the collective's result."""
    shape = list(x.shape)
    if name in ("reduce_scatter", "scatter", "all_to_all"):
        shape[where[0]] //= n
    if name in ("all_gather", "gather", "all_to_all"):
        shape[where[name == "all_to_all"]] *= n
    return x.reshape(shape)


def _run_backward(
    name: str, axes: MeshAxes, where: tuple[int, ...], by: Algorithm, _: None, dy: jax.Array
) -> tuple[jax.Array]:
    back = where[::-1] if name == "all_to_all" else where  # what was joined is split again
    return (_run(dy, _ADJOINT[name], axes, back, by),)


_run.defvjp(lambda x, *static: (_run(x, *static), None), _run_backward)
