"""The arithmetic and the bytes that a pipeline costs beyond what its step needs, of an assembly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxtrain.models.block import BlockConfig, MoeConfig
from jaxtrain.planner.assembled import facts_of, unpredicted
from jaxtrain.planner.facts import FlopFacts
from jaxtrain.planner.pipeline_work import Work, pipeline_bytes, pipeline_flops
from jaxtrain.planner.traffic import step_traffic
from jaxtrain.step.assembly import Assembly
from jaxtrain.telemetry.flops import Attention
from jaxtrain.telemetry.hlo import SENT


@dataclass(frozen=True)
class Overhead:
    """flops: of all devices together; sent: bytes that each device sends. None where it is not
    known: FLOPs with frozen leaves, bytes where they are not predicted."""

    flops: Work | None
    sent: Work | None

    def summary(self) -> str:
        """One line; "" where nothing is known."""
        known = ((self.flops, "matmul FLOPs"), (self.sent, "bytes sent"))
        told = "; ".join(work.told(what) for work, what in known if work is not None)
        return f"the step does {told}" if told else ""

    def as_json(self) -> dict[str, Any]:
        return {
            name: None if work is None else {**work._asdict(), "over_needed": work.over_needed}
            for name, work in (("flops", self.flops), ("bytes_sent", self.sent))
        }


def overhead(assembly: Assembly) -> Overhead | None:
    """Of the step of an assembly; None without a pipeline."""
    if assembly.pipeline is None:
        return None
    facts = facts_of(assembly)
    assert facts.pipeline is not None
    flops = sent = None
    if not assembly.frozen:
        flops = pipeline_flops(facts, facts.pipeline, flop_facts(assembly))
    if unpredicted(assembly) is None:
        sent = pipeline_bytes(facts, facts.pipeline, step_traffic, SENT)
    return Overhead(flops, sent)


def flop_facts(assembly: Assembly) -> FlopFacts:
    """What the prediction may know of a decoder's matmuls."""
    e, model = assembly.experiment, assembly.experiment.model
    microbatches, rows, seq = assembly.abstract_batch()["tokens"].shape
    parts = {part: getattr(model, part) for part in ("prefix", "period", "suffix")}
    return FlopFacts(
        blocks={
            f"{part}.{i}.": _of_block(block, model.embed, rows, seq)
            for part, blocks in parts.items()
            for i, block in enumerate(blocks)
        },
        head=2 * rows * seq * model.embed * model.padded_vocab,
        needed=e.model.flops(seq=seq, sequences=microbatches * rows).train_full,
    )


def _of_block(block: BlockConfig, embed: int, rows: int, seq: int) -> Mapping[str, int]:
    """As `DecoderConfig.flops` counts them, product by product."""
    a, mlp, size = block.attention, block.mlp, block.attention.size(embed)
    wide, narrow = a.heads * size, a.key_heads * size
    met = mlp.experts_per_token if isinstance(mlp, MoeConfig) else 1
    router = mlp.experts if isinstance(mlp, MoeConfig) else 0
    products = {
        "q": wide + 2 * narrow,
        "r1": wide,
        "u": met * mlp.hidden * (1 + mlp.gated) + router,
        "r2": met * mlp.hidden,
    }
    scores = Attention(a.heads, size, window=a.window).flops(seq * seq)
    return {"a": rows * scores} | {k: 2 * rows * seq * embed * n for k, n in products.items()}
