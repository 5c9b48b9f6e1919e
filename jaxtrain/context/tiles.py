"""Kernel for attention between tokens of different places, and the merge of its results."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.attention.blockwise import Blockwise
from jaxtrain.attention.fused import Attended, FusedKernel, Query
from jaxtrain.attention.kernels import PlatformKernel, choose, portable
from jaxtrain.attention.online_softmax import MASKED, Scoring


def tile_kernel(kernel: Any, q: Query, scoring: Scoring, *, documents: bool) -> FusedKernel:
    """Returns the kernel for queries like q and as many keys.

    That is `kernel` (the platform's choice resolved) if it returns the log-sum-exp and accepts the
    problem, else `Blockwise`, with a warning on an accelerator. documents: there are document
    starts; under a mask with an offset, queries and keys have separate ones.
    """
    platform, portable_chosen = jax.default_backend(), False
    if isinstance(kernel, PlatformKernel):
        platform = kernel.platform
        kernel = kernel.settled(q, scoring, documents=documents)
        portable_chosen = isinstance(kernel, Blockwise)
    problem: dict[str, Any] = dict(
        documents=documents, between=not scoring.mask.causal or bool(scoring.mask.offset)
    )
    reasons = [f"{kernel!r} returns no log-sum-exp"]
    if isinstance(kernel, FusedKernel):
        reasons = kernel.refusals(q, scoring, **problem)
    if platform != "cpu" and (portable_chosen or reasons):
        warnings.warn(portable(platform, q, scoring, reasons), stacklevel=2)
    if isinstance(kernel, FusedKernel) and not reasons:
        return kernel
    fallback = choose(
        platform, dtype=jnp.float32, seq=q.shape[1], head_dim=q.shape[3], documents=documents
    )
    assert isinstance(fallback, Blockwise), "no platform has a fused kernel for fp32"
    return fallback


def merged(a: Attended, b: Attended) -> Attended:
    """Attention to two sets of keys together, from that to each: of a every query has seen a key.
    What b has where a query saw none need not be a number."""
    (o_a, lse_a), (o_b, lse_b) = a, b
    seen = lse_b > MASKED / 2
    lse_b = jnp.where(seen, lse_b, MASKED)
    o_b = jnp.where(seen[..., None], o_b.astype(jnp.float32), 0.0)
    lse = jnp.logaddexp(lse_a, lse_b)
    left, right = jnp.exp(lse_a - lse)[..., None], jnp.exp(lse_b - lse)[..., None]
    return o_a * left + o_b * right, lse
