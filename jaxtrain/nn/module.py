"""Modules as flat dictionaries: one name for a parameter everywhere, such as `period.0.mlp.up`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
from flax import nnx

from jaxtrain.arrays import Leaves
from jaxtrain.mesh.axes import STACKING_AXES
from jaxtrain.quantization.delayed import SCALES
from jaxtrain.quantization.weights import QuantizedWeight

STACKED = {nnx.PARTITION_NAME: STACKING_AXES[0], "axes": STACKING_AXES[0]}
"""The `transform_metadata` of an nnx.vmap or nnx.scan that makes layers: it writes `layers` before
the axis names of each parameter, in flax's spelling and in ours."""


class ModuleSplit(NamedTuple):
    """Parts of a module: its static form, parameters, and all other state (BatchStat, ...)."""

    static: Any
    params: Leaves
    model_state: Leaves
    axes: dict[str, tuple[str | None, ...]]
    """Logical axes of every parameter."""


class _Static(NamedTuple):
    graph: Any
    variables: tuple[tuple[tuple[Any, ...], Any], ...]


def take_apart(module: nnx.Module) -> ModuleSplit:
    """Returns the module's arrays by dotted path. Raises ValueError, with every such parameter,
    where the numbers of axis names and dims differ."""
    graph, state = nnx.split(module)
    params: Leaves = {}
    model_state: Leaves = {}
    axes = {}
    variables = []
    violations: list[str] = []
    for path, variable in nnx.to_flat_state(state):
        name = ".".join(map(str, path))
        value = variable.get_value()
        variables.append((path, variable))
        if isinstance(variable, nnx.Param):
            params[name] = value
            axes[name] = _axes(variable, len(value.shape))
            if len(axes[name]) != len(value.shape):
                violations.append(_misnamed(name, value.shape, axes[name]))
        else:
            model_state[name] = value
    if violations:
        raise ValueError("\n".join(violations))
    return ModuleSplit(_Static(graph, tuple(variables)), params, model_state, axes)


def with_attributes(static: _Static, **attributes: Any) -> _Static:
    """Returns the static form of the module with these attributes, which hold no arrays."""
    module = nnx.merge(static.graph, nnx.from_flat_state(list(static.variables)))
    for name, value in attributes.items():
        setattr(module, name, value)
    return static._replace(graph=nnx.split(module)[0])


def put_together(static: _Static, arrays: Leaves) -> Any:
    """Returns the module with these arrays, parameters and other state together. A matrix in 8 bits
    gets its delayed scales, which its products read."""

    def leaf(name: str) -> Any:
        value = arrays[name]
        # `seen` is None without delayed scaling: a leaf of that name is the user's own then.
        delayed = isinstance(value, QuantizedWeight) and value.seen is not None
        return replace(value, scales=arrays[name + SCALES]) if delayed else value

    flat = [
        (path, variable.replace(leaf(".".join(map(str, path)))))
        for path, variable in static.variables
    ]
    return nnx.merge(static.graph, nnx.from_flat_state(flat))


def build(make: Callable[[jax.Array], nnx.Module], key: jax.Array) -> nnx.Module:
    """Returns make(key). Flax's own axis annotations stay metadata and are not applied at once."""
    with nnx.use_eager_sharding(False):
        return make(key)


def _axes(variable: nnx.Variable, dims: int) -> tuple[str | None, ...]:
    """Axis names from our metadata or either of flax's spellings; none means replicated."""
    metadata = variable.get_metadata()
    for spelling in ("axes", "out_sharding", "sharding_names", "sharding"):
        names = metadata.get(spelling)
        if names is not None:
            return tuple(names)
    return (None,) * dims


def _misnamed(name: str, shape: tuple[int, ...], names: tuple[str | None, ...]) -> str:
    """Message for a parameter whose number of axis names is wrong, with the remedy."""
    message = (
        f"parameter {name} has shape {tuple(shape)} and {len(names)} axis names {names}; name one "
        f"logical axis, or None, for each dim"
    )
    if len(names) == len(shape) - 1:
        # A shape does not tell whether the first dim is a stack or a kernel's width.
        layers = STACKING_AXES[0]
        message += (
            f": {(None, *names)}, or {(layers, *names)} for stacked layers, which nnx.vmap and "
            f"nnx.scan write when given transform_metadata={{nnx.PARTITION_NAME: {layers!r}}} "
            f"(with 'axes': {layers!r} in it where names are given as axes=)"
        )
    return message


def under(arrays: Leaves, prefix: str) -> Leaves:
    """Entries below `prefix`, with the prefix removed from their names."""
    return {k[len(prefix) :]: v for k, v in arrays.items() if k.startswith(prefix)}
