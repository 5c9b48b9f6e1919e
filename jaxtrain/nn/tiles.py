"""Weights whose gradients are scattered while they are made: which of a layer's, and how.

FSDP gathers a matrix w for use, and wants of its gradient x^T dy, summed over devices, a tile. The
bundle of a layer's whole gradients can travel only once they are there; a product can be cut, and
each tile travel behind the next one's arithmetic (`collectives.matmul.Tiled`). So the loop over
layers holds such a w constant, and differentiates by a zero in the shape of its tile.

Which weights: those that a layer gives `Communicator.column` or `row` once, as they are, and reads
nowhere else, by the identity of their arrays; of any other the gradient would not be whole.
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

from jaxtrain.collectives.matmul import Tiled
from jaxtrain.collectives.vary import MeshAxes, vary, varying_axes
from jaxtrain.nn.quantized.products import QuantizedWeight, standing_for

Arrays = dict[str, jax.Array]
Weights = dict[str, Any]
"""`stack.Weights`."""
Body = Callable[..., jax.Array]
"""`stack.Body`."""


@runtime_checkable
class Tiling(Protocol):
    """A communicator that can scatter a weight's gradient while it is made."""

    @property
    def axes(self) -> MeshAxes: ...

    def tiles(self, params: Weights, prefix: str) -> dict[str, Tiled]:
        """Those of one layer's parameters, named below `prefix`, whose gradients may be made in
        tiles; without their arrays."""
        ...

    def tiling(self, tiled: dict[int, Tiled]) -> Any:
        """The same, multiplying by what is given here, by the identity of the weight's array."""
        ...

    def scatter(self, grads: Arrays, prefix: str, tiles: Arrays = ...) -> Arrays:
        """As `Communicator.scatter`, but for gradients that are `tiles` already."""
        ...


@dataclass(frozen=True, eq=False)
class TiledProducts:
    """Of a layer whose leaves' names begin with `prefix`, and whose body, asking `comm`, is
    `body_of(comm)`."""

    comm: Tiling
    prefix: str
    body_of: Callable[[Any], Body]
    _found: list[frozenset[str]] = field(default_factory=list)

    def zeros(self, weights: Weights, x: jax.Array, extras: PyTree) -> Arrays:
        """By name what stands for each such weight where the layer is differentiated."""
        may = self.ways(weights)
        if not self._found:  # alike in all layers
            # Nothing but a product reads one in 8 bits, and the gradients of several add up.
            narrow = frozenset(k for k in may if isinstance(weights[k], QuantizedWeight))
            others = {k: weights[k] for k in may if k not in narrow}
            once = self._used_once(others, weights, x, extras) if others else frozenset[str]()
            self._found.append(narrow | once)
        found = {}
        for name, tiled in may.items():
            if name in self._found[0]:
                shape = list(weights[name].shape)
                shape[tiled.dim] //= lax.axis_size(tiled.axes)
                found[name] = vary(jnp.zeros(shape, tiled.dtype), self.comm.axes)
        return found

    def body(self, weights: Weights, zeros: Arrays) -> Body:
        """The layer's body, in which these zeros get the gradients of their weights."""
        may = self.ways(weights)
        tiles = {k: replace(may[k], tile=zero) for k, zero in zeros.items()}
        narrow = {k for k in tiles if isinstance(weights[k], QuantizedWeight)}
        tiled = {
            id(weights[k]): replace(tile, whole=weights[k])
            for k, tile in tiles.items()
            if k not in narrow
        }
        run = self.body_of(self.comm.tiling(tiled))
        standing = {k: standing_for(weights[k], tiles[k]) for k in narrow}
        return lambda weights, *others: run({**weights, **standing}, *others)

    def ways(self, params: Weights) -> dict[str, Tiled]:
        """How the gradients of one layer's parameters may be made in tiles."""
        return self.comm.tiles(params, self.prefix)

    def scatter(self, grads: Arrays, tiles: Arrays) -> Arrays:
        """Gradients of all weights, those of `zeros` already `tiles`, as parameters rest."""
        return self.comm.scatter(grads, self.prefix, tiles)

    def _used_once(
        self, those: Arrays, weights: Weights, x: jax.Array, extras: PyTree
    ) -> frozenset[str]:
        noted: Counter[str] = Counter()

        def run(those: Arrays, x: jax.Array) -> jax.Array:
            comm = _Noting(self.comm, {id(w): name for name, w in those.items()}, noted)
            return self.body_of(comm)({**weights, **those}, x, extras, 0)

        jaxpr = jax.make_jaxpr(run)(those, x).jaxpr
        read = {id(var) for equation in jaxpr.eqns for var in equation.invars}
        read |= {id(var) for var in jaxpr.outvars}
        elsewhere = {
            name for name, var in zip(sorted(those), jaxpr.invars, strict=False) if id(var) in read
        }
        return frozenset(name for name in those if noted[name] == 1) - elsewhere


class _Noting:
    """A communicator that multiplies by zeros in the place of weights, by the identity of their
    arrays, and notes how often: what else reads such an array is then seen."""

    def __init__(self, comm: Any, names: dict[int, str], noted: Counter[str]) -> None:
        self._comm, self._names, self._noted = comm, names, noted

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def column(self, x: jax.Array, *weights: jax.Array) -> tuple[jax.Array, ...]:
        return self._comm.column(x, *map(self._note, weights))

    def row(self, x: jax.Array, weight: jax.Array, *beside: Any) -> jax.Array:
        return self._comm.row(x, self._note(weight), *beside)

    def _note(self, weight: jax.Array) -> jax.Array:
        if id(weight) not in self._names:
            return weight
        self._noted[self._names[id(weight)]] += 1
        return vary(jnp.zeros(weight.shape, weight.dtype), varying_axes(weight))
