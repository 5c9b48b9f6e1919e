"""FLOPs and bytes of an assembly's pipeline beyond those that its step needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jaxtrain.planner.assembled import facts_of, why_not_predicted
from jaxtrain.planner.facts import FlopFacts
from jaxtrain.planner.pipeline_work import PipelineWork, pipeline_bytes, pipeline_flops
from jaxtrain.planner.traffic import step_traffic
from jaxtrain.program.collectives import SENT
from jaxtrain.step.assembly import Assembly


@dataclass(frozen=True)
class Overhead:
    """flops: of all devices together, None with frozen leaves. sent: bytes that each device sends,
    None if they are not predicted."""

    flops: PipelineWork | None
    sent: PipelineWork | None

    def summary(self) -> str:
        """Returns one line; "" if neither is known."""
        labelled = ((self.flops, "matmul FLOPs"), (self.sent, "bytes sent"))
        parts = "; ".join(work.summary(label) for work, label in labelled if work is not None)
        return f"the step does {parts}" if parts else ""

    def as_json(self) -> dict[str, Any]:
        return {
            name: None if work is None else {**work._asdict(), "over_needed": work.over_needed}
            for name, work in (("flops", self.flops), ("bytes_sent", self.sent))
        }


def overhead(assembly: Assembly) -> Overhead | None:
    """Returns the overhead of an assembly's step; None without a pipeline."""
    if assembly.pipeline is None:
        return None
    facts = facts_of(assembly)
    assert facts.pipeline is not None
    flops = sent = None
    if not assembly.frozen:
        flops = pipeline_flops(facts, facts.pipeline, flop_facts(assembly))
    if why_not_predicted(assembly) is None:
        sent = pipeline_bytes(facts, facts.pipeline, step_traffic, SENT)
    return Overhead(flops, sent)


def flop_facts(assembly: Assembly) -> FlopFacts:
    """Returns the sizes from which an assembly's matmul FLOPs are predicted."""
    model = assembly.described
    microbatches, rows, seq = assembly.abstract_batch()[model.tokens].shape
    needed = model.flops(seq=seq, sequences=microbatches * rows).train_full
    narrow = assembly.experiment.precision.products is not None
    return FlopFacts(rows, seq, needed, narrow)
