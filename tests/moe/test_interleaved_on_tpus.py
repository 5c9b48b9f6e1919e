"""What a TPU's compiler makes of rows on their way to experts: read from its schedules for chips
that are not here."""

from __future__ import annotations

from functools import partial

import jax
import pytest
from jax.sharding import PartitionSpec as P

from jaxtrain.collectives.exchange import Exchange
from jaxtrain.collectives.ring import Ring
from jaxtrain.collectives.rows import Padded
from jaxtrain.moe.layer import ExpertLayer, ExpertLeaves, TokenFacts
from jaxtrain.moe.megablox import Megablox
from jaxtrain.program.overlap import overlaps, tally
from jaxtrain.transformer.feed_forward import silu
from tests.absent_tpu import for_tpu, no_cache, tpu

E, DEVICES, EMBED, HIDDEN, EXPERTS, TOKENS, K = "expert", 4, 256, 512, 8, 1024, 2
CHUNKS, BF16 = 2, 2
PACE = 459e12 / 90e9
"""FLOPs of a v5p while a link carries a byte."""
APART, WHOLE = P(E), P()
MATRICES = [((EXPERTS, EMBED, HIDDEN), APART)] * 2 + [((EXPERTS, HIDDEN, EMBED), APART)]
SHARED = [((EMBED, HIDDEN), WHOLE)] * 2 + [((HIDDEN, EMBED), WHOLE)]


def hops(monkeypatch: pytest.MonkeyPatch, *, shared: bool, backward: bool):
    """Permutes of two chunks of a layer for four v5p."""
    exchange = Exchange((E,), 1.0, (E,), Padded(Ring()), TOKENS // CHUNKS, PACE)
    layer = ExpertLayer(K, silu, kernel=Megablox())

    def run(x, router, gate, up, down, *of_shared):
        leaves = ExpertLeaves(router, (gate, up, down), shared=of_shared)
        forward = partial(layer, facts=TokenFacts(), exchange=exchange)
        if not backward:
            return forward(x, leaves)
        y, pull_back = jax.vjp(forward, x, leaves)
        dx, grads = pull_back(y)
        return y, dx, grads.weights

    tokens, router = ((DEVICES * TOKENS, EMBED), APART), ((EMBED, EXPERTS), WHOLE)
    shapes = [tokens, router, *MATRICES, *(SHARED if shared else ())]
    out = (APART, APART, APART) if backward else APART
    machine = ("meshes/v5p_512.toml", "2x2x1", E)
    text = for_tpu(monkeypatch, *machine, run, *shapes, out=out, check_vma=False)
    return tally(overlaps(text, 1.0))["collective-permute"]


SENT = (DEVICES - 1) * CHUNKS
"""Permutes of one direction: from each chunk to each other device."""


@tpu
@no_cache
def test_all_rows_travel_beside_products_where_there_is_a_shared_expert(monkeypatch) -> None:
    found = hops(monkeypatch, shared=True, backward=True)
    # Rows there and outputs back; in the backward pass both again, and the gradients of both.
    assert found.count == found.asynchronous == found.hidden == 6 * SENT
    of_permute = TOKENS // CHUNKS * K * EMBED * BF16
    assert found.wire_bytes == found.count * of_permute


@tpu
@no_cache
def test_without_one_the_first_rows_and_the_last_outputs_do_not(monkeypatch) -> None:
    found = hops(monkeypatch, shared=False, backward=False)
    assert (found.count, found.hidden) == (2 * SENT, 2 * SENT * (CHUNKS - 1) / CHUNKS)
