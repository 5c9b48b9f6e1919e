"""Types of values inside shard_map: the mesh axes over which a value may differ."""

from __future__ import annotations

import jax
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jaxtyping import Array, Integer

from jaxtrain.mesh.axes import MeshAxes

Index = int | Integer[Array, ""]
"""A whole number, which may be one that is known only when the program runs: of a device, a tile,
a layer, a microbatch."""


def varying_axes(*arrays: jax.typing.ArrayLike) -> MeshAxes:
    """Returns the mesh axes over which any of them may differ, sorted; () outside shard_map and
    where types are not checked."""
    varying = (jax.typeof(x).manual_axis_type.varying for x in arrays)
    return tuple(sorted(frozenset[str]().union(*varying)))


def vary(x: jax.Array, axes: MeshAxes) -> jax.Array:
    """`x` typed as varying over `axes` (nothing moves): inside the step every value varies."""
    present = varying_axes(x)
    missing = tuple(a for a in axes if a not in present)
    return lax.pcast(x, missing, to="varying") if missing else x


def same(x: jax.Array, axes: MeshAxes) -> jax.Array:
    """Returns `x` typed as equal on all devices of `axes`; nothing is sent or compared.

    For the result of a sum made of permutes, which JAX cannot know to be equal. The caller must be
    sure of it, and a test of the algorithm must show it. Not for values that types already know to
    be equal.
    """
    varying = varying_axes(x)
    typed = tuple(a for a in axes if a in varying)
    return _same.bind(x, axes=typed) if typed else x


_same = Primitive("same_on_all_devices")
_same.def_impl(lambda x, *, axes: x)


@_same.def_abstract_eval
def _typed_as_same(x: ShapedArray, *, axes: MeshAxes) -> ShapedArray:
    kind = x.manual_axis_type
    return x.update(manual_axis_type=kind.update(varying=kind.varying - frozenset(axes)))


mlir.register_lowering(_same, lambda context, x, *, axes: [x])
