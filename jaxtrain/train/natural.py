"""A state in natural layer order, as checkpoints hold it: nothing of a pipeline is in it.

On stages the leaves that are stacked over layers rest in slots (`pipeline.layout`): those of
parameters, of their average, of whatever an optimizer keeps for them, and of the errors of
compressed sums. Here they are put in order, padding left out, and laid again.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax

from jaxtrain.mesh.sharding import STAGE, Axes, Dims, named_sharding, ways
from jaxtrain.train.assembly import Assembly
from jaxtrain.train.state import TrainState, shardings, state_axes_of


class NaturalForm(NamedTuple):
    """Shapes and splits of a state in natural order."""

    abstract: TrainState
    splits: TrainState


class _Leaf(NamedTuple):
    """A leaf that is stacked over layers: its dim that counts them in natural order, how it is
    split then, and between: in slots, and split as in natural order. None: no such split."""

    dim: int
    abstract: jax.ShapeDtypeStruct
    natural: Dims
    between: Dims | None


def natural_form(assembly: Assembly) -> NaturalForm:
    """The state as it is saved. Needs no device."""
    abstract, splits = assembly.abstract, assembly.splits
    if not _moved(assembly):
        return NaturalForm(abstract, splits)
    leaves, structure = jax.tree.flatten(abstract)
    found = _leaves(assembly)
    shapes = [each.abstract if each else leaf for leaf, each in zip(leaves, found, strict=True)]
    rest = [
        each.natural if each else split
        for split, each in zip(structure.flatten_up_to(splits), found, strict=True)
    ]
    return NaturalForm(structure.unflatten(shapes), structure.unflatten(rest))


def in_order(assembly: Assembly, params: dict[str, Any]) -> dict[str, Any]:
    """Leaves by the names of parameters, in natural layer order."""
    if not _moved(assembly):
        return params
    ordered = assembly.on_stages.layout.ordered
    stacked = {k for k, place in assembly.places.items() if "layers" in place.axes}
    return {k: ordered(leaf) if k in stacked else leaf for k, leaf in params.items()}


@dataclass(frozen=True, eq=False)
class NaturalOrder:
    """The way of a state of `assembly` on `mesh` to natural order and back; where the layers rest
    in it already nothing is copied.

    A leaf in natural order is split over `stage` too, so a device needs room for its own share of
    the state once more.
    """

    assembly: Assembly
    mesh: jax.sharding.Mesh

    @cached_property
    def form(self) -> NaturalForm:
        return natural_form(self.assembly)

    @cached_property
    def shardings(self) -> TrainState:
        return shardings(self.form.abstract, self.form.splits, self.mesh)

    def ordered(self, state: TrainState) -> TrainState:
        """The state in natural order. Returns when it is there: simulated devices hang when the
        collectives of two programs run side by side."""
        return self._replaced(state, self._order) if self._stacked else state

    def laid(self, state: TrainState) -> TrainState:
        """Inverse of `ordered`; padding is zero."""
        return self._replaced(state, self._lay) if self._stacked else state

    @property
    def placed_params(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes, dtypes and places of the parameters in natural order."""
        where = self.shardings.params
        return {
            k: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where[k])
            for k, leaf in self.form.abstract.params.items()
        }

    def laid_params(self, params: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """Some parameters in natural order as they rest, in their own dtype there."""
        assembly, abstract = self.assembly, self.assembly.abstract.params
        splits = {k: assembly.splits.params[k] for k in params}
        found = {
            k: _leaf(assembly, abstract[k], assembly.places[k].axes, split)
            for k, split in splits.items()
            if _moved(assembly)
        }
        where = {k: named_sharding(self.mesh, split) for k, split in splits.items()}

        def run(params: dict[str, jax.Array]) -> dict[str, jax.Array]:
            out = {k: leaf.astype(abstract[k].dtype) for k, leaf in params.items()}
            for k, each in found.items():
                if each is not None:
                    layout = assembly.on_stages.layout
                    out[k] = self._constrained(layout.laid(out[k], each.dim), each)
            return out

        if not any(found.values()) and all(v.dtype == abstract[k].dtype for k, v in params.items()):
            return params
        return jax.block_until_ready(jax.jit(run, out_shardings=where)(params))

    def _replaced(self, state: TrainState, program: Any) -> TrainState:
        leaves, structure = jax.tree.flatten(state)
        moved = jax.block_until_ready(program([leaves[i] for i in self._stacked]))
        for i, leaf in zip(self._stacked, moved, strict=True):
            leaves[i] = leaf
        return structure.unflatten(leaves)

    @cached_property
    def _stacked(self) -> dict[int, _Leaf]:
        """By their number among the state's leaves."""
        if not _moved(self.assembly):
            return {}
        return {i: each for i, each in enumerate(_leaves(self.assembly)) if each is not None}

    @cached_property
    def _order(self) -> Any:
        layout = self.assembly.on_stages.layout

        def run(leaves: list[jax.Array]) -> list[jax.Array]:
            moved = map(self._constrained, leaves, self._stacked.values())
            dims = [each.dim for each in self._stacked.values()]
            return [layout.ordered(leaf, dim) for leaf, dim in zip(moved, dims, strict=True)]

        where = [named_sharding(self.mesh, each.natural) for each in self._stacked.values()]
        return jax.jit(run, out_shardings=where)

    @cached_property
    def _lay(self) -> Any:
        layout = self.assembly.on_stages.layout

        def run(leaves: list[jax.Array]) -> list[jax.Array]:
            dims = [each.dim for each in self._stacked.values()]
            laid = [layout.laid(leaf, dim) for leaf, dim in zip(leaves, dims, strict=True)]
            return list(map(self._constrained, laid, self._stacked.values()))

        at_rest = jax.tree.leaves(
            shardings(self.assembly.abstract, self.assembly.splits, self.mesh)
        )
        return jax.jit(run, out_shardings=[at_rest[i] for i in self._stacked])

    def _constrained(self, leaf: jax.Array, each: _Leaf) -> jax.Array:
        """A leaf in slots, with none of its layers on another device than the others: then they
        change places without being sent. XLA alone would gather them all for it."""
        if each.between is None:
            return leaf
        return jax.lax.with_sharding_constraint(leaf, named_sharding(self.mesh, each.between))


def _moved(assembly: Assembly) -> bool:
    return assembly.pipeline is not None and not assembly.pipeline.layout.natural


def _leaves(assembly: Assembly) -> list[_Leaf | None]:
    """Of each leaf of the state, in its order; None where it is not stacked over layers."""
    leaves, structure = jax.tree.flatten(assembly.abstract)
    names = structure.flatten_up_to(state_axes_of(assembly.abstract, assembly.places))
    splits = structure.flatten_up_to(assembly.splits)
    return list(map(partial(_leaf, assembly), leaves, names, splits))


def _leaf(assembly: Assembly, leaf: Any, axes: Axes, split: Dims) -> _Leaf | None:
    if "layers" not in axes:
        return None
    layout, last = assembly.on_stages.layout, axes.index("layers")
    dim = last - (layout.chunks > 1)  # the dim of chunks stands before that of slots
    abstract = jax.eval_shape(partial(layout.ordered, dim=dim), leaf)
    rest = (*split[:dim], (), *split[last + 1 :])
    natural = _split_over_stage(assembly, abstract.shape, dim, rest)
    between = None
    if not natural[dim]:
        slots = ((),) * (last - dim + 1)
        between = (*natural[:dim], *slots, *natural[dim + 1 :])
    return _Leaf(dim, abstract, natural, between)


def _split_over_stage(assembly: Assembly, shape: tuple[int, ...], dim: int, split: Dims) -> Dims:
    """`split` and over `stage` too: a dim that this divides, best not that of layers (one
    all-to-all then does it); none where it divides none."""
    for d in (*(d for d in range(len(shape)) if d != dim), dim):
        both = (*split[d], STAGE)
        if shape[d] % ways(both, assembly.sizes) == 0:
            return (*split[:d], both, *split[d + 1 :])
    return split
