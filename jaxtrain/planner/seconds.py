"""What a step takes at the least: its arithmetic at the chip's peak, its bytes at the links' pace.

Both are bounds, of which a run reaches a part: MFU is the one's. Where communication comes near
arithmetic it cannot all hide behind it, and another layout or fewer microbatches is the cure.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from jaxtrain.mesh.links import scope_of
from jaxtrain.models.description import ExpertCall, products
from jaxtrain.moe.grouped import takes_8_bits
from jaxtrain.planner.assembled import facts_of, why_not_predicted
from jaxtrain.planner.sent import MeshAxes
from jaxtrain.planner.traffic import step_traffic
from jaxtrain.step.assembly import Assembly
from jaxtrain.step.running_kernels import calls, kernel_of
from jaxtrain.telemetry.flops import train_flops
from jaxtrain.telemetry.hlo.collectives import SENT


@dataclass(frozen=True)
class StepSeconds:
    """compute_s: of the model's matmuls, causal attention counted half, at the dense peak of the
    compute dtype, layers' products in 8 bits at theirs. communication: (mesh axes, link) -> bytes a
    device sends and seconds at the link's full bandwidth; None where XLA chooses the
    collectives."""

    compute_s: float
    communication: dict[tuple[MeshAxes, str], tuple[float, float]] | None

    @property
    def communication_s(self) -> float | None:
        """All of it, one after another."""
        if self.communication is None:
            return None
        return math.fsum(seconds for _, seconds in self.communication.values())

    def summary(self) -> str:
        """One line, and one for each set of mesh axes."""
        head = f"a step at the least: {self.compute_s:.3g} s of matmuls"
        if self.communication is None:
            return f"{head}; what it sends is XLA's to choose: `compile` tells"
        lines = [f"{head}, {self.communication_s:.3g} s of communication"]
        for (axes, link), (sent, seconds) in self.communication.items():
            lines.append(
                f"  over {' x '.join(axes)} by {link}: {sent / 1e9:.3g} GB, {seconds:.3g} s"
            )
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        """Keys that scripts may rely on."""
        rows = (
            None
            if self.communication is None
            else [
                {"axes": list(axes), "link": link, "bytes": sent, "seconds": seconds}
                for (axes, link), (sent, seconds) in self.communication.items()
            ]
        )
        return {"compute_s": self.compute_s, "communication": rows}


def step_seconds(assembly: Assembly) -> StepSeconds | None:
    """Of the experiment on its mesh; None of a model that does not describe itself, on simulated
    devices, whose links are this machine's memory, and on several of which no link is known."""
    if assembly.description is None or assembly.spec.simulated or assembly.tokens is None:
        return None
    if assembly.sizes and not assembly.spec.links:
        return None
    spec, compute_s = assembly.spec, matmul_seconds(assembly)
    if not assembly.sizes:
        return StepSeconds(compute_s, {})
    if why_not_predicted(assembly) is not None:
        return StepSeconds(compute_s, None)
    found: dict[tuple[MeshAxes, str], float] = defaultdict(float)
    links = dict(spec.links)
    for each in step_traffic(facts_of(assembly)):
        n = math.prod(assembly.sizes[axis] for axis in each.axes)
        scope = scope_of(each.axes, spec)
        found[each.axes, scope] += each.buffer_bytes * SENT[each.kind](n) * each.count
    named = {
        (axes, links[scope].name): (sent, sent / (links[scope].bandwidth_gbytes * 1e9))
        for (axes, scope), sent in sorted(found.items(), key=lambda item: -item[1])
    }
    return StepSeconds(compute_s, named)


def matmul_seconds(assembly: Assembly) -> float:
    """`StepSeconds.compute_s`, of a model that says where its tokens are."""
    assert assembly.tokens is not None, "asked for of a model without tokens"
    seq = assembly.fields[assembly.tokens][0][0]
    model, rows = assembly.described, assembly.largest_batch
    flops = model.flops(seq=seq, sequences=rows).train_causal
    met = sum(weight.size for block in model.layers for weight in products(block))
    for call in calls(assembly):
        # A kernel that takes none in 8 bits multiplies them in 16.
        if isinstance(call, ExpertCall) and takes_8_bits(kernel_of(assembly, call)):
            met += call.per_token * sum(weight.size for weight in call.weights)
    of_products = train_flops(2 * met * seq * rows)
    seconds = (flops - of_products) / assembly.peak_flops + of_products / assembly.product_flops
    return seconds / assembly.spec.devices
