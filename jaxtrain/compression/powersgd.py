"""PowerSGD: matrices summed as two thin factors (Vogels et al. 2019, algorithms 1 and 2).

One step of power iteration a training step, begun where the last one ended, finds the leading
directions of the sum; error feedback sends the others later. The factors are sums themselves, so
they need no more than plain all-reduces.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, Key

from jaxtrain.collectives.named import AllReduce
from jaxtrain.collectives.vary import vary
from jaxtrain.mesh.axes import MeshAxes
from jaxtrain.violations import count, raise_violations


@dataclass(frozen=True)
class PowerSGD:
    """Sums of matrices [..., rows, cols] by their best directions, `rank` of them.

    A leaf of more dims is a stack of matrices; one that is no matrix (and which dims stack, only
    the logical axes tell) is the caller's to sum exactly. Vogels et al. take rank 2 for a ResNet, 4
    for an LSTM.
    """

    rank: int = 4

    def __post_init__(self) -> None:
        raise_violations(count("rank", self.rank))

    def payload_bytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of both factors: what an all-reduce would have 4 * prod(shape) of."""
        *stack, rows, cols = shape
        return 4 * math.prod(stack) * self.rank * (rows + cols)

    def at(self, step: int) -> PowerSGD:
        return self


class PowerSGDState(NamedTuple):
    """State that one device carries to the next step."""

    error: Float32[Array, "*stack rows cols"] | None
    """Each device's own: what its matrices lack in the estimates so far. None: no feedback."""
    q: Float32[Array, "*stack cols rank"]
    """The same on all devices: the last right factor, columns scaled to a greatest entry of 1
    (only their span matters)."""


def first_factor(
    shape: tuple[int, ...], rank: int, key: Key[Array, ""]
) -> Float32[Array, "*stack cols {rank}"]:
    """The `q` before the first step for matrices of `shape` [..., rows, cols]; `key` the same on
    all devices."""
    return jax.random.normal(key, (*shape[:-2], shape[-1], rank))


def powersgd_all_reduce(
    matrices: Float32[Array, "*stack rows cols"],
    state: PowerSGDState,
    axes: MeshAxes,
    reducer: AllReduce,
) -> tuple[Float32[Array, "*stack rows cols"], PowerSGDState]:
    """Returns the sum over devices of `matrices`, projected on `rank` directions, and the next
    state. Bits are equal on all devices if the sums of `reducer` are.

    Runs inside `jax.shard_map`. One device gets `matrices` and `state` back. A number that is not
    finite makes the result and the next errors not finite: keep the old state if the step is
    skipped. Raises ValueError for a shape that is no matrix, or too small for the rank.
    """
    rank, shape = state.q.shape[-1], matrices.shape
    if len(shape) < 2 or rank > min(shape[-2:]):
        raise ValueError(
            f"rank={rank} needs matrices of that many rows and columns, and the shape is "
            f"{list(shape)}; sum it exactly, or lower the rank"
        )
    n = lax.axis_size(axes) if axes else 1
    if n == 1:
        return matrices, state
    matrices, q = vary(matrices, axes), vary(state.q, axes)
    # Vogels et al. 2019, algorithm 1, M = sum over n devices of M_i and E_i the errors:
    #   P = orthonormal(sum (M_i + E_i) Q),  Q' = sum (M_i + E_i)^T P,  M ~ P Q'^T,
    #   E_i <- M_i + E_i - P Q'^T / n.  They take means where we take sums.
    corrected = matrices if state.error is None else matrices + state.error
    p, _ = jnp.linalg.qr(reducer.all_reduce(_matmul(corrected, q), axes))
    right = reducer.all_reduce(_matmul(corrected.mT, p), axes)
    estimate = _matmul(p, right.mT)
    # A direction in which the sum is zero keeps its last column: from zeros it would not return.
    top = jnp.abs(right).max(-2, keepdims=True)
    q = jnp.where(top > 0, right / top, q)
    error = None if state.error is None else corrected - estimate / n
    return estimate, PowerSGDState(error, q)


def _matmul(
    a: Float32[Array, "*stack m k"], b: Float32[Array, "*stack k n"]
) -> Float32[Array, "*stack m n"]:
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)
