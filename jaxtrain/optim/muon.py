"""Muon: each layer's matrix moves along the orthogonal factor of its momentum.

Embeddings, heads, learned positions, norms and biases are AdamW's; `partition` says which.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int32, PyTree

from jaxtrain.mesh.sharding import LogicalAxes
from jaxtrain.optim.elementwise import AdamW
from jaxtrain.optim.leaves import (
    AxesTree,
    check_axes,
    decoupled_decay,
    everything,
    hidden_matrices,
    leaf_dims,
    map_axes,
)
from jaxtrain.optim.rate import Rate, rate_fields, rate_fn, rate_violations
from jaxtrain.optim.shards import WHOLE, ByMatrix, Shards
from jaxtrain.violations import at_least, count, fraction, positive, raise_violations

QUINTIC = (3.4445, -4.7750, 2.0315)
"""Coefficients of Jordan et al. 2024: the steepest at 0, singular values end in (0.7, 1.2)."""


def newton_schulz(
    x: Float[Array, "*stack m n"],
    *,
    steps: int = 5,
    coefficients: tuple[float, float, float] = QUINTIC,
    eps: float = 1e-8,
    dtype: jax.typing.DTypeLike = jnp.float32,
) -> Float[Array, "*stack m n"]:
    """Roughly U V^T of each matrix U S V^T of the stack, in x's dtype: the nearest matrix with
    orthonormal rows, or columns (Jordan et al. 2024).

    `steps` of X <- aX + (bA + cA^2)X with A = X X^T, from X / |X|_F, in `dtype`. Costs steps x
    (4 k^2 l + 2 k^3) FLOPs a matrix, k the shorter side and l the longer.
    A function of one device's whole matrices: no collective, any number of leading dims.
    """
    a, b, c = coefficients
    wide = x.shape[-2] <= x.shape[-1]
    y = x.astype(jnp.float32)
    norm = jnp.sqrt(jnp.sum(jnp.square(y), axis=(-2, -1), keepdims=True))
    # The iteration commutes with transposing, and the Gram matrix of the shorter side is smaller.
    y = (y if wide else y.mT) / (norm + eps)
    y = y.astype(dtype)
    # With X = U S V^T the step is U (aS + bS^3 + cS^5) V^T: it leaves U and V, and drives every
    # singular value, in (0, 1] after the division by the norm, towards 1.
    for _ in range(steps):
        gram = y @ y.mT
        y = a * y + (b * gram + c * (gram @ gram)) @ y
    return (y if wide else y.mT).astype(x.dtype)


class MuonState(NamedTuple):
    """count: steps done. momentum: a tree like the parameters."""

    count: Int32[Array, ""]
    momentum: PyTree


def partition(axes: AxesTree) -> PyTree:
    """The tree of "muon" (matrices inside the network) and "adam" (all other leaves)."""
    return map_axes(lambda names: "muon" if hidden_matrices(names) else "adam", axes)


def scale_by_muon(
    axes: AxesTree,
    *,
    momentum: float,
    nesterov: bool,
    rms: float | None,
    orthogonalize: ByMatrix,
    shards: Shards,
) -> optax.GradientTransformation:
    """Orthogonalised momentum, each layer's [rows, columns] a matrix of its own.

    Law: equals optax's `scale_by_muon` and `scale_by_shape` on the unstacked matrices (momentum is
    debiased, which Jordan's is not). `orthogonalize` takes whole matrices [..., m, n].
    """

    def direction(x: jax.Array, names: LogicalAxes) -> jax.Array:
        dims = leaf_dims(names)
        fan_in = math.prod(x.shape[d] for d in dims.rows)
        fan_out = math.prod(x.shape[d] for d in dims.columns)
        scale = max(1.0, fan_out / fan_in) ** 0.5
        if rms is not None:
            scale = rms * max(fan_in, fan_out) ** 0.5

        def by_matrix(x: jax.Array) -> jax.Array:
            lead = x.shape[: dims.stacked - len(names)]
            return orthogonalize(x.reshape(*lead, fan_in, fan_out)).reshape(x.shape)

        return scale * shards.by_matrix(by_matrix, x, names)

    def init(params: PyTree) -> MuonState:
        return MuonState(jnp.zeros((), jnp.int32), optax.tree.zeros_like(params))

    def update(updates: PyTree, state: PyTree, params: PyTree = None) -> tuple[PyTree, MuonState]:
        del params
        steps = state.count + 1
        buffer = optax.tree.update_moment(updates, state.momentum, momentum, 1)
        ahead = optax.tree.bias_correction(buffer, momentum, steps)
        if nesterov:
            later = optax.tree.bias_correction(buffer, momentum, steps + 1)
            now = optax.tree.bias_correction(updates, momentum, steps)
            ahead = jax.tree.map(lambda m, g: momentum * m + (1 - momentum) * g, later, now)
        return jax.tree.map(direction, ahead, axes), MuonState(steps, buffer)

    return optax.GradientTransformation(init, update)


@dataclass(frozen=True)
class Muon:
    """Muon on matrices and AdamW on the rest (Jordan et al. 2024).

    rms: updates have this root mean square, so that Muon and AdamW share rate and decay (0.2: Liu
      et al. 2025, sec. 2.2); None scales by sqrt(max(1, fan_out / fan_in)) as Jordan does.
    learning_rate: a number, a schedule, a function of the step, or one of them scaled with the
    batch (`ScaledRate`).
    weight_decay: decoupled, times the learning rate. momentum: of gradients; nesterov: taken one
      step ahead.
    newton_schulz_steps, coefficients: how often x <- a x + (b A + c A^2) x with A = x x^T is
      applied to a matrix, and its (a, b, c). eps: added to the norm that it is divided by first.
    dtype: of the Newton-Schulz iteration; Jordan's is bfloat16.
    adam: None is AdamW at this learning rate and weight decay.
    State: one number a parameter in matrices, two elsewhere.
    """

    learning_rate: Rate
    weight_decay: float = 0.1
    momentum: float = 0.95
    nesterov: bool = True
    rms: float | None = 0.2
    newton_schulz_steps: int = 5
    coefficients: tuple[float, float, float] = QUINTIC
    eps: float = 1e-8
    dtype: jax.typing.DTypeLike = jnp.float32
    adam: AdamW | None = None

    def __post_init__(self) -> None:
        violations = rate_fields(self.learning_rate) + positive("eps", self.eps)
        violations += at_least("weight_decay", self.weight_decay, 0)
        violations += fraction("momentum", self.momentum)
        violations += count("newton_schulz_steps", self.newton_schulz_steps, 1)
        if self.rms is not None:
            violations += positive("rms", self.rms)
        if len(self.coefficients) != 3:
            violations.append(
                f"coefficients={self.coefficients} must be the three of a quintic; use {QUINTIC}"
            )
        if not jnp.issubdtype(self.dtype, jnp.floating):
            violations.append(f"dtype={self.dtype!r} must be a floating type; use jnp.bfloat16")
        raise_violations(violations)

    def violations(self, steps: int) -> list[str]:
        violations = rate_violations(self.learning_rate, steps)
        return violations + ([] if self.adam is None else self.adam.violations(steps))

    def build(
        self, axes: AxesTree, *, steps: int, batch: int, shards: Shards = WHOLE
    ) -> optax.GradientTransformation:
        raise_violations(self.violations(steps))
        iterate = functools.partial(
            newton_schulz,
            steps=self.newton_schulz_steps,
            coefficients=self.coefficients,
            eps=self.eps,
            dtype=self.dtype,
        )
        groups = _Groups.of(axes)
        muon = optax.chain(
            scale_by_muon(
                groups.muon,
                momentum=self.momentum,
                nesterov=self.nesterov,
                rms=self.rms,
                orthogonalize=iterate,
                shards=shards,
            ),
            decoupled_decay(self.weight_decay, everything, groups.muon),
            optax.scale_by_learning_rate(rate_fn(self.learning_rate, steps=steps, batch=batch)),
        )
        adam = self.adam or AdamW(self.learning_rate, weight_decay=self.weight_decay)
        transforms: dict[Hashable, optax.GradientTransformation] = {
            "muon": muon,
            "adam": adam.build(groups.adam, steps=steps, batch=batch),
        }
        return check_axes(optax.partition(transforms, partition(axes)), axes)


class _Groups(NamedTuple):
    """The axes of each optimizer's leaves, the other's masked as `optax.partition` masks them."""

    muon: AxesTree
    adam: AxesTree

    @classmethod
    def of(cls, axes: AxesTree) -> _Groups:
        return cls(
            map_axes(lambda n: n if hidden_matrices(n) else optax.MaskedNode(), axes),
            map_axes(lambda n: optax.MaskedNode() if hidden_matrices(n) else n, axes),
        )
