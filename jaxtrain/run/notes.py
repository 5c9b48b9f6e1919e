"""What runs, and is perhaps not what was meant: told by `check`, refused by nobody."""

from __future__ import annotations

from jaxtrain.mesh.sharding import ways
from jaxtrain.models.description import ExpertCall, operations
from jaxtrain.nn.loss import chunk_count
from jaxtrain.pipeline.overhead import warnings
from jaxtrain.step.assembly import Assembly

MANY = 4
"""Times as many chunks as would do."""


def notes(assembly: Assembly) -> list[str]:
    """One sentence each, with what to change."""
    if assembly.description is None:
        return []
    tables = [] if assembly.pipeline is None else warnings(assembly.pipeline.schedule)
    return [*_routers(assembly), *_chunks(assembly), *(f"pipeline: {text}" for text in tables)]


def _routers(assembly: Assembly) -> list[str]:
    """Routers whose gradient is zero by their definition."""
    blocks = assembly.described.layers
    calls = [each for b in blocks for each in operations(b) if isinstance(each, ExpertCall)]
    alone = [call for call in calls if call.per_token == 1]
    if not any(call.experts > 1 for call in alone):
        return []
    return [
        f"experts_per_token=1 in {len(alone)} of {len(blocks)} layers: the share of a token's only "
        "expert is 1 whatever its router says, so these routers learn nothing; use "
        "experts_per_token=2"
    ]


def _chunks(assembly: Assembly) -> list[str]:
    """A head that makes its logits in far more chunks than their size asks for."""
    limit, field = assembly.described.head.chunk_tokens, assembly.described.tokens
    _, rows, seq = assembly.abstract_batch()[field].shape
    rows //= ways(assembly.batch_splits[field][1], assembly.sizes)
    chunks, wanted = chunk_count(rows * seq, rows, limit), -(-rows * seq // limit)
    if chunks <= MANY * wanted:
        return []
    return [
        f"the head makes its logits in {chunks} chunks of {rows * seq // chunks} tokens, where "
        f"{wanted} would hold model.chunk_tokens={limit} each: chunks divide data.seq={seq}; use "
        f"seq={seq // wanted * wanted}, or chunk_tokens={rows * seq} for a single one"
    ]
