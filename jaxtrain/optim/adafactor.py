"""Adafactor: second moments kept as row and column means of each layer's matrix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import PyTreeDef
from jaxtyping import Array, Float32, Int32, PyTree

from jaxtrain.mesh.sharding import LogicalAxes
from jaxtrain.optim.leaves import (
    AxesTree,
    LeafDims,
    LeafMask,
    check_axes,
    decoupled_decay,
    leaf_dims,
    matrices,
    real_size,
)
from jaxtrain.optim.rate import Rate, rate_fields, rate_fn, rate_violations
from jaxtrain.optim.schedule import RateFn
from jaxtrain.optim.shards import WHOLE, LeafSum, Shards, real_means, squares_of_layers
from jaxtrain.violations import at_least, count, fraction, positive, raise_violations

_EPS2 = 1e-3


class FactoredState(NamedTuple):
    """Second moments in fp32. A factored leaf has `rows` (its column dims gone) and `columns`
    (its row dims gone), any other has `full`; `optax.MaskedNode()` stands for what is absent."""

    count: Int32[Array, ""]
    rows: PyTree
    columns: PyTree
    full: PyTree


class _Moments(NamedTuple):
    """Moments of one leaf, as in `FactoredState`."""

    rows: Any
    columns: Any
    full: Any


def factored(shape: tuple[int, ...], names: LogicalAxes, smallest: int) -> LeafDims | None:
    """The dims of a leaf whose second moment is factored: no side of its matrices is below
    `smallest`. None: it is kept whole, as a vector's is."""
    dims = leaf_dims(names)
    sides = [real_size(shape, names, side) for side in (dims.rows, dims.columns)]
    return dims if dims.rows and min(sides) >= smallest else None


def scale_by_factored_rms(
    axes: AxesTree, *, decay_rate: float, min_dim_size_to_factor: int, eps: float, shards: Shards
) -> optax.GradientTransformation:
    """Divide by the root of the factored second moment (Shazeer & Stern 2018, alg. 4):

        R_t = d R + (1 - d) mean_columns(G^2 + eps),  C_t = d C + (1 - d) mean_rows(G^2 + eps),
        U = G / sqrt(R C / mean(R)),  with the decay d = 1 - t^-decay_rate of step t = 1, 2, ...

    Law: equals `optax.scale_by_factored_rms` on each layer's matrix [rows, columns]. The means are
    taken over the dims in place, so a sharded leaf is never reshaped. A matrix with a side below
    `min_dim_size_to_factor` keeps the full moment, as vectors do. Padding counts nowhere.
    """

    def zeros(leaf: jax.Array, names: LogicalAxes) -> _Moments:
        dims = factored(leaf.shape, names, min_dim_size_to_factor)
        square = jnp.zeros_like(leaf, dtype=jnp.float32)
        if dims is None:
            return _Moments(optax.MaskedNode(), optax.MaskedNode(), square)
        return _Moments(square.mean(dims.columns), square.mean(dims.rows), optax.MaskedNode())

    def init(params: PyTree) -> FactoredState:
        leaves, treedef = jax.tree.flatten(params)
        names = treedef.flatten_up_to(axes)
        moments = [zeros(leaf, n) for leaf, n in zip(leaves, names, strict=True)]
        return _pack(jnp.zeros((), jnp.int32), treedef, moments)

    def update(
        updates: PyTree, state: PyTree, params: PyTree = None
    ) -> tuple[PyTree, FactoredState]:
        del params
        grads, treedef = jax.tree.flatten(updates)
        old = [treedef.flatten_up_to(t) for t in (state.rows, state.columns, state.full)]
        moments = [_Moments(*m) for m in zip(*old, strict=True)]
        decay = 1.0 - (state.count + 1).astype(jnp.float32) ** -decay_rate
        names = treedef.flatten_up_to(axes)
        squares = [jnp.square(g.astype(jnp.float32)) + eps for g in grads]
        split = {
            i: dims
            for i, n in enumerate(names)
            if (dims := factored(grads[i].shape, n, min_dim_size_to_factor))
        }

        factors = _factors(shards, squares, names, split, moments, decay)
        norms = real_means(
            shards, [LeafSum(factors[i][0], names[i], dims.rows) for i, dims in split.items()]
        )
        for (i, (rows, columns)), norm in zip(factors.items(), norms, strict=True):
            dims = split[i]
            grads[i] = grads[i] * jax.lax.rsqrt(rows / norm) * jax.lax.rsqrt(columns)
            moments[i] = moments[i]._replace(
                rows=rows.squeeze(dims.columns), columns=columns.squeeze(dims.rows)
            )
        for i in set(range(len(grads))) - split.keys():
            full = decay * moments[i].full + (1.0 - decay) * squares[i]
            grads[i] = grads[i] * jax.lax.rsqrt(full)
            moments[i] = moments[i]._replace(full=full)
        return treedef.unflatten(grads), _pack(state.count + 1, treedef, moments)

    return optax.GradientTransformation(init, update)


def _factors(
    shards: Shards,
    squares: list[jax.Array],
    names: list[LogicalAxes],
    split: dict[int, LeafDims],
    moments: list[_Moments],
    decay: Float32[Array, ""],
) -> dict[int, tuple[jax.Array, jax.Array]]:
    """Returns the new (rows, columns) of each factored leaf; averaged dims stay, with size 1."""
    parts = [
        LeafSum(squares[i], names[i], over)
        for i, dims in split.items()
        for over in (dims.columns, dims.rows)
    ]
    means = iter(real_means(shards, parts))
    factors = {}
    for i, dims in split.items():
        old = ((moments[i].rows, dims.columns), (moments[i].columns, dims.rows))
        rows, columns = (
            decay * jnp.expand_dims(moment, averaged) + (1.0 - decay) * next(means)
            for moment, averaged in old
        )
        factors[i] = (rows, columns)
    return factors


def _pack(steps: Int32[Array, ""], treedef: PyTreeDef, moments: list[_Moments]) -> FactoredState:
    trees = (treedef.unflatten(list(column)) for column in zip(*moments, strict=True))
    return FactoredState(steps, *trees)


def _rms(tree: PyTree, axes: AxesTree, shards: Shards) -> PyTree:
    """Root mean square of each layer's tensor, dims kept, padding left out."""
    leaves, treedef = jax.tree.flatten(tree)
    names = treedef.flatten_up_to(axes)
    means = real_means(shards, list(map(squares_of_layers, leaves, names)))
    return treedef.unflatten([jnp.sqrt(mean) for mean in means])


def _clip_by_rms(axes: AxesTree, threshold: float, shards: Shards) -> optax.GradientTransformation:
    """Each layer's update scaled down to an RMS of `threshold` (alg. 4)."""

    def clip(updates: PyTree, params: PyTree) -> PyTree:
        del params
        rms = _rms(updates, axes, shards)
        return jax.tree.map(lambda u, r: u / jnp.maximum(1.0, r / threshold), updates, rms)

    return optax.stateless(clip)


def _scale_by_param_rms(axes: AxesTree, shards: Shards) -> optax.GradientTransformation:
    """Each layer's update times max(eps2, RMS of the layer's tensor) (alg. 5)."""

    def scale(updates: PyTree, params: PyTree) -> PyTree:
        rms = _rms(params, axes, shards)
        return jax.tree.map(lambda u, r: u * jnp.maximum(r, _EPS2), updates, rms)

    return optax.stateless(scale)


@dataclass(frozen=True)
class Adafactor:
    """Adam's second moment from row and column means (Shazeer & Stern 2018, alg. 4 and 5).

    The rate is relative where `relative` (multiplied by max(eps2 = 1e-3, RMS of the layer's
    tensor)), and a layer's update has an RMS of at most `clipping_threshold`; the padded rows of a
    vocabulary are no part of an RMS. `weight_decay` is
    decoupled and follows the learning rate, as AdamW's does (optax's `weight_decay_rate` does not
    follow it). State: two vectors a matrix, and one number a parameter with momentum.

    learning_rate: a number, a schedule, a function of the step, or one of them scaled with the
    batch (`ScaledRate`).
    decay_rate: c of the second moment's decay 1 - t**-c. min_dim_size_to_factor: matrices with
    a smaller dim keep the full second moment. eps: added to squared gradients (the paper's
    eps1). decay: which leaves weight decay applies to.
    momentum: of the updates, 0 for none.
    """

    learning_rate: Rate
    weight_decay: float = 0.0
    decay_rate: float = 0.8
    clipping_threshold: float | None = 1.0
    momentum: float = 0.0
    min_dim_size_to_factor: int = 128
    relative: bool = True
    eps: float = 1e-30
    decay: LeafMask = matrices

    def __post_init__(self) -> None:
        violations = rate_fields(self.learning_rate) + positive("eps", self.eps)
        violations += at_least("weight_decay", self.weight_decay, 0)
        violations += positive("decay_rate", self.decay_rate) + fraction("momentum", self.momentum)
        violations += count("min_dim_size_to_factor", self.min_dim_size_to_factor, 1)
        if self.clipping_threshold is not None:
            violations += positive("clipping_threshold", self.clipping_threshold)
        raise_violations(violations)

    def violations(self, steps: int) -> list[str]:
        return rate_violations(self.learning_rate, steps)

    def build(
        self, axes: AxesTree, *, steps: int, batch: int, shards: Shards = WHOLE
    ) -> optax.GradientTransformation:
        rate = rate_fn(self.learning_rate, steps=steps, batch=batch)
        parts = [
            scale_by_factored_rms(
                axes,
                decay_rate=self.decay_rate,
                min_dim_size_to_factor=self.min_dim_size_to_factor,
                eps=self.eps,
                shards=shards,
            )
        ]
        if self.clipping_threshold is not None:
            parts.append(_clip_by_rms(axes, self.clipping_threshold, shards))
        parts.append(optax.scale_by_learning_rate(rate, flip_sign=False))
        if self.relative:
            parts.append(_scale_by_param_rms(axes, shards))
        if self.momentum:
            parts.append(optax.ema(self.momentum, debias=False, accumulator_dtype=jnp.float32))
        parts.append(decoupled_decay(self._decay_fn(rate), self.decay, axes))
        return check_axes(optax.chain(*parts, optax.scale(-1.0)), axes)

    def _decay_fn(self, rate: RateFn) -> RateFn | float:
        if self.weight_decay == 0:
            return 0.0
        return lambda step: self.weight_decay * rate(step)
