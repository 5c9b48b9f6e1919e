"""Attention kernels of our own in Pallas, by way of Mosaic, for Hopper GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp

from jaxtrain.attention.documents import Located, ScoreInputs, document_starts, documents_of
from jaxtrain.attention.fused import Attended, Keys, Query, SavedAttention, attend
from jaxtrain.attention.online_softmax import Scoring
from jaxtrain.attention.refusal import refuse
from jaxtrain.backends import HOPPER_SHARED_BYTES, mosaic_options, too_old_for_mosaic
from jaxtrain.collectives.vary import vary, varying_axes
from jaxtrain.hopper.forward import run_forward
from jaxtrain.hopper.functions import function_refusals, head_refusals
from jaxtrain.hopper.gradients import BackwardInputs
from jaxtrain.hopper.key_gradients import run_key_gradients
from jaxtrain.hopper.query_gradients import run_query_gradients
from jaxtrain.hopper.scores import RowInputs
from jaxtrain.hopper.tiles import BLOCK, KernelSetting
from jaxtrain.violations import count, raise_violations

MOST_HEAD_DIM = 256


def most_stages(head_dim: int) -> int:
    """Returns how many tiles of queries and cotangents fit the shared memory beside what the kernel
    of keys and values has there: these two, and two tiles of scores."""
    tiles = HOPPER_SHARED_BYTES // (2 * BLOCK) - 2 * BLOCK
    return tiles // (2 * head_dim) - 1


@dataclass(frozen=True)
class FlashAttention:
    """Flash attention for Hopper GPUs in Pallas-Mosaic, by JAX 0.12 or newer: causal or not,
    windows, softcaps, functions of scores, any number of documents, head_dim 64, 128, 192 or 256.

    Tiles that documents, window or causality hide are not computed. stages: tiles of keys (or of
    queries) that are in shared memory at a time. interpret: run it in JAX's simulator of a GPU, for
    tests without one. Raises ValueError for a seq that is no multiple of 64, dtypes other than
    bfloat16 and float16, documents without a causal mask, and functions of scores with several
    numbers a head or primitives that are not elementwise. It has not run on a chip.
    """

    runs_on: ClassVar[str] = "gpu"
    """The platform that it is of."""
    gpu_capability: ClassVar[int] = 9
    """Major compute capability of the GPUs that it is of: Hopper's instructions are no others'."""
    stages: int = 2
    interpret: bool = False

    def __post_init__(self) -> None:
        raise_violations(count("stages", self.stages))

    def refusals(self, q: Query, scoring: Scoring, *, documents: bool, between: bool) -> list[str]:
        refusals, (_, seq, _, size) = too_old_for_mosaic(), q.shape
        if q.dtype not in (jnp.bfloat16, jnp.float16):
            refusals.append(f"dtype={q.dtype} is not supported, bfloat16 and float16 are")
        if seq % BLOCK:
            refusals.append(f"seq={seq} is not a multiple of {BLOCK}; pad to {seq + -seq % BLOCK}")
        if size % BLOCK or not 0 < size <= MOST_HEAD_DIM:
            refusals.append(f"head_dim={size} is not 64, 128, 192 or 256")
        elif self.stages > (most := most_stages(size)):
            refusals.append(
                f"stages={self.stages} with head_dim={size} do not fit the {HOPPER_SHARED_BYTES:,} "
                f"bytes of a Hopper GPU's shared memory; use stages={most}"
            )
        if documents and between:
            refusals.append("documents between different places are not supported")
        if between and scoring.function is not None:
            refusals.append("functions of scores between different places are not supported")
        if documents and not scoring.mask.causal:
            refusals.append("documents without a causal mask are not supported")
        return refusals + function_refusals(scoring.function, q.shape[2])

    def __call__(self, q: Query, k: Keys, v: Keys, starts: Located, scoring: Scoring) -> Attended:
        documents = documents_of(starts) is not None
        refuse("FlashAttention", self.refusals(q, scoring, documents=documents, between=False))
        return attend(self, q, k, v, starts, scoring)

    def forward(self, q: Query, k: Keys, v: Keys, starts: Located, scoring: Scoring) -> Attended:
        o, lse = run_forward(q, k, v, _inputs(starts, q), self._setting(scoring))
        axes = varying_axes(q, k, v)
        return vary(o, axes), vary(lse.swapaxes(1, 2), axes)

    def backward(self, saved: SavedAttention, do: Query, scoring: Scoring) -> tuple[jax.Array, ...]:
        q, k, v, starts, o, lse = saved
        delta = jnp.sum(o.astype(jnp.float32) * do.astype(jnp.float32), axis=-1)
        lse, delta = (x.swapaxes(1, 2) for x in (lse, delta))
        inputs = BackwardInputs(q, k, v, do, lse, delta, _inputs(starts, q))
        setting = self._setting(scoring)
        dq, *dvalues = run_query_gradients(inputs, setting)
        gradients = (dq, *run_key_gradients(inputs, setting), *dvalues)
        axes = varying_axes(q, k, v, do)
        return tuple(vary(gradient, axes) for gradient in gradients)

    def _setting(self, scoring: Scoring) -> KernelSetting:
        # The approximate exponential has 22 bits, the approximate tanh 11.
        approximate = scoring.softcap is None and scoring.function is None
        options = mosaic_options(interpret=self.interpret, approx_math=approximate)
        return KernelSetting(scoring, self.stages, options)


def _inputs(located: Located, q: Query) -> RowInputs:
    """Raises ValueError for heads with several values."""
    documents = documents_of(located)
    assert not isinstance(documents, tuple), "it takes the documents of queries for those of keys"
    if not isinstance(located, ScoreInputs):
        return RowInputs(documents)
    refuse("FlashAttention", head_refusals(located.heads.shape))
    positions, _ = located.places(*q.shape[:2])  # of keys of the same place
    if documents is not None and located.positions is not None:
        documents = document_starts(documents)  # a part of a row, and places in the whole one
    return RowInputs(documents, jnp.broadcast_to(positions, q.shape[:2]), located.heads)
