"""A state in natural layer order, as checkpoints hold it, independent of any pipeline.

On stages the leaves that are stacked over layers rest in slots (`pipeline.layout`): those of
parameters, of their average, of the optimizer's state, and of the errors of compressed sums. A save
takes each layer from its slot, and a restore puts it back (`state_format.slots`): no device moves a
layer or holds one twice for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax

from jaxtrain.mesh.sharding import LogicalAxes
from jaxtrain.pipeline.layout import StageLayout
from jaxtrain.state_format.leaves import named_leaves
from jaxtrain.state_format.slots import AllSlots, Slots
from jaxtrain.step.assembly import Assembly
from jaxtrain.step.state import TrainState, shardings, state_axes_of


def slots_of(assembly: Assembly) -> dict[str, Slots]:
    """Returns by path the slots of the leaves that are stored in another layer order. Needs no
    device."""
    if assembly.pipeline is None or assembly.pipeline.layout.natural:
        return {}
    layout, abstract = assembly.pipeline.layout, assembly.abstract
    names = jax.tree.structure(abstract).flatten_up_to(state_axes_of(abstract, assembly.places))
    layer_of = layout.layer_of if layout.chunks > 1 else layout.layer_of[0]
    return {
        path: Slots(_first_dim(layout, axes), layer_of)
        for path, axes in zip(named_leaves(abstract), names, strict=True)
        if "layers" in axes
    }


def _first_dim(layout: StageLayout, axes: LogicalAxes) -> int:
    """Number of the first dim of a leaf in slots: that of chunks if there is one, else that of
    slots."""
    return axes.index("layers") - (layout.chunks > 1)


def natural_shapes(assembly: Assembly) -> TrainState:
    """Shapes of the state as it is saved. Needs no device."""
    leaves, structure = jax.tree.flatten(assembly.abstract)
    slots, paths = slots_of(assembly), named_leaves(assembly.abstract)
    shapes = [
        jax.ShapeDtypeStruct(slots[path].stored(leaf.shape), leaf.dtype) if path in slots else leaf
        for path, leaf in zip(paths, leaves, strict=True)
    ]
    return structure.unflatten(shapes)


def params_in_natural_order(assembly: Assembly, params: dict[str, Any]) -> dict[str, Any]:
    """Returns leaves with the names of parameters in natural layer order."""
    return {
        k: to_natural_order(assembly, leaf, assembly.places[k].axes) for k, leaf in params.items()
    }


def to_natural_order(assembly: Assembly, leaf: Any, axes: LogicalAxes) -> Any:
    """Returns a leaf of the state in natural layer order; `axes` are its logical axes at rest."""
    if assembly.pipeline is None or "layers" not in axes:
        return leaf
    layout = assembly.pipeline.layout
    return layout.from_slots(leaf, _first_dim(layout, axes))


def to_rest_order(assembly: Assembly, leaf: Any, axes: LogicalAxes) -> Any:
    """Inverse of `to_natural_order`."""
    if assembly.pipeline is None or "layers" not in axes:
        return leaf
    layout = assembly.pipeline.layout
    return layout.to_slots(leaf, _first_dim(layout, axes))


@dataclass(frozen=True, eq=False)
class AtRest:
    """Sharding and storage order of a state of `assembly` on `mesh`."""

    assembly: Assembly
    mesh: jax.sharding.Mesh

    @cached_property
    def slots(self) -> AllSlots:
        return slots_of(self.assembly)

    @cached_property
    def shardings(self) -> TrainState:
        return shardings(self.assembly.abstract, self.assembly.splits, self.mesh)

    @cached_property
    def template(self) -> TrainState:
        """Shape, dtype and sharding of every leaf."""
        return jax.tree.map(placed, self.assembly.abstract, self.shardings)


def placed(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
