"""Checks rows that a mesh splits."""

from __future__ import annotations

import math

from jaxtrain.experiment.resolve import Resolved
from jaxtrain.mesh.axes import axes_that_split
from jaxtrain.mesh.sharding import ways
from jaxtrain.operations.attention import AttentionCall
from jaxtrain.remedies import Clash, Near, multiples_near, options, under
from jaxtrain.validation.batch import divisible_batches


def cut_violations(resolved: Resolved) -> list[str]:
    """Returns violations that keep rows from being split as mesh and sharding rules say."""
    experiment, sizes, violations = resolved.experiment, resolved.sizes, []
    axes = resolved.roles.seq
    if not axes:
        return []
    row_ways, seq = resolved.row_ways, getattr(experiment.data, "seq", None)
    cut = " x ".join(f"{axis}={sizes[axis]}" for axis in axes)
    if not set(axes) <= set(axes_that_split("seq")):
        allowed = " and ".join(axes_that_split("seq"))
        return [
            f"the activations table splits seq over {axes}: rows are cut over {allowed} alone; "
            f"split batch, heads or mlp over the others"
        ]
    if resolved.mode != "explicit":
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
    if resolved.description is None:
        return violations
    if not resolved.can("context"):
        return [
            f"mesh axis {cut} cuts rows, and the model does not say that it can be given parts of "
            f'them; set {axes[0]}=1, or have describe() say "context", as ModelDescription has it'
        ]
    method = resolved.context_method(seq)
    for part, call in resolved.local_heads().items():
        heads: dict[str, int] = dict(heads=part.heads, kv_heads=part.kv_heads)
        violations += [_of_model(v, call) for v in method.violations(row_ways, seq=seq, **heads)]
    prefix = "execution.context" if experiment.execution.context is not None else f"mesh axis {cut}"
    return under(f"{prefix}: ", dict.fromkeys(violations))


def _of_model(violation: str, call: AttentionCall) -> str:
    """Returns a violation of a device's heads, with the model's number of heads."""
    if not isinstance(violation, Clash) or "heads=" not in violation.rule:
        return violation
    name = "kv_heads" if "kv_heads=" in violation.rule else "heads"
    if violation.rule.endswith(f"{name}={getattr(call, name)}"):
        return violation
    return violation.changed(rule=f"{violation.rule}, of {name}={getattr(call, name)}")


def tokens_violations(resolved: Resolved, seq: int) -> list[str]:
    """Returns violations if a device's tokens do not split over the devices that share them."""
    experiment, roles, cut = resolved.experiment, resolved.roles, resolved.row_ways
    parts = ways(roles.batch, resolved.sizes)
    split = {a: resolved.sizes[a] for a in roles.outside_stack().stream}
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
