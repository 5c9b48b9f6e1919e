"""What is wrong with rows that a mesh cuts, and which method sees them whole."""

from __future__ import annotations

from collections.abc import Mapping

from jaxtrain.context.choice import Heads, Method, choose
from jaxtrain.experiment import Experiment
from jaxtrain.mesh.sharding import STAGE, ShardingRules, activation_dims, ways
from jaxtrain.models.description import AttentionCall, ModelDescription, operations
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
            near = sorted({seq // n * n or n, -(-seq // n) * n})
            use = " or ".join(map(str, near))
            found.append(f"data.seq={seq} is not cut evenly over {cut}; use seq={use}")
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
    for each in _heads(model, rules, sizes):
        found += method.violations(n, seq=seq, heads=each.heads, kv_heads=each.kv_heads)
    where = "execution.context" if experiment.execution.context is not None else f"mesh axis {cut}"
    return [f"{where}: {each}" for each in dict.fromkeys(found)]


def _heads(model: ModelDescription, rules: ShardingRules, sizes: Mapping[str, int]) -> list[Heads]:
    """What attention a device has of each kind of block; outside a pipeline its heads are split
    over the stages, too. Heads that do not split are told elsewhere."""
    split = activation_dims(("heads", "kv_heads"), rules.activations, sizes=sizes)
    stages = sizes.get(STAGE, 1)
    found = []
    for blocks, more in (
        (model.period, 1),
        ((*model.before.values(), *model.after.values()), stages),
    ):
        for each in (each for block in blocks for each in operations(block)):
            if isinstance(each, AttentionCall):
                of_q, of_k = (ways(axes, sizes) * more for axes in split)
                heads = max(each.heads // of_q, 1), max(each.kv_heads // of_k, 1)
                found.append(Heads(*heads, each.causal))
    return list(dict.fromkeys(found))
