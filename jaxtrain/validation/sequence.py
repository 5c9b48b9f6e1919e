"""Checks rows that a mesh splits, and chooses the method of attention over them."""

from __future__ import annotations

import math
from collections.abc import Mapping

from jaxtrain.context.choice import Heads, Method, choose
from jaxtrain.experiment import Experiment
from jaxtrain.mesh.axes import axes_that_split
from jaxtrain.mesh.roles import roles_of
from jaxtrain.mesh.sharding import ShardingRules, ways
from jaxtrain.models.description import ModelDescription
from jaxtrain.operations.attention import AttentionCall
from jaxtrain.operations.block import attentions
from jaxtrain.remedies import Clash, Near, multiples_near, options, under
from jaxtrain.validation.batch import divisible_batches
from jaxtrain.validation.model import described_where_sound, describes


def cut_ways(rules: ShardingRules, sizes: Mapping[str, int]) -> int:
    """Returns the number of devices over which a row is split."""
    return ways(roles_of(rules.activations, sizes).seq, sizes)


def chosen_method(
    experiment: Experiment, model: ModelDescription, sizes: Mapping[str, int], seq: int | None
) -> Method:
    """Returns the experiment's method, or the one that suits mesh and heads."""
    if experiment.execution.context is not None:
        return experiment.execution.context
    heads = _heads(model, experiment.sharding, sizes)
    return choose(heads, cut_ways(experiment.sharding, sizes), seq)


def cut_violations(experiment: Experiment, sizes: Mapping[str, int], mode: str) -> list[str]:
    """Returns violations that keep rows from being split as mesh and sharding rules say."""
    rules, violations = experiment.sharding, []
    axes = roles_of(rules.activations, sizes).seq
    if not axes:
        return []
    row_ways, seq = ways(axes, sizes), getattr(experiment.data, "seq", None)
    cut = " x ".join(f"{axis}={sizes[axis]}" for axis in axes)
    if not set(axes) <= set(axes_that_split("seq")):
        allowed = " and ".join(axes_that_split("seq"))
        return [
            f"the activations table splits seq over {axes}: rows are cut over {allowed} alone; "
            f"split batch, heads or mlp over the others"
        ]
    if mode != "explicit":
        if experiment.execution.context is not None:
            violations.append(
                f"execution.context={experiment.execution.context!r} is for mode='explicit'; under "
                f"gspmd XLA gathers what attention needs: use context=None"
            )
        if seq is not None and seq % row_ways:
            rule, near = (
                f"data.seq={seq} is not cut evenly over {cut}",
                multiples_near(seq, row_ways),
            )
            remedies = [(Near("seq", seq, row_ways),), *((Near(a, sizes[a], 0),) for a in axes)]
            violations.append(
                Clash(rule, f"use seq={options(near)}", sizes={"seq": seq}, ways=remedies)
            )
        return violations
    model = described_where_sound(experiment)
    if model is None:
        return violations
    if describes(experiment.model) and "context" not in model.can:
        return [
            f"mesh axis {cut} cuts rows, and the model does not say that it can be given parts of "
            f'them; set {axes[0]}=1, or have describe() say "context", as ModelDescription has it'
        ]
    method = chosen_method(experiment, model, sizes, seq)
    for part, call in _heads(model, rules, sizes).items():
        heads: dict[str, int] = dict(heads=part.heads, kv_heads=part.kv_heads)
        violations += [_of_model(v, call) for v in method.violations(row_ways, seq=seq, **heads)]
    prefix = "execution.context" if experiment.execution.context is not None else f"mesh axis {cut}"
    return under(f"{prefix}: ", dict.fromkeys(violations))


def _heads(
    model: ModelDescription, rules: ShardingRules, sizes: Mapping[str, int]
) -> dict[Heads, AttentionCall]:
    """Returns, for each kind of block, a device's share of the attention heads and the full
    attention. Outside a pipeline its heads are split over the stages too. Heads that do not split
    are reported elsewhere."""
    roles = roles_of(rules.activations, sizes)
    outside = (*model.prefix.values(), *model.suffix.values())
    parts: dict[Heads, AttentionCall] = {}
    for blocks, split in ((model.period, roles), (outside, roles.outside_stack())):
        of_q, of_k = ways(split.heads, sizes), ways(split.kv_heads, sizes)
        for call in (call for block in blocks for call in attentions(block)):
            heads = max(call.heads // of_q, 1), max(call.kv_heads // of_k, 1)
            parts.setdefault(Heads(*heads, call.causal), call)
    return parts


def _of_model(violation: str, call: AttentionCall) -> str:
    """Returns a violation of a device's heads, with the model's number of heads."""
    if not isinstance(violation, Clash) or "heads=" not in violation.rule:
        return violation
    name = "kv_heads" if "kv_heads=" in violation.rule else "heads"
    if violation.rule.endswith(f"{name}={getattr(call, name)}"):
        return violation
    return violation.changed(rule=f"{violation.rule}, of {name}={getattr(call, name)}")


def tokens_violations(
    experiment: Experiment, seq: int, parts: int, sizes: Mapping[str, int]
) -> list[str]:
    """Returns violations if a device's tokens do not split over the devices that share them. parts:
    over how many the rows of a microbatch are split."""
    roles = roles_of(experiment.sharding.activations, sizes).outside_stack()
    split = {a: sizes[a] for a in roles.stream}
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
