"""Modules as flat dictionaries: one name for a parameter everywhere, such as `period.0.mlp.up`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from flax import nnx

from jaxtrain.mesh.axes import STACKING_AXES

Arrays = dict[str, Any]


class Split(NamedTuple):
    """A module taken apart: its static form, parameters, and all other state (BatchStat, ...)."""

    static: Any
    params: Arrays
    rest: Arrays
    axes: dict[str, tuple[str | None, ...]]
    """Logical axes of every parameter."""


class _Static(NamedTuple):
    graph: Any
    variables: tuple[tuple[tuple[Any, ...], Any], ...]


def take_apart(module: nnx.Module) -> Split:
    """The module's arrays by dotted path. Raises ValueError where axis names do not fit a shape."""
    graph, state = nnx.split(module)
    params: Arrays = {}
    rest: Arrays = {}
    axes = {}
    variables = []
    for path, variable in nnx.to_flat_state(state):
        name = ".".join(map(str, path))
        value = variable.get_value()
        variables.append((path, variable))
        if isinstance(variable, nnx.Param):
            params[name] = value
            axes[name] = _axes(name, variable, len(value.shape))
        else:
            rest[name] = value
    return Split(_Static(graph, tuple(variables)), params, rest, axes)


def put_together(static: Any, arrays: Arrays) -> Any:
    """The module with these arrays; `arrays` holds parameters and other state together."""
    flat = [
        (path, variable.replace(arrays[".".join(map(str, path))]))
        for path, variable in static.variables
    ]
    return nnx.merge(static.graph, nnx.from_flat_state(flat))


def build(make: Callable[[jax.Array], nnx.Module], key: jax.Array) -> nnx.Module:
    """make(key), with flax's own axis annotations left as metadata instead of applied at once."""
    with nnx.use_eager_sharding(False):
        return make(key)


def _axes(name: str, variable: Any, dims: int) -> tuple[str | None, ...]:
    """Axis names from our metadata or either of flax's spellings; none means replicated.

    A stacked parameter has one dim more than its names: the stacking one, `layers`.
    """
    metadata = variable.get_metadata()
    for spelling in ("axes", "out_sharding", "sharding_names", "sharding"):
        names = metadata.get(spelling)
        if names is not None:
            break
    else:
        return (None,) * dims
    names = tuple(names)
    if len(names) == dims - 1:
        return (STACKING_AXES[0], *names)
    if len(names) != dims:
        raise ValueError(
            f"parameter {name} has {dims} dims and {len(names)} axis names {names}; name one "
            f"logical axis for each dim, or None"
        )
    return names


def under(arrays: Arrays, prefix: str) -> Arrays:
    """The entries below `prefix`, their names without it."""
    return {k[len(prefix) :]: v for k, v in arrays.items() if k.startswith(prefix)}
