"""What is wrong with a model, or asked of one that its kind does not do."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from jaxtrain.experiment import Experiment
from jaxtrain.models.description import ABILITIES, STACK, ModelDescription, products
from jaxtrain.models.layered import description_of
from jaxtrain.nn.module import ModuleSplit


def model_violations(experiment: Experiment) -> list[str]:
    """What keeps the model from being built, or asks of it what its kind does not do."""
    e = experiment
    if hasattr(e.model, "violations") and (found := e.model.violations()):
        return [f"model: {v}" for v in found]
    if not callable(getattr(e.model, "build", e.model)):
        return ["model: give a config with build(rngs) or a module-level function of rngs"]
    described = description_of(e.model)
    if described is not None:
        found = [f"model.describe(): {v}" for v in taken_names(described.sums)]
        if unknown := described.can - ABILITIES:
            known = ", ".join(sorted(ABILITIES))
            found.append(f"model.describe(): can={sorted(unknown)}; the abilities are {known}")
        if e.sample is not None and "generation" not in described.can:
            found.append("evaluation.sample: this model does not generate; use sample=None")
        return found
    described_only = {
        "execution.loop": e.execution.loop,
        "execution.attention": e.execution.attention,
        "evaluation.sample": e.sample,
    }
    return [
        f"{name} acts on models that describe themselves, and this one does not; use {name}=None"
        for name, value in described_only.items()
        if value is not None
    ]


def untrue(model: Any, split: ModuleSplit) -> list[str]:
    """What a model says of its leaves that is not so, and leaves of which it says nothing."""
    described = description_of(model)
    if described is None:
        return []
    said = {
        path + weight.leaf: (weight.rows, weight.columns)
        for path, block in described.blocks.items()
        for weight in products(block)
    }
    found = [
        f"model.describe(): {name} is {list(size)}, and the module has "
        f"{list(split.params[name].shape[-2:]) if name in split.params else 'no such parameter'}"
        for name, size in said.items()
        if name not in split.params or split.params[name].shape[-2:] != size
    ]
    lengths = {k: p.shape[0] for k, p in split.params.items() if k.startswith(STACK)}
    found += [
        f"model.describe(): periods={described.periods}, and {name} is stacked {n} times"
        for name, n in lengths.items()
        if n != described.periods
    ]
    missing = [name for name in (*described.tables, *described.lookups) if name not in split.params]
    return found + [f"model.describe(): the module has no parameter {name}" for name in missing]


METRICS_OF_A_STEP = frozenset(
    {
        *("step", "loss", "weight", "loss_scale", "skipped", "gradients", "learning_rate"),
        *("grad_norm", "param_norm", "update_norm", "step_s", "data_s"),
        *("tokens_per_s", "examples_per_s", "mfu_full", "mfu_causal", "bits_per_byte"),
    }
)


def taken_names(sums: Iterable[str]) -> list[str]:
    """Names of sums beside the loss that would hide a metric of every step."""
    return [
        f"a sum named {name!r} would hide the metric of that name; call it otherwise"
        for name in sums
        if name in METRICS_OF_A_STEP
    ]


def describes(model: Any) -> bool:
    """Whether it is a model that describes itself, sound or not."""
    return hasattr(model, "describe")


def described_where_sound(experiment: Experiment) -> ModelDescription | None:
    """What the model says of itself, where its fields let it."""
    model = experiment.model
    if hasattr(model, "violations") and model.violations():
        return None
    return description_of(model)


def positions_of(experiment: Experiment) -> int | None:
    """The longest sequence that the model has positions for."""
    described = described_where_sound(experiment)
    return None if described is None else described.positions


def vocab_of(experiment: Experiment) -> int | None:
    """Rows of the model's vocabulary; of a user's own model, of its field of that name."""
    described = described_where_sound(experiment)
    return getattr(experiment.model, "vocab", None) if described is None else described.head.vocab
