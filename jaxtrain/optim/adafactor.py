"""Adafactor: second moments kept as row and column means of each layer's matrix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxtrain.mesh.sharding import Axes
from jaxtrain.optim.fields import at_least, count, fraction, positive, refuse
from jaxtrain.optim.leaves import (
    AxesTree,
    LeafDims,
    LeafMask,
    checked,
    decoupled_decay,
    leaf_dims,
    matrices,
    real_mean,
    real_size,
)
from jaxtrain.optim.rate import Rate, rate_fields, rate_fn, rate_violations

_EPS2 = 1e-3


class FactoredState(NamedTuple):
    """Second moments in fp32. A factored leaf has `rows` (its column dims gone) and `columns`
    (its row dims gone), any other has `full`; `optax.MaskedNode()` stands for what is absent."""

    count: jax.Array
    rows: Any
    columns: Any
    full: Any


class _Moments(NamedTuple):
    rows: Any
    columns: Any
    full: Any


def scale_by_factored_rms(
    axes: AxesTree, *, decay_rate: float, min_dim_size_to_factor: int, eps: float
) -> optax.GradientTransformation:
    """Divide by the root of the factored second moment (Shazeer & Stern 2018, alg. 4).

    Law: equals `optax.scale_by_factored_rms` on each layer's matrix [rows, columns]. The means are
    taken over the dims in place, so a sharded leaf is never reshaped. A matrix with a side below
    `min_dim_size_to_factor` keeps the full moment, as vectors do. Padding counts nowhere.
    """

    def factored(shape: tuple[int, ...], names: Axes) -> LeafDims | None:
        dims = leaf_dims(names)
        sides = [real_size(shape, names, side) for side in (dims.rows, dims.columns)]
        return dims if dims.rows and min(sides) >= min_dim_size_to_factor else None

    def zeros(leaf: jax.Array, names: Axes) -> _Moments:
        dims = factored(leaf.shape, names)
        square = jnp.zeros_like(leaf, dtype=jnp.float32)
        if dims is None:
            return _Moments(optax.MaskedNode(), optax.MaskedNode(), square)
        return _Moments(square.mean(dims.columns), square.mean(dims.rows), optax.MaskedNode())

    def scale(
        grad: jax.Array, names: Axes, moments: _Moments, decay: jax.Array
    ) -> tuple[jax.Array, _Moments]:
        dims = factored(grad.shape, names)
        square = jnp.square(grad.astype(jnp.float32)) + eps
        if dims is None:
            full = decay * moments.full + (1.0 - decay) * square
            return grad * jax.lax.rsqrt(full), moments._replace(full=full)
        rows = decay * moments.rows + (1.0 - decay) * real_mean(square, names, dims.columns)
        columns = decay * moments.columns + (1.0 - decay) * real_mean(square, names, dims.rows)
        # Rows come before columns in a leaf, so their dims keep their places in `rows`.
        row_factor = jax.lax.rsqrt(rows / real_mean(rows, names, dims.rows, keepdims=True))
        update = grad * jnp.expand_dims(row_factor, dims.columns)
        update = update * jnp.expand_dims(jax.lax.rsqrt(columns), dims.rows)
        return update, moments._replace(rows=rows, columns=columns)

    def init(params: Any) -> FactoredState:
        leaves, treedef = jax.tree.flatten(params)
        names = treedef.flatten_up_to(axes)
        moments = [zeros(leaf, n) for leaf, n in zip(leaves, names, strict=True)]
        return _pack(jnp.zeros((), jnp.int32), treedef, moments)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        leaves, treedef = jax.tree.flatten(updates)
        old = [treedef.flatten_up_to(t) for t in (state.rows, state.columns, state.full)]
        moments = [_Moments(*m) for m in zip(*old, strict=True)]
        decay = 1.0 - (state.count + 1).astype(jnp.float32) ** -decay_rate
        names = treedef.flatten_up_to(axes)
        scaled = [scale(g, n, m, decay) for g, n, m in zip(leaves, names, moments, strict=True)]
        new = _pack(state.count + 1, treedef, [m for _, m in scaled])
        return treedef.unflatten([u for u, _ in scaled]), new

    return optax.GradientTransformation(init, update)


def _pack(steps: jax.Array, treedef: Any, moments: list[_Moments]) -> FactoredState:
    trees = (treedef.unflatten(list(column)) for column in zip(*moments, strict=True))
    return FactoredState(steps, *trees)


def _rms(leaf: jax.Array, names: Axes) -> jax.Array:
    """Root mean square of each layer's tensor, dims kept, padding left out."""
    dims = leaf_dims(names)
    square = jnp.square(leaf.astype(jnp.float32))
    return jnp.sqrt(real_mean(square, names, (*dims.rows, *dims.columns), keepdims=True))


def _clip_by_rms(axes: AxesTree, threshold: float) -> optax.GradientTransformation:
    """Each layer's update scaled down to an RMS of `threshold` (alg. 4)."""

    def clip(updates: Any, params: Any) -> Any:
        del params
        return jax.tree.map(
            lambda u, n: u / jnp.maximum(1.0, _rms(u, n) / threshold), updates, axes
        )

    return optax.stateless(clip)


def _scale_by_param_rms(axes: AxesTree) -> optax.GradientTransformation:
    """Each layer's update times max(eps2, RMS of the layer's tensor) (alg. 5)."""

    def scale(updates: Any, params: Any) -> Any:
        return jax.tree.map(
            lambda u, p, n: u * jnp.maximum(_rms(p, n), _EPS2), updates, params, axes
        )

    return optax.stateless(scale)


@dataclass(frozen=True)
class Adafactor:
    """Adam's second moment from row and column means (Shazeer & Stern 2018, alg. 4 and 5).

    The rate is relative where `relative` (multiplied by max(eps2 = 1e-3, RMS of the layer's
    tensor)), and a layer's update has an RMS of at most `clipping_threshold`; the padded rows of a
    vocabulary are no part of an RMS. Weight decay is
    decoupled and follows the learning rate, as AdamW's does (optax's `weight_decay_rate` does not
    follow it). State: two vectors a matrix, and one number a parameter with momentum.
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
        refuse(violations)

    def violations(self, steps: int) -> list[str]:
        return rate_violations(self.learning_rate, steps)

    def build(self, axes: AxesTree, *, steps: int, batch: int) -> optax.GradientTransformation:
        rate = rate_fn(self.learning_rate, steps=steps, batch=batch)
        parts = [
            scale_by_factored_rms(
                axes,
                decay_rate=self.decay_rate,
                min_dim_size_to_factor=self.min_dim_size_to_factor,
                eps=self.eps,
            )
        ]
        if self.clipping_threshold is not None:
            parts.append(_clip_by_rms(axes, self.clipping_threshold))
        parts.append(optax.scale_by_learning_rate(rate, flip_sign=False))
        if self.relative:
            parts.append(_scale_by_param_rms(axes))
        if self.momentum:
            parts.append(optax.ema(self.momentum, debias=False, accumulator_dtype=jnp.float32))
        parts.append(decoupled_decay(self._decay_fn(rate), self.decay, axes))
        return checked(optax.chain(*parts, optax.scale(-1.0)), axes)

    def _decay_fn(self, rate: Callable[[Any], jax.Array]) -> Callable[[Any], jax.Array] | float:
        if self.weight_decay == 0:
            return 0.0
        return lambda step: self.weight_decay * rate(step)
