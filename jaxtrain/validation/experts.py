"""What of a mixture of experts does not fit a mesh, or products in 8 bits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from jaxtrain.experiment import Experiment
from jaxtrain.models.description import ModelDescription
from jaxtrain.validation.sequence import chosen_method, cut_ways


def group_violations(
    experiment: Experiment,
    described: ModelDescription,
    sizes: Mapping[str, int],
    rows: Sequence[int],
    *,
    explicit: bool,
) -> list[str]:
    """Tokens that compete for experts' capacity, and are not whole groups on a device, which would
    hang on the mesh. rows: of a device's microbatch, for each size of the batch."""
    seq, cut = experiment.data.seq, cut_ways(experiment.sharding, sizes)
    runs = [each * seq for each in rows]
    if cut > 1:
        zigzag = explicit and chosen_method(experiment, described, sizes, seq).order(cut).zigzag
        runs = [seq // (cut * (1 + zigzag))]
    found = dict.fromkeys(call.routing_group for call in described.expert_calls)
    return [
        f"capacity.routing_group={group} does not divide the {run} tokens that follow one another "
        f"in a device's microbatch; use routing_group={math.gcd(group, *runs)}, or fewer "
        "devices along the batch or the sequence"
        for group in found
        for run in dict.fromkeys(runs)
        if group is not None and run % group
    ]


def narrow_violations(
    described: ModelDescription, experiment: Experiment, sizes: Mapping[str, int]
) -> list[str]:
    """What keeps experts from products in 8 bits."""
    products, chunk = experiment.precision.products, experiment.execution.expert_chunk
    if products is None or not described.expert_calls:
        return []
    found, given = [], f"precision.products={products!r}"
    if chunk is not None:
        found.append(
            f"execution.expert_chunk={chunk} and {given}: an expert's rows have one scale, and "
            f"would have another in each chunk; use expert_chunk=None, or products=None"
        )
    mine = experiment.sharding.of(("experts", "embed", "mlp"), sizes)
    rest, used = (dict(each).get("experts", ()) for each in (mine.params, mine.activations))
    gathered = [axis for axis in rest if sizes.get(axis, 1) > 1 and axis not in used]
    if gathered:
        found.append(
            f"the sharding rules gather experts' matrices along experts, over "
            f"{' x '.join(gathered)}, and {given} scales each expert's where it rests; split "
            f"another dim of them over it, such as embed, or use the mesh axis expert, or "
            f"products=None"
        )
    return found
