"""What compressed sums of gradients carry from step to step, and where it lives.

An encoding's losses are kept on the device that made them and join its next gradients. So the train
state has a dim of devices here, the only place where it knows of a mesh: on another one the sum of
the residuals is what is kept (`redistribute`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import KeyPath
from jaxtyping import Array, Float32

from jaxtrain.collectives.compressed import Compressed
from jaxtrain.collectives.compression import Codec
from jaxtrain.collectives.powersgd import PowerSGD, first_factor
from jaxtrain.collectives.reducer import Reducer
from jaxtrain.mesh.sharding import Dims, Leaf, LogicalAxes, ways
from jaxtrain.nn.param import named_key
from jaxtrain.optim.leaves import leaf_dims, matrices
from jaxtrain.pipeline.layout import StageLayout

Arrays = dict[str, Any]
Residuals = dict[str, Any]
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
    """A compressed leaf on a mesh: `whole` are the axes it is summed over, `split` the others that
    its part depends on, both in mesh order."""

    leaf: Leaf
    whole: tuple[str, ...]
    split: tuple[str, ...]
    sizes: Mapping[str, int]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the part one device sums."""
        leaf = self.leaf
        divided = zip(leaf.shape, leaf.optimizer, strict=True)
        return tuple(n // ways(axes, self.sizes) for n, axes in divided)

    @property
    def matrices(self) -> MatrixDims:
        dims = leaf_dims(self.leaf.axes)
        sides = (range(dims.stacked), dims.rows, dims.columns)
        return MatrixDims(*(math.prod(self.shape[d] for d in side) for side in sides))

    def takes(self, codec: Codec | PowerSGD | None) -> bool:
        """Whether the codec can act: PowerSGD needs as many rows and columns as its rank."""
        if not self.whole or codec is None:
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
    """The leaves a compressed reducer encodes; the same ones on every mesh. Those of up to
    `small_leaf` elements are summed exactly, and for PowerSGD what is no matrix. `layout`: of a
    pipeline, whose padding does not count."""
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
        whole = tuple(a for a in sizes if a not in used)
        parts[name] = CompressedLeaf(leaf, whole, tuple(a for a in sizes if a in used), sizes)
    return parts


def no_residuals(
    reducer: Reducer | None, parts: Mapping[str, CompressedLeaf], seed: int
) -> Residuals:
    """The state before the first step."""
    if not isinstance(reducer, Compressed):
        return {}
    state: Residuals = {"tripped": jnp.int32(-1)}
    if reducer.error_feedback:
        state["errors"] = {
            name: jnp.zeros((ways(part.whole, part.sizes), *part.leaf.shape), jnp.float32)
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


def codec_state(residuals: Residuals) -> Residuals:
    """Those that the sums themselves read and write."""
    return {name: tree for name, tree in residuals.items() if name != "tripped"}


def usable_codec_state(residuals: Residuals) -> Residuals:
    """`codec_state` as a step may add them. Once the guard has tripped no error is: it is what a
    codec left that was given up."""
    found = codec_state(residuals)
    if "errors" in found:
        given_up = residuals["tripped"] >= 0
        found["errors"] = {k: jnp.where(given_up, 0.0, e) for k, e in found["errors"].items()}
    return found


def residual_splits(abstract: Residuals, parts: Mapping[str, CompressedLeaf]) -> dict[str, Any]:
    """How every leaf of the residuals is split: each device has its own."""
    splits: dict[str, Any] = {"tripped": ()} if abstract else {}
    if "errors" in abstract:
        splits["errors"] = {k: (part.whole, *part.leaf.optimizer) for k, part in parts.items()}
    if "factors" in abstract:
        splits["factors"] = {k: (part.split, (), (), ()) for k, part in parts.items()}
    return splits


def residual_axes(abstract: Residuals, axes: Mapping[str, LogicalAxes]) -> dict[str, Any]:
    """The logical axes of errors; () of the others. `axes`: of the parameters."""
    found = jax.tree.map(lambda leaf: (), abstract)
    if "errors" in abstract:
        found["errors"] = {k: (None, *axes[k]) for k in abstract["errors"]}
    return found


def stored_splits(
    abstract: Residuals, splits: Mapping[str, Any], stored: Mapping[str, tuple[int, ...]]
) -> dict[str, Any]:
    """As `residual_splits` for residuals of the shapes that were `stored` (by path below
    `residuals`), on another mesh: the devices' dim is whole where it is another."""

    def fits(path: KeyPath, leaf: jax.ShapeDtypeStruct, split: Dims) -> Dims:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if name.startswith("errors."):
            return split if stored[name][0] == leaf.shape[0] else ((), *split[1:])
        return split if tuple(stored[name]) == tuple(leaf.shape) else ()

    return jax.tree_util.tree_map_with_path(fits, abstract, splits)


def redistribute(stored: Residuals, abstract: Residuals, first: Residuals) -> Residuals:
    """Residuals of another mesh on this one. Errors of a leaf are summed and dealt out in equal
    shares, so that their sum stays what it was (to rounding; exactly for powers of two). Factors
    of another shape begin again as in `first`: only the speed of PowerSGD's approach is in them."""
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
    """Equal shares of the sum of all devices' errors, for `count` devices."""
    if len(error) == count:
        return error
    share = error.sum(0, keepdims=True) / count
    return jnp.broadcast_to(share, (count, *error.shape[1:]))
