"""Lower bounds of a step's time: matmuls at the chip's peak, bytes at the links' bandwidth.

A run reaches a part of each bound; MFU is that part of the first. If communication takes nearly as
long as the matmuls, it cannot be hidden completely: use another layout or fewer microbatches.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from jaxtrain.mesh.axes import MeshAxes
from jaxtrain.mesh.links import bytes_per_s, scope_of
from jaxtrain.moe.grouped import takes_8_bits
from jaxtrain.operations.block import deferred_matrices, mixtures
from jaxtrain.planner.assembled import facts_of, why_not_predicted
from jaxtrain.planner.traffic import step_traffic
from jaxtrain.program.collectives import SENT
from jaxtrain.step.assembly import Assembly
from jaxtrain.step.running_kernels import kernel_of
from jaxtrain.telemetry.flops import train_flops


@dataclass(frozen=True)
class StepSeconds:
    """Lower bounds of a step's time, in seconds.
    compute_s: the model's matmuls, causal attention counted half, at the dense peak of the compute
      dtype; layers' products in 8 bits at theirs.
    communication: (mesh axes, link) -> bytes a device sends and seconds at the link's full
      bandwidth; None if XLA chooses the collectives.
    """

    compute_s: float
    communication: dict[tuple[MeshAxes, str], tuple[float, float]] | None

    @property
    def communication_s(self) -> float | None:
        """Sum of all communication, without overlap."""
        if self.communication is None:
            return None
        return math.fsum(seconds for _, seconds in self.communication.values())

    def summary(self) -> str:
        """One line, and one for each set of mesh axes."""
        head = f"a node at the least: {self.compute_s:.3g} s of matmuls"
        if self.communication is None:
            return f"{head}; what it sends is XLA's to choose: `compile` tells"
        lines = [f"{head}, {self.communication_s:.3g} s of communication"]
        for (axes, link), (sent, seconds) in self.communication.items():
            lines.append(
                f"  over {' x '.join(axes)} by {link}: {sent / 1e9:.3g} GB, {seconds:.3g} s"
            )
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        """Returns a dict whose keys scripts may rely on."""
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
    """Returns the bounds of the experiment on its mesh.

    None for a model without a description; on simulated devices, whose links are this machine's
    memory; and on several devices if no link is known.
    """
    if assembly.description is None or assembly.spec.simulated or assembly.tokens is None:
        return None
    if assembly.sizes and not assembly.spec.links:
        return None
    spec, compute_s = assembly.spec, matmul_seconds(assembly)
    if not assembly.sizes:
        return StepSeconds(compute_s, {})
    if why_not_predicted(assembly) is not None:
        return StepSeconds(compute_s, None)
    bytes_over: dict[tuple[MeshAxes, str], float] = defaultdict(float)
    links = dict(spec.links)
    for collective in step_traffic(facts_of(assembly)):
        devices = math.prod(assembly.sizes[axis] for axis in collective.axes)
        scope = scope_of(collective.axes, spec)
        bytes_over[collective.axes, scope] += (
            collective.buffer_bytes * SENT[collective.kind](devices) * collective.count
        )
    named = {
        (axes, links[scope].name): (sent, sent / bytes_per_s(axes, spec))
        for (axes, scope), sent in sorted(bytes_over.items(), key=lambda item: -item[1])
    }
    return StepSeconds(compute_s, named)


def matmul_seconds(assembly: Assembly) -> float:
    """Returns `StepSeconds.compute_s`, for a model that says where its tokens are."""
    assert assembly.tokens is not None, "asked for of a model without tokens"
    seq = assembly.fields[assembly.tokens][0][0]
    model, rows = assembly.described, assembly.largest_batch
    flops = model.flops(seq=seq, sequences=rows).train_causal
    narrow_weights = sum(
        weight.size for block in model.layers for weight in deferred_matrices(block)
    )
    for mixture in (call for block in model.layers for call in mixtures(block)):
        # Other kernels multiply in 16 bits.
        if takes_8_bits(kernel_of(assembly, mixture)):
            narrow_weights += mixture.per_token * sum(weight.size for weight in mixture.weights)
    narrow = train_flops(2 * narrow_weights * seq * rows)
    seconds = (flops - narrow) / assembly.peak_flops + narrow / assembly.product_flops
    return seconds / assembly.spec.devices
