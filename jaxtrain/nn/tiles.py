"""Weights whose gradients are scattered while they are computed: which of a layer's, and how.

FSDP gathers a matrix w for use, and each device needs one tile of its gradient x^T dy, summed over
devices. The bundle of a layer's full gradients can travel only when all are there. A product can be
cut, so that each tile travels during the next one's arithmetic (`collectives.matmul.Tiled`). So the
loop over layers holds such a w constant, and differentiates by a zero in the shape of its tile.

Such weights are passed to `Communicator.column` or `row` once, unchanged, and read nowhere else, by
the identity of their arrays. The gradient of any other would be incomplete.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import PyTree

from jaxtrain.arrays import Arrays
from jaxtrain.collectives.matmul import Tiled
from jaxtrain.collectives.vary import vary, varying_axes
from jaxtrain.mesh.axes import MeshAxes
from jaxtrain.quantization.weights import QuantizedWeight, Weights, standing_for

LayerFunction = Callable[..., PyTree]
"""A layer's body, as `stack.Body`."""


@runtime_checkable
class GradientTiling(Protocol):
    """A communicator that can scatter a weight's gradient while it is computed."""

    @property
    def axes(self) -> MeshAxes: ...

    def tiles(self, params: Weights, prefix: str) -> dict[str, Tiled]:
        """Parameters of one layer, below `prefix`, whose gradients may be computed in tiles, as
        `Tiled`s without arrays."""
        ...

    def tiling(self, tiled: dict[int, Tiled]) -> Any:
        """The same communicator, multiplying by `tiled` in place of weights, by the `id` of their
        arrays."""
        ...

    def scatter(self, grads: Arrays, prefix: str, tiles: Arrays = ...) -> Arrays:
        """`Communicator.scatter`, plus gradients that are in `tiles` already."""
        ...


@dataclass(frozen=True, eq=False)
class TiledProducts:
    """Tiled weights of a layer whose leaves' names begin with `prefix`; its body with the
    communicator `comm` is `body_of(comm)`."""

    comm: GradientTiling
    prefix: str
    body_of: Callable[[Any], LayerFunction]
    _names: list[frozenset[str]] = field(default_factory=list)

    def zeros(self, weights: Weights, x: PyTree, extras: PyTree) -> Arrays:
        """For each tiled weight, a zero shaped like its gradient shard; its cotangent is that
        shard."""
        tilings = self.ways(weights)
        if not self._names:  # the same in all layers
            # Only products read a matrix in 8 bits, and the gradients of several add up.
            narrow = frozenset(k for k in tilings if isinstance(weights[k], QuantizedWeight))
            wide = {k: weights[k] for k in tilings if k not in narrow}
            once = self._used_once(wide, weights, x, extras) if wide else frozenset[str]()
            self._names.append(narrow | once)
        zeros = {}
        for name, tiled in tilings.items():
            if name in self._names[0]:
                shape = list(weights[name].shape)
                shape[tiled.dim] //= lax.axis_size(tiled.axes)
                zeros[name] = vary(jnp.zeros(shape, tiled.dtype), self.comm.axes)
        return zeros

    def body(self, weights: Weights, zeros: Arrays) -> LayerFunction:
        """The layer's body, in which these zeros get the gradients of their weights."""
        tilings = self.ways(weights)
        tiles = {k: replace(tilings[k], tile=zero) for k, zero in zeros.items()}
        narrow = {k for k in tiles if isinstance(weights[k], QuantizedWeight)}
        tiled = {
            id(weights[k]): replace(tile, whole=weights[k])
            for k, tile in tiles.items()
            if k not in narrow
        }
        run = self.body_of(self.comm.tiling(tiled))
        standing = {k: standing_for(weights[k], tiles[k]) for k in narrow}
        return lambda weights, *arguments: run({**weights, **standing}, *arguments)

    def ways(self, params: Weights) -> dict[str, Tiled]:
        """The parameters of one layer whose gradients may be tiled, with their tilings."""
        return self.comm.tiles(params, self.prefix)

    def scatter(self, grads: Arrays, tiles: Arrays) -> Arrays:
        """Gradients of all weights as the parameters' shards; those in `tiles` are scattered
        already."""
        return self.comm.scatter(grads, self.prefix, tiles)

    def _used_once(
        self, wide: Arrays, weights: Weights, x: PyTree, extras: PyTree
    ) -> frozenset[str]:
        counts: Counter[str] = Counter()

        def run(wide: Arrays, x: PyTree) -> PyTree:
            comm = _Noting(self.comm, {id(w): name for name, w in wide.items()}, counts)
            return self.body_of(comm)({**weights, **wide}, x, extras, 0)

        jaxpr = jax.make_jaxpr(run)(wide, x).jaxpr
        read = {id(var) for equation in jaxpr.eqns for var in equation.invars}
        read |= {id(var) for var in jaxpr.outvars}
        elsewhere = {
            name for name, var in zip(sorted(wide), jaxpr.invars, strict=False) if id(var) in read
        }
        return frozenset(name for name in wide if counts[name] == 1) - elsewhere


class _Noting:
    """A communicator that multiplies by zeros in place of weights, by the identity of their arrays,
    and counts the products. Other uses of an array then show in the jaxpr."""

    def __init__(self, comm: Any, names: dict[int, str], noted: Counter[str]) -> None:
        self._comm, self._names, self._noted = comm, names, noted

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def column(self, x: jax.Array, *weights: jax.Array) -> tuple[jax.Array, ...]:
        return self._comm.column(x, *map(self._note, weights))

    def row(self, x: jax.Array, weight: jax.Array, adapter: Any = None) -> jax.Array:
        return self._comm.row(x, self._note(weight), adapter)

    def _note(self, weight: jax.Array) -> jax.Array:
        if id(weight) not in self._names:
            return weight
        self._noted[self._names[id(weight)]] += 1
        return vary(jnp.zeros(weight.shape, weight.dtype), varying_axes(weight))
