"""What is wrong with a model, or asked of one that its kind does not do."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

from jaxtrain.experiment import Experiment
from jaxtrain.models.description import (
    ABILITIES,
    STACK,
    Bias,
    Elementwise,
    ModelDescription,
    NormAcrossHeads,
    matrices,
    named_by,
    operations,
)
from jaxtrain.models.layered import ModelConfig, description_of
from jaxtrain.nn.module import ModuleSplit
from jaxtrain.remedies import under
from jaxtrain.violations import did_you_mean


def model_violations(experiment: Experiment) -> list[str]:
    """What keeps the model from being built, or asks of it what its kind does not do."""
    e = experiment
    if found := untried_violations(e.model):
        return under("model: ", found)
    if not callable(getattr(e.model, "build", e.model)):
        return ["model: give a config with build(rngs) or a module-level function of rngs"]
    described = description_of(e.model)
    if described is None and "key" in _parameters(e.model):
        return [
            "model: it has build(key) and no describe(): give it describe(), or take build(rngs), "
            "with nnx.Rngs"
        ]
    if described is not None:
        if wrong := _no_description(described):
            return [f"model.describe(): {wrong}"]
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
        "execution.grouped_matmul": e.execution.grouped_matmul,
        "evaluation.sample": e.sample,
    }
    return [
        f"{name} acts on models that describe themselves, and this one does not; use {name}=None"
        for name, value in described_only.items()
        if value is not None
    ]


def untried_violations(model: Any) -> list[str]:
    """What is wrong with a model's fields; remedies that a mesh may change are not tried yet."""
    violations = getattr(model, "untried_violations", getattr(model, "violations", list))
    return violations()


def _parameters(model: Any) -> list[str]:
    """Of its `build`, where that says."""
    try:
        return list(inspect.signature(model.build).parameters)[:1]
    except (AttributeError, TypeError, ValueError):
        return []


def _no_description(described: Any) -> str:
    """Why a value describes no model; "" where it does."""
    if not isinstance(described, ModelDescription):
        return f"it returns {described!r}; return a jaxtrain.models.ModelDescription"
    blocks = described.blocks.items()
    for path, block in blocks:
        if not isinstance(block, tuple):
            return f"the block at {path} is {block!r}; a block is a tuple of operations: (.., ..)"
    first = next(iter(described.fields.values()), None)
    if first != ("seq",):
        return (
            f"fields={dict(described.fields)}; name the fields of a batch with the logical axes of "
            'a row, first the one that has an element for each token, such as {"tokens": ("seq",)}'
        )
    return ""


def untrue(model: Any, split: ModuleSplit) -> list[str]:
    """What a model says of its parameters that is not so."""
    described = description_of(model)
    if described is None:
        return []
    where, params = "model.describe():", split.params
    said = {
        path + weight.leaf: (weight.rows, weight.columns)
        for path, block in described.blocks.items()
        for each in operations(block)
        for weight in matrices(each)
    }
    head, embed = described.head, described.embed
    said |= {name: (None, embed) for name in described.lookups}
    said[head.leaf] = (head.padded, embed)
    found = []
    for name, size in said.items():
        if name not in params:
            near = did_you_mean(name, params)
            found.append(f"{where} {name} is no parameter of the module{near}")
            continue
        real = params[name].shape[-2:]
        if any(a not in (None, b) for a, b in zip(size, real, strict=True)):
            wanted = [b if a is None else a for a, b in zip(size, real, strict=True)]
            found.append(f"{where} {name} is {wanted}, and the module has {list(real)}: say that")
    names = [*described.tables, *described.entering]
    for path, block in described.blocks.items():
        for each in operations(block):
            if isinstance(each, Elementwise | NormAcrossHeads | Bias):
                names += [path + leaf for leaf in each.leaves]
    names += [leaf for each in described.entry for leaf in getattr(each, "leaves", ())]
    found += [
        f"{where} {name} names no parameter of the module{did_you_mean(name, params)}"
        for name in dict.fromkeys(names)
        if not any(named_by(leaf, (name,)) for leaf in params)
    ]
    if not head.vocab <= head.padded:
        found.append(f"{where} head.vocab={head.vocab} of a table of padded={head.padded} rows")
    depths = {len(p) for k, p in params.items() if k.startswith(STACK)} - {described.periods}
    found += [
        f"{where} periods={described.periods}, and the module's stack has {n}; say periods={n}"
        for n in sorted(depths)
    ]
    return found


METRICS_OF_A_STEP = frozenset(
    {
        *("step", "loss", "weight", "loss_scale", "skipped", "gradients", "learning_rate"),
        *("grad_norm", "param_norm", "update_norm", "step_s", "data_s"),
        *("tokens_per_s", "examples_per_s", "mfu_full", "mfu_causal", "bits_per_byte"),
        *("expert_load_max", "dropped", "router_entropy", "balance_loss", "router_z_loss"),
        *("compressed", "reducer_error", "reducer_cosine", "guard_tripped"),
    }
)


def taken_names(sums: Iterable[str]) -> list[str]:
    """Names of sums beside the loss that would hide a metric of every step."""
    return [
        f"a sum named {name!r} would hide the metric of that name; call it otherwise"
        for name in sums
        if name in METRICS_OF_A_STEP or name.startswith("eval_")
    ]


def describes(model: Any) -> bool:
    """Whether it is a model that describes itself, sound or not."""
    return isinstance(model, ModelConfig)


def described_where_sound(experiment: Experiment) -> ModelDescription | None:
    """What the model says of itself, where its fields let it."""
    model = experiment.model
    if untried_violations(model):
        return None
    described = description_of(model)
    return None if described is None or _no_description(described) else described


def positions_of(experiment: Experiment) -> int | None:
    """The longest sequence that the model has positions for."""
    described = described_where_sound(experiment)
    return None if described is None else described.positions


def vocab_of(experiment: Experiment) -> int | None:
    """Rows of the model's vocabulary; of a user's own model, of its field of that name."""
    described = described_where_sound(experiment)
    return getattr(experiment.model, "vocab", None) if described is None else described.head.vocab
