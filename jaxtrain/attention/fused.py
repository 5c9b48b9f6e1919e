"""Base of fused kernels: one differentiable function made of a forward and a backward pass.

A fused kernel's backward pass reads q, k, v, its output o and the log-sum-exp of each query's
logits, from which it recomputes the weights of a tile (Dao et al. 2022). Both results are named, so
that a remat policy can keep them and the backward pass need not run the forward kernel again. Both
passes can be called alone to merge partial attention: o and log-sum-exp over each of two sets of
keys determine the softmax over both.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Float32

from jaxtrain.attention.documents import Located, ScoreInputs
from jaxtrain.attention.online_softmax import Scoring
from jaxtrain.collectives.vary import vary, varying_axes

Query = Float[Array, "batch seq heads head_dim"]
Keys = Float[Array, "batch seq kv_heads head_dim"]
LogSumExp = Float32[Array, "batch seq heads"]
Attended = tuple[Query, LogSumExp]


class SavedAttention(NamedTuple):
    """Residuals of a backward pass, which also reads the cotangent of o. starts: `Located`."""

    q: Query
    k: Keys
    v: Keys
    starts: Any
    o: Query
    lse: LogSumExp


@runtime_checkable
class FusedKernel(Protocol):
    """Values, hashable: they are static in a traced program.

    Queries and keys may be of different places of a row, as many of each: then the mask has the
    distance, `starts` are two, and o and log-sum-exp those of these keys alone, of a query that
    sees none of them any number and MASKED, or about that. A backward pass reads o and log-sum-exp
    of all keys, wherever they are: its gradients are these keys' parts.
    """

    def refusals(self, q: Query, scoring: Scoring, *, documents: bool, between: bool) -> list[str]:
        """Why both passes cannot compute this, a reason each. documents: whether there are starts.
        between: whether queries and keys are of different places."""
        ...

    def forward(self, q: Query, k: Keys, v: Keys, starts: Any, scoring: Scoring) -> Attended:
        """starts: `Located`, of the kinds that `refusals` lets pass."""
        ...

    def backward(self, saved: SavedAttention, do: Query, scoring: Scoring) -> tuple[jax.Array, ...]:
        """Gradients of q, k and v, and of `ScoreInputs.heads` where the model learns them."""
        ...


def attend(
    kernel: FusedKernel, q: Query, k: Keys, v: Keys, starts: Located, scoring: Scoring
) -> Attended:
    """(o, log-sum-exp) of `kernel.forward`, its derivative `kernel.backward`. The log-sum-exp is a
    constant to derivatives: whoever merges by it writes their own."""
    # One type for all: what varies over fewer mesh axes is cast here, and the cast's adjoint sums
    # its cotangent, so that inside the types of primals and cotangents are equal.
    axes = varying_axes(*jax.tree.leaves((q, k, v, starts)))
    q, k, v, starts = jax.tree.map(lambda x: vary(x, axes), (q, k, v, starts))
    o, lse = _attend(kernel, scoring, q, k, v, starts)
    return o, lax.stop_gradient(lse)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(
    kernel: FusedKernel, scoring: Scoring, q: Query, k: Keys, v: Keys, starts: Located
) -> Attended:
    return kernel.forward(q, k, v, starts, scoring)


def _attend_forward(
    kernel: FusedKernel, scoring: Scoring, q: Query, k: Keys, v: Keys, starts: Located
) -> tuple[Attended, SavedAttention]:
    o, lse = kernel.forward(q, k, v, starts, scoring)
    o, lse = checkpoint_name(o, "attention_out"), checkpoint_name(lse, "attention_lse")
    return (o, lse), SavedAttention(q, k, v, starts, o, lse)


def _attend_backward(
    kernel: FusedKernel, scoring: Scoring, saved: SavedAttention, cotangents: Attended
) -> tuple[Query, Keys, Keys, Located]:
    dq, dk, dv, *of_heads = kernel.backward(saved, cotangents[0], scoring)
    return dq, dk, dv, cotangent_of(of_heads)


def cotangent_of(of_heads: Sequence[jax.Array]) -> ScoreInputs | None:
    """Returns the cotangent of `ScoreInputs` with the gradient of learned values; None without."""
    return ScoreInputs(None, of_heads[0]) if of_heads else None


_attend.defvjp(_attend_forward, _attend_backward)
