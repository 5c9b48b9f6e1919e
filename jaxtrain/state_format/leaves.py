"""State as a flat table of leaves: path -> record.

A leaf's path is the dotted keys that lead to it, `params.period.0.attention.q`, for any type of
container. A checkpoint therefore outlives the NamedTuples of an optimizer library.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from jaxtrain.state_format.slots import AS_THEY_REST, AllSlots

ArrayOrShape = jax.Array | jax.ShapeDtypeStruct
"""Of a state, or of the template of one."""


class LeafRecord(NamedTuple):
    """A checkpoint's record of one leaf."""

    shape: tuple[int, ...]
    dtype: str
    key_impl: str | None
    """Name of the generator for a random key array (stored as its uint32 data), else None."""

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"

    @property
    def stored(self) -> tuple[tuple[int, ...], np.dtype]:
        """Shape and dtype of the leaf's array on disk."""
        if self.key_impl is None:
            return self.shape, jnp.dtype(self.dtype)
        kind = jax.random.key(0, impl=self.key_impl).dtype
        data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(self.shape, kind))
        return data.shape, data.dtype

    @property
    def stored_bytes(self) -> int:
        shape, dtype = self.stored
        return math.prod(shape) * dtype.itemsize


def records_from_json(leaves: dict[str, Any]) -> dict[str, LeafRecord]:
    """Returns records from JSON. Raises ValueError, TypeError, AttributeError where it has another
    format."""
    records = {name: LeafRecord(tuple(shape), *fields) for name, (shape, *fields) in leaves.items()}
    for name, record in records.items():
        if not all(isinstance(n, int) and n >= 0 for n in record.shape):
            raise ValueError(f"the shape of {name} is {list(record.shape)}")
        _, dtype = record.stored
        if not (jnp.issubdtype(dtype, jnp.number) or dtype.kind == "b"):
            raise ValueError(f"the dtype of {name} is {record.dtype!r}, which no array of JAX has")
    return records


def named_leaves(tree: PyTree) -> dict[str, Any]:
    """Returns the leaves of `tree` by their natural paths, in the order of `jax.tree.leaves`.

    None and empty containers are structure, not leaves. Raises ValueError where two leaves share a
    path, as with {"a.b": x, "a": {"b": y}}.
    """
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in flat]
    if shared := sorted(name for name, count in Counter(names).items() if count > 1):
        raise ValueError(
            f"leaves share the path {', '.join(shared)}; a path is the keys joined by dots, so "
            "rename a key that holds a dot, or of two that read alike (1 and '1')"
        )
    return {name: leaf for name, (_, leaf) in zip(names, flat, strict=True)}


def stored_bytes(tree: PyTree) -> int:
    """Bytes of all leaves, each counted once however it is sharded or replicated."""
    datas = [_data_spec(leaf) for leaf in jax.tree.leaves(tree)]
    return sum(math.prod(data.shape) * data.dtype.itemsize for data in datas)


def records_of(state: PyTree, slots: AllSlots = AS_THEY_REST) -> dict[str, LeafRecord]:
    """Returns the record of every leaf. Raises ValueError where leaves are not a `jax.Array` (with
    all of them), or no leaf has elements."""
    leaves = named_leaves(state)
    foreign = [name for name, leaf in leaves.items() if not isinstance(leaf, jax.Array)]
    if foreign:
        types = ", ".join(f"{name} is {type(leaves[name]).__name__}" for name in foreign)
        raise ValueError(
            f"every leaf of a saved state is a jax.Array, but {types}; "
            "wrap it in jnp.asarray, or put it into the metadata"
        )
    if not any(leaf.size for leaf in leaves.values()):
        raise ValueError("the state to save holds no array with elements")
    return {name: _record(leaf, stored_shape(name, leaf, slots)) for name, leaf in leaves.items()}


def arrays_of(state: PyTree) -> dict[str, jax.Array]:
    """Returns the arrays to write by their paths. Leaves without elements are in the records
    only."""
    return {name: _data(leaf) for name, leaf in named_leaves(state).items() if leaf.size}


def stored_shape(name: str, leaf: ArrayOrShape, slots: AllSlots) -> tuple[int, ...]:
    """Returns the stored shape of a leaf at rest, or of its template."""
    shape = tuple(leaf.shape)
    return slots[name].stored(shape) if name in slots else shape


def to_request(template: dict[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the arrays to read for the leaves of a template: those with elements, keys as their
    data."""
    return {name: _data_spec(leaf) for name, leaf in template.items() if math.prod(leaf.shape)}


def from_store(
    template: dict[str, Any], arrays: dict[str, jax.Array], records: dict[str, LeafRecord]
) -> list[jax.Array]:
    """Returns the leaves of `template`, in its order, from the arrays that were read."""
    leaves = []
    for name, leaf in template.items():
        spec = _data_spec(leaf)
        data = arrays.get(name)
        if data is None:
            data = jnp.zeros(spec.shape, spec.dtype, device=spec.sharding)
        impl = records[name].key_impl
        leaves.append(data if impl is None else jax.random.wrap_key_data(data, impl=impl))
    return leaves


def mismatches(
    template: dict[str, Any], records: dict[str, LeafRecord], slots: AllSlots = AS_THEY_REST
) -> list[str]:
    """Returns every difference between the stored leaves and the template, one line each."""
    problems = []
    for name, leaf in template.items():
        expected = f"{leaf.dtype}[{','.join(map(str, stored_shape(name, leaf, slots)))}]"
        if name not in records:
            problems.append(f"{name}: not stored, expected {expected}")
        elif str(records[name]) != expected:
            problems.append(f"{name}: stored {records[name]}, expected {expected}")
        if getattr(leaf, "sharding", None) is None:
            problems.append(f"{name}: asked for without a sharding; say where it goes")
    extra = [name for name in records if name not in template]
    return problems + [f"{name}: stored {records[name]}, not asked for" for name in extra]


def _is_key(leaf: ArrayOrShape) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _record(leaf: jax.Array, shape: tuple[int, ...]) -> LeafRecord:
    impl = str(jax.random.key_impl(leaf)) if _is_key(leaf) else None
    return LeafRecord(shape=shape, dtype=str(leaf.dtype), key_impl=impl)


def _data(leaf: jax.Array) -> jax.Array:
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _data_spec(leaf: ArrayOrShape) -> jax.ShapeDtypeStruct:
    """Returns shape, dtype and sharding of the leaf's array on disk."""
    sharding = getattr(leaf, "sharding", None)
    if not _is_key(leaf):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    # The data of a key has one more dim, the last; a spec without it does not split it.
    data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=sharding)
