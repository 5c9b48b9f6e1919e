"""Gradients of a tile's scores: of both backward kernels (Dao 2023, FlashAttention-2, algorithm 2).

With p = exp(logits - lse), delta = sum(o * do) of a query, dp = do v^T, and ds the gradients of
q k^T from those of logits, p (dp - delta): dq = ds k, dk = ds^T q, dv = p^T do.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxtrain.backends import Ref
from jaxtrain.hopper.scores import PullBack, RowInputs, TilePlace, tile_logits
from jaxtrain.hopper.tiles import BLOCK, KernelSetting, across, product, rows


class BackwardInputs(NamedTuple):
    """q, do [batch, seq, heads, head_dim]; k, v likewise with kv_heads; lse, delta [batch, heads,
    seq]."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    do: jax.Array
    lse: jax.Array
    delta: jax.Array
    of_rows: RowInputs

    def by_name(self) -> dict[str, jax.Array | None]:
        """Returns all arrays by name."""
        return {**dict(zip(self._fields[:-1], self[:-1], strict=True)), **self.of_rows._asdict()}


class QueryRows(NamedTuple):
    """The log-sum-exp and delta of each query of a tile, and the tile's place beside the first
    keys. batch, inputs: for its place beside others."""

    lse: jax.Array
    delta: jax.Array
    place: TilePlace
    batch: jax.Array
    inputs: RowInputs


def query_rows(
    arrays: SimpleNamespace, batch: jax.Array, head: jax.Array, query: jax.Array
) -> QueryRows:
    """Returns them for the queries from `query` on, beside the first keys."""
    lse, delta = (rows(array.at[batch, head], query) for array in (arrays.lse, arrays.delta))
    inputs = RowInputs.of(arrays)
    return QueryRows(lse, delta, inputs.place(batch, head, query), batch, inputs)


def weights_of(
    queries: Ref, keys: Ref, first_key: jax.Array, own: QueryRows, setting: KernelSetting
) -> tuple[jax.Array, PullBack]:
    """Returns p of a tile, and what takes gradients of logits back."""
    products = product(BLOCK, queries, keys, transposed=True)
    place = own.inputs.beside(own.place, own.batch, first_key)
    logits, pull_back = tile_logits(products, place, setting.scoring)
    return jnp.exp(logits - across(own.lse, logits)), pull_back


def score_gradients(
    p: jax.Array, pull_back: PullBack, cotangents: Ref, values: Ref, own: QueryRows
) -> tuple[jax.Array, ...]:
    """Returns the gradients of a tile's products, and of the head's value for each query where the
    model learns it."""
    dp = product(BLOCK, cotangents, values, transposed=True)
    return pull_back(p * (dp - across(own.delta, dp)))
