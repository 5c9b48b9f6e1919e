"""Checks a mixture of experts against a mesh, and against products in 8 bits."""

from __future__ import annotations

import math
from fnmatch import fnmatchcase

from jaxtrain.experiment.resolve import Resolved
from jaxtrain.mesh.sharding import ways
from jaxtrain.models.adapters import adapter_places
from jaxtrain.operations.block import mixtures
from jaxtrain.validation.batch import divisible_batches


def group_violations(resolved: Resolved, seq: int) -> list[str]:
    """Returns violations if tokens that compete for experts' capacity are not complete groups on a
    device. Incomplete groups would depend on the mesh."""
    e, cut = resolved.experiment, resolved.row_ways
    parts = e.microbatches * ways(resolved.roles.batch, resolved.sizes)
    runs = [batch // parts * seq for batch in divisible_batches(e)]
    if cut > 1:
        runs, order = [seq // cut], None
        if resolved.mode == "explicit":
            order = resolved.context_method(seq).order(cut)
        if order is not None and order.zigzag:  # a device's tokens may be of two chunks
            runs = [math.gcd(seq // cut, seq // (2 * order.groups))]
    groups = dict.fromkeys(call.routing_group for call in resolved.described.expert_calls)
    return [
        f"capacity.routing_group={group} does not divide the {run} tokens that follow one another "
        f"in a device's microbatch; use routing_group={math.gcd(group, *runs)}, or fewer "
        "devices along the batch or the sequence"
        for group in groups
        for run in dict.fromkeys(runs)
        if group is not None and run % group
    ]


def narrow_violations(resolved: Resolved) -> list[str]:
    """Returns violations that keep experts from products in 8 bits."""
    experiment, described, sizes = resolved.experiment, resolved.described, resolved.sizes
    products, chunk = experiment.precision.products, experiment.execution.expert_chunk
    if products is None or not described.expert_calls:
        return []
    setting = f"precision.products={products!r}"
    violations = _adapter_violations(resolved, setting)
    if chunk is not None:
        violations.append(
            f"execution.expert_chunk={chunk} and {setting}: an expert's rows have one scale, and "
            f"would have another in each chunk; use expert_chunk=None, or products=None"
        )
    split = experiment.sharding.of(("experts", "embed", "mlp"), sizes)
    rest_axes, used_axes = (
        dict(table).get("experts", ()) for table in (split.params, split.activations)
    )
    gathered = [axis for axis in rest_axes if sizes.get(axis, 1) > 1 and axis not in used_axes]
    if gathered:
        violations.append(
            f"the sharding rules gather experts' matrices along experts, over "
            f"{' x '.join(gathered)}, and {setting} scales each expert's where it rests; split "
            f"another dim of them over it, such as embed, or use the mesh axis expert, or "
            f"products=None"
        )
    return violations


def _adapter_violations(resolved: Resolved, setting: str) -> list[str]:
    """Returns a violation if experts' matrices in 8 bits have adapters."""
    lora, described = resolved.experiment.lora, resolved.described
    if lora is None:
        return []
    of_experts = {
        path + weight.leaf
        for path, block in described.blocks.items()
        for call in mixtures(block)
        for weight in call.weights
    }
    targets = lora.targets
    chosen = [
        name for name in adapter_places(described) if any(fnmatchcase(name, t) for t in targets)
    ]
    clash = [name for name in chosen if name in of_experts]
    others = tuple(name for name in chosen if name not in of_experts)
    if not clash:
        return []
    remedy = f"targets={others}" if others else "lora=None"
    return [
        f"{setting} and fine_tuning.lora.targets={targets!r}: the experts' matrices "
        f"{', '.join(clash)} can have no adapter in 8 bits; use {remedy}, or products=None"
    ]
