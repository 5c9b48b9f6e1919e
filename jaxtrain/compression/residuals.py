"""State that compressed sums of gradients carry from step to step, and its sharding.

The error of an encoding stays on the device that made it and is added to its next gradients. So
these leaves have a dim of devices, and only here does the train state depend on the mesh. A change
of the mesh preserves the sum of the errors (`redistribute`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import KeyPath
from jaxtyping import Array, Float32

from jaxtrain.compression.codecs import Codec
from jaxtrain.compression.compressed import Compressed
from jaxtrain.compression.powersgd import PowerSGD, first_factor
from jaxtrain.compression.reducer import Reducer
from jaxtrain.mesh.axes import Dims
from jaxtrain.mesh.sharding import Leaf, LogicalAxes, ways
from jaxtrain.nn.param import named_key
from jaxtrain.optim.leaves import leaf_dims, matrices
from jaxtrain.pipeline.layout import StageLayout

CodecState = dict[str, Any]
"""errors: leaf -> [devices that sum it, *shape] fp32, in units of the mean gradient: what the sums
so far lack; absent without error feedback. factors: leaf -> [parts the leaf is split into, stack,
columns of a part, rank] fp32, PowerSGD's right factors. tripped: int32, the step whose error was
beyond the guard's bounds, or -1. {} without a compressed reducer."""


class MatrixDims(NamedTuple):
    """A device's part of a leaf as a stack of matrices."""

    stack: int
    rows: int
    cols: int


class CompressedLeaf(NamedTuple):
    """A compressed leaf on a mesh.

    summed: mesh axes that it is summed over, in mesh order.
    split: the other axes, which its part depends on, in mesh order.
    sizes: of every mesh axis.
    """

    leaf: Leaf
    summed: tuple[str, ...]
    split: tuple[str, ...]
    sizes: Mapping[str, int]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the part that one device sums."""
        leaf = self.leaf
        divided = zip(leaf.shape, leaf.optimizer, strict=True)
        return tuple(n // ways(axes, self.sizes) for n, axes in divided)

    @property
    def matrices(self) -> MatrixDims:
        dims = leaf_dims(self.leaf.axes)
        sides = (range(dims.stacked), dims.rows, dims.columns)
        return MatrixDims(*(math.prod(self.shape[d] for d in side) for side in sides))

    def takes(self, codec: Codec | PowerSGD | None) -> bool:
        """True if the codec can be used: PowerSGD needs as many rows and columns as its rank."""
        if not self.summed or codec is None:
            return False
        sides = self.matrices
        return not isinstance(codec, PowerSGD) or codec.rank <= min(sides.rows, sides.cols)


def compressed_parts(
    reducer: Reducer | None,
    small_leaf: int,
    places: Mapping[str, Leaf],
    sizes: Mapping[str, int],
    layout: StageLayout | None = None,
) -> dict[str, CompressedLeaf]:
    """Returns the leaves that a compressed reducer encodes, the same on every mesh.

    Leaves of up to `small_leaf` elements are summed exactly; PowerSGD also leaves out everything
    that is no matrix. layout: of a pipeline, whose padding does not count."""
    if not isinstance(reducer, Compressed):
        return {}
    parts = {}
    for name, leaf in places.items():
        if not leaf.trained:
            continue
        elements = math.prod(leaf.shape)
        if layout is not None and "layers" in leaf.axes:
            elements = elements // (layout.layers + layout.padding) * layout.layers
        if elements <= small_leaf:
            continue
        if isinstance(reducer.codec, PowerSGD) and not matrices(leaf.axes):
            continue
        used = {a for dim in leaf.optimizer for a in dim}
        summed = tuple(a for a in sizes if a not in used)
        parts[name] = CompressedLeaf(leaf, summed, tuple(a for a in sizes if a in used), sizes)
    return parts


def no_residuals(
    reducer: Reducer | None, parts: Mapping[str, CompressedLeaf], seed: int
) -> CodecState:
    """The state before the first step."""
    if not isinstance(reducer, Compressed):
        return {}
    state: CodecState = {"tripped": jnp.int32(-1)}
    if reducer.error_feedback:
        state["errors"] = {
            name: jnp.zeros((ways(part.summed, part.sizes), *part.leaf.shape), jnp.float32)
            for name, part in parts.items()
        }
    if isinstance(reducer.codec, PowerSGD):
        state["factors"] = {
            name: _first_factor(part, reducer.codec.rank, seed) for name, part in parts.items()
        }
    return state


def _first_factor(
    part: CompressedLeaf, rank: int, seed: int
) -> Float32[Array, "parts stack cols {rank}"]:
    sides, count = part.matrices, ways(part.split, part.sizes)
    key = named_key(jax.random.key(seed), f"powersgd.{part.leaf.path}")
    return first_factor((count, *sides), rank, key)


def codec_state(residuals: CodecState) -> CodecState:
    """Returns the residuals that the sums read and write: all but the guard's step."""
    return {name: tree for name, tree in residuals.items() if name != "tripped"}


def usable_codec_state(residuals: CodecState) -> CodecState:
    """Returns `codec_state` for use in a step. Once the guard has tripped, errors are zero: the
    codec that left them is not trusted any more."""
    state = codec_state(residuals)
    if "errors" in state:
        distrusted = residuals["tripped"] >= 0
        state["errors"] = {k: jnp.where(distrusted, 0.0, e) for k, e in state["errors"].items()}
    return state


def residual_splits(abstract: CodecState, parts: Mapping[str, CompressedLeaf]) -> dict[str, Any]:
    """Mesh axes of every dim of the residuals, which are different on each device."""
    splits: dict[str, Any] = {"tripped": ()} if abstract else {}
    if "errors" in abstract:
        splits["errors"] = {k: (part.summed, *part.leaf.optimizer) for k, part in parts.items()}
    if "factors" in abstract:
        splits["factors"] = {k: (part.split, (), (), ()) for k, part in parts.items()}
    return splits


def residual_axes(abstract: CodecState, axes: Mapping[str, LogicalAxes]) -> dict[str, Any]:
    """Logical axes of the residuals: those of the parameters (`axes`) for errors, else ()."""
    logical = jax.tree.map(lambda leaf: (), abstract)
    if "errors" in abstract:
        logical["errors"] = {k: (None, *axes[k]) for k in abstract["errors"]}
    return logical


def stored_splits(
    abstract: CodecState, splits: Mapping[str, Any], stored: Mapping[str, tuple[int, ...]]
) -> dict[str, Any]:
    """Returns `residual_splits` for residuals with the shapes in `stored` (by path below
    `residuals`), saved on another mesh. A dim of devices that has another size is not split."""

    def fits(path: KeyPath, leaf: jax.ShapeDtypeStruct, split: Dims) -> Dims:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if name.startswith("errors."):
            return split if stored[name][0] == leaf.shape[0] else ((), *split[1:])
        return split if tuple(stored[name]) == tuple(leaf.shape) else ()

    return jax.tree_util.tree_map_with_path(fits, abstract, splits)


def redistribute(stored: CodecState, abstract: CodecState, first: CodecState) -> CodecState:
    """Returns residuals of another mesh for this one. Errors of a leaf are summed and divided into
    equal shares, which preserves their sum (exactly for powers of two, else to rounding). Factors
    of another shape start again as in `first`; they affect only how fast PowerSGD converges."""
    out = dict(stored)
    if "errors" in abstract:
        out["errors"] = {
            k: _deal_out(error, abstract["errors"][k].shape[0])
            for k, error in stored["errors"].items()
        }
    if "factors" in abstract:
        out["factors"] = {
            k: old if old.shape == abstract["factors"][k].shape else first["factors"][k]
            for k, old in stored["factors"].items()
        }
    return out


def _deal_out(
    error: Float32[Array, " devices *shape"], count: int
) -> Float32[Array, " count *shape"]:
    """Returns equal shares of the sum of all devices' errors, for `count` devices."""
    if len(error) == count:
        return error
    share = error.sum(0, keepdims=True) / count
    return jnp.broadcast_to(share, (count, *error.shape[1:]))
