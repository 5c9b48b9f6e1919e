"""Structure of a leaf for optimizers, from its logical axes and never from its ndim.

A leaf [layers, embed, heads, head_dim] is `layers` matrices [embed, heads * head_dim]; a leaf
[layers, heads, head_dim] is `layers` bias vectors. An optimizer that looks at shapes alone takes
the first for a four-dim tensor and the second for a matrix.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import optax
from jax.tree_util import KeyPath
from jaxtyping import PyTree

from jaxtrain.mesh.sharding import LogicalAxes, PaddedAxis
from jaxtrain.optim.schedule import RateFn
from jaxtrain.violations import raise_violations

AxesTree = PyTree
"""A tree like the parameters' whose leaves are tuples of logical axis names, one for each dim."""

LeafMask = Callable[[LogicalAxes], bool]
"""Which leaves something applies to; a module-level function, so that a config can hold it."""

_ONE_DIM = {("heads", "head_dim"), ("kv_heads", "head_dim")}
_TABLES = frozenset({"vocab", "seq", "classes"})


class LeafDims(NamedTuple):
    """The dims of a leaf: `stacked` leading ones, then those that make rows, then columns.

    `rows` is empty for vectors and scalars. Rows are a matrix's inputs, columns its outputs.
    """

    stacked: int
    rows: tuple[int, ...]
    columns: tuple[int, ...]


def leaf_dims(axes: LogicalAxes) -> LeafDims:
    """Returns the stacking dims, rows and columns of a leaf.

    Stacking dims are those up to the last `layers`, then `experts` unless it is the last dim (a
    router's output). Adjacent heads and head_dim count as one dim. If three or more dims remain
    (a convolution [height, width, in, out]), the last is the columns, the others the rows.
    """
    stacked = max((dim + 1 for dim, name in enumerate(axes) if name == "layers"), default=0)
    while stacked < len(axes) - 1 and axes[stacked] == "experts":
        stacked += 1
    groups: list[tuple[int, ...]] = []
    for dim in range(stacked, len(axes)):
        if groups and (axes[dim - 1], axes[dim]) in _ONE_DIM:
            groups[-1] = (*groups[-1], dim)
        else:
            groups.append((dim,))
    rows = tuple(dim for group in groups[:-1] for dim in group)
    return LeafDims(stacked, rows, groups[-1] if groups else ())


def real_size(shape: tuple[int, ...], axes: LogicalAxes, dims: tuple[int, ...]) -> int:
    """Number of entries along the dims together, without padding."""
    names = ((axes[d], shape[d]) for d in dims)
    return math.prod(n.real if isinstance(n, PaddedAxis) else size for n, size in names)


def matrices(axes: LogicalAxes) -> bool:
    """Every weight matrix and embedding table; not norms, biases and scalars (the usual mask of
    weight decay: Radford et al. 2019 and after)."""
    return bool(leaf_dims(axes).rows)


def hidden_matrices(axes: LogicalAxes) -> bool:
    """`matrices` without embeddings, heads and learned positions."""
    return matrices(axes) and _TABLES.isdisjoint(axes)


def everything(axes: LogicalAxes) -> bool:
    """Chooses every leaf."""
    del axes
    return True


def is_axes(node: object) -> bool:
    """True for the leaves of an `AxesTree`: plain tuples of names."""
    return type(node) is tuple and all(name is None or isinstance(name, str) for name in node)


def map_axes(fn: Callable[[LogicalAxes], object], axes: AxesTree) -> PyTree:
    """The tree with `fn` of each leaf's logical axes."""
    return jax.tree.map(fn, axes, is_leaf=is_axes)


def decoupled_decay(
    rate: float | RateFn, where: LeafMask, axes: AxesTree
) -> optax.GradientTransformation:
    """Adds `rate` x parameter to the updates of the leaves chosen by `where`; nothing for 0."""
    if not callable(rate) and rate == 0:
        return optax.identity()
    return optax.add_decayed_weights(rate, mask=map_axes(where, axes))


def check_axes(
    transform: optax.GradientTransformation, axes: AxesTree
) -> optax.GradientTransformation:
    """`transform`, whose init raises ValueError unless every leaf has one name for each dim."""

    def init(params: PyTree) -> PyTree:
        violations = []

        def check(path: KeyPath, leaf: jax.Array, names: LogicalAxes) -> None:
            if not is_axes(names) or len(names) != leaf.ndim:
                violations.append(
                    f"{jax.tree_util.keystr(path, simple=True, separator='.')} has shape "
                    f"{leaf.shape} and logical axes {names}; name one axis (or None) for each dim"
                )

        jax.tree_util.tree_map_with_path(check, params, axes)
        raise_violations(violations)
        return transform.init(params)

    return optax.GradientTransformation(init, transform.update)
