"""What is wrong with rows that a mesh cuts, and which method sees them whole."""

from __future__ import annotations

import math
from collections.abc import Mapping

from jaxtrain.context.choice import Heads, Method, choose
from jaxtrain.experiment import Experiment
from jaxtrain.mesh.sharding import STAGE, ShardingRules, activation_dims, ways
from jaxtrain.models.description import AttentionCall, ModelDescription, operations
from jaxtrain.remedies import Clash, Near, multiples_near, options, under
from jaxtrain.validation.batch import divisible_batches
from jaxtrain.validation.model import described_where_sound, describes

CUTS_ROWS = "context"
"""The mesh axis that may cut a sequence."""


def cut_ways(rules: ShardingRules, sizes: Mapping[str, int]) -> int:
    """Over how many devices a row is cut."""
    return ways(activation_dims(("seq",), rules.activations, sizes=sizes)[0], sizes)


def chosen_method(
    experiment: Experiment, model: ModelDescription, sizes: Mapping[str, int], seq: int | None
) -> Method:
    """The experiment's, or the one that suits mesh and heads."""
    if experiment.execution.context is not None:
        return experiment.execution.context
    heads = _heads(model, experiment.sharding, sizes)
    return choose(heads, cut_ways(experiment.sharding, sizes), seq)


def cut_violations(experiment: Experiment, sizes: Mapping[str, int], mode: str) -> list[str]:
    """What keeps rows from being cut as the mesh and the sharding rules say."""
    rules, found = experiment.sharding, []
    (axes,) = activation_dims(("seq",), rules.activations, sizes=sizes)
    if not axes:
        return []
    n, seq = ways(axes, sizes), getattr(experiment.data, "seq", None)
    cut = " x ".join(f"{axis}={sizes[axis]}" for axis in axes)
    if set(axes) != {CUTS_ROWS}:
        return [
            f"the activations table splits seq over {axes}: rows are cut over {CUTS_ROWS} alone; "
            f"split batch, heads or mlp over the others"
        ]
    if mode != "explicit":
        if experiment.execution.context is not None:
            found.append(
                f"execution.context={experiment.execution.context!r} is for mode='explicit'; under "
                f"gspmd XLA gathers what attention needs: use context=None"
            )
        if seq is not None and seq % n:
            rule, use = f"data.seq={seq} is not cut evenly over {cut}", multiples_near(seq, n)
            change = [(Near("seq", seq, n),), *((Near(a, sizes[a], 0),) for a in axes)]
            found.append(Clash(rule, f"use seq={options(use)}", sizes={"seq": seq}, ways=change))
        return found
    model = described_where_sound(experiment)
    if model is None:
        return found
    if describes(experiment.model) and "context" not in model.can:
        return [
            f"mesh axis {cut} cuts rows, and the model does not say that it can be given parts of "
            f'them; set {CUTS_ROWS}=1, or have describe() say "context", as ModelDescription has it'
        ]
    method = chosen_method(experiment, model, sizes, seq)
    for part, call in _heads(model, rules, sizes).items():
        heads: dict[str, int] = dict(heads=part.heads, kv_heads=part.kv_heads)
        found += [_of_model(v, call) for v in method.violations(n, seq=seq, **heads)]
    where = "execution.context" if experiment.execution.context is not None else f"mesh axis {cut}"
    return under(f"{where}: ", dict.fromkeys(found))


def _heads(
    model: ModelDescription, rules: ShardingRules, sizes: Mapping[str, int]
) -> dict[Heads, AttentionCall]:
    """What attention a device has of each kind of block, and the whole of it; outside a pipeline
    its heads are split over the stages, too. Heads that do not split are found elsewhere."""
    split = activation_dims(("heads", "kv_heads"), rules.activations, sizes=sizes)
    stages = sizes.get(STAGE, 1)
    parts: dict[Heads, AttentionCall] = {}
    for blocks, more in (
        (model.period, 1),
        ((*model.before.values(), *model.after.values()), stages),
    ):
        for each in (each for block in blocks for each in operations(block)):
            if isinstance(each, AttentionCall):
                of_q, of_k = (ways(axes, sizes) * more for axes in split)
                heads = max(each.heads // of_q, 1), max(each.kv_heads // of_k, 1)
                parts.setdefault(Heads(*heads, each.causal), each)
    return parts


def _of_model(violation: str, call: AttentionCall) -> str:
    """A violation of a device's heads, with how many the model has."""
    if not isinstance(violation, Clash) or "heads=" not in violation.rule:
        return violation
    name = "kv_heads" if "kv_heads=" in violation.rule else "heads"
    return violation.changed(rule=f"{violation.rule}, of {name}={getattr(call, name)}")


def tokens_violations(
    experiment: Experiment, seq: int, parts: int, sizes: Mapping[str, int]
) -> list[str]:
    """That a device's tokens do not split over the devices that share them. parts: over how many
    the rows of a microbatch are split."""
    split = {a: sizes[a] for a in ("tensor", STAGE) if a in sizes}
    cut = cut_ways(experiment.sharding, sizes)
    violations, count = [], math.prod(split.values())
    for batch in divisible_batches(experiment):
        tokens = batch // experiment.microbatches // parts * seq // cut
        if tokens % count:
            axes = " x ".join(f"{axis}={n}" for axis, n in split.items())
            violations.append(
                Clash(
                    f"data.seq={seq}, batch={batch}: a device's microbatch of {tokens} tokens "
                    f"does not split over {axes}",
                    f"use seq={options(multiples_near(seq, count * cut))}",
                    sizes={"seq": seq},
                    ways=[
                        (Near("seq", seq, cut),),
                        (Near("batch", batch, experiment.microbatches * parts),),
                        *((Near(a, n, 0),) for a, n in split.items()),
                    ],
                )
            )
    return violations
