"""Modules as flat dictionaries: one name for a parameter everywhere, such as `period.0.mlp.up`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
from flax import nnx

from jaxtrain.mesh.axes import STACKING_AXES
from jaxtrain.nn.quantized.delayed import SCALES
from jaxtrain.nn.quantized.products import QuantizedWeight

Arrays = dict[str, Any]

STACKED = {nnx.PARTITION_NAME: STACKING_AXES[0], "axes": STACKING_AXES[0]}
"""The `transform_metadata` of an nnx.vmap or nnx.scan that makes layers: it writes `layers` before
the axis names of each parameter, in flax's spelling and in ours."""


class ModuleSplit(NamedTuple):
    """A module taken apart: its static form, parameters, and all other state (BatchStat, ...)."""

    static: Any
    params: Arrays
    rest: Arrays
    axes: dict[str, tuple[str | None, ...]]
    """Logical axes of every parameter."""


class _Static(NamedTuple):
    graph: Any
    variables: tuple[tuple[tuple[Any, ...], Any], ...]


def take_apart(module: nnx.Module) -> ModuleSplit:
    """The module's arrays by dotted path. Raises ValueError where axis names and dims differ in
    number, with every such parameter."""
    graph, state = nnx.split(module)
    params: Arrays = {}
    rest: Arrays = {}
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
            rest[name] = value
    if violations:
        raise ValueError("\n".join(violations))
    return ModuleSplit(_Static(graph, tuple(variables)), params, rest, axes)


def put_together(static: _Static, arrays: Arrays) -> Any:
    """The module with these arrays; `arrays` holds parameters and other state together. A matrix
    in 8 bits gets its delayed scales, which its products read."""

    def found(name: str) -> Any:
        value = arrays[name]
        # Of scales of the moment nothing was seen: a leaf of that name is another's then.
        delayed = isinstance(value, QuantizedWeight) and value.seen is not None
        return replace(value, scales=arrays[name + SCALES]) if delayed else value

    flat = [
        (path, variable.replace(found(".".join(map(str, path)))))
        for path, variable in static.variables
    ]
    return nnx.merge(static.graph, nnx.from_flat_state(flat))


def build(make: Callable[[jax.Array], nnx.Module], key: jax.Array) -> nnx.Module:
    """make(key), with flax's own axis annotations left as metadata instead of applied at once."""
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
    """What is wrong with the names and what to write."""
    found = (
        f"parameter {name} has shape {tuple(shape)} and {len(names)} axis names {names}; name one "
        f"logical axis, or None, for each dim"
    )
    if len(names) == len(shape) - 1:
        # Whether the first dim is a stack or a kernel's width is not to be seen from a shape.
        layers = STACKING_AXES[0]
        found += (
            f": {(None, *names)}, or {(layers, *names)} for stacked layers, which nnx.vmap and "
            f"nnx.scan write when given transform_metadata={{nnx.PARTITION_NAME: {layers!r}}} "
            f"(with 'axes': {layers!r} in it where names are given as axes=)"
        )
    return found


def under(arrays: Arrays, prefix: str) -> Arrays:
    """The entries below `prefix`, their names without it."""
    return {k[len(prefix) :]: v for k, v in arrays.items() if k.startswith(prefix)}
