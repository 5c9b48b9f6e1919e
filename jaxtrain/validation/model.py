"""Checks a model, and requests that its kind does not support."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Set
from typing import Any

from jaxtrain.experiment import Experiment
from jaxtrain.models.description import (
    ABILITIES,
    ADAPTER_A,
    ADAPTER_B,
    STACK,
    Member,
    ModelDescription,
    named_by,
)
from jaxtrain.models.layered import ModelConfig, description_of
from jaxtrain.models.routers import BIAS, every_router
from jaxtrain.nn.module import ModuleSplit
from jaxtrain.operations.block import chain_with_ends, entry_members, leaf_names, matrices
from jaxtrain.operations.check import wrong_members, wrong_nodes
from jaxtrain.remedies import under
from jaxtrain.violations import count, did_you_mean, flag


def model_violations(experiment: Experiment) -> list[str]:
    """Returns violations that keep the model from being built, or request what its kind does not
    support."""
    e = experiment
    if violations := untried_violations(e.model):
        return under("model: ", violations)
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
        violations = [f"model.describe(): {v}" for v in taken_names(described.sums)]
        if unknown := described.can - ABILITIES:
            abilities = ", ".join(sorted(ABILITIES))
            violations.append(
                f"model.describe(): can={sorted(unknown)}; the abilities are {abilities}"
            )
        if e.sample is not None and "generation" not in described.can:
            violations.append("evaluation.sample: this model does not generate; use sample=None")
        return violations
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
    """Returns violations of a model's fields. Remedies that a mesh may change have not been
    tried."""
    violations = getattr(model, "untried_violations", getattr(model, "violations", list))
    return violations()


def _parameters(model: Any) -> list[str]:
    """First parameter name of the model's `build`; [] if it has no signature."""
    try:
        return list(inspect.signature(model.build).parameters)[:1]
    except (AttributeError, TypeError, ValueError):
        return []


def _no_description(described: Any) -> str:
    """Returns the reason why a value is not a valid description; "" if it is."""
    if not isinstance(described, ModelDescription):
        return f"it returns {described!r}; return a jaxtrain.models.ModelDescription"
    if reason := _wrong_stream(described):
        return reason
    blocks = {**described.blocks, "entry": described.entry}
    for path, block in blocks.items():
        if not isinstance(block, tuple):
            return f"the block at {path} is {block!r}; a block is a tuple of operations: (.., ..)"
        for operation in block:
            if reason := wrong_nodes(operation):
                return f"the block at {path}: {reason}"
        if reason := wrong_members(block, described.stream):
            return f"the block at {path}: {reason}"
    if reason := _unread_lookups(described):
        return reason
    first = next(iter(described.fields.values()), None)
    if first != ("seq",):
        return (
            f"fields={dict(described.fields)}; name the fields of a batch with the logical axes of "
            'a row, first the one that has an element for each token, such as {"tokens": ("seq",)}'
        )
    return ""


def _wrong_stream(described: ModelDescription) -> str:
    """Returns the reason why the members of the stream are none; "" if they are."""
    stream = described.stream
    if not isinstance(stream, Mapping):
        return f"stream={stream!r}; give a dict of a jaxtrain.models.Member for each name"
    for name, member in stream.items():
        if not isinstance(name, str) or not name or not isinstance(member, Member):
            return f"stream has {name!r}: {member!r}; give a jaxtrain.models.Member for each name"
        tables = member.lookups
        if not isinstance(tables, tuple) or not all(isinstance(table, str) for table in tables):
            return f"stream[{name!r}].lookups={tables!r}; give a tuple of names of tables"
        if violations := count("width", member.width, 1) + flag("leaves", member.leaves):
            return f"stream[{name!r}]: {violations[0]}"
    lookups = tuple(table for member in stream.values() for table in member.lookups)
    if stream and {*lookups} != {*described.lookups}:
        return (
            f"lookups={described.lookups}, and the members of its stream look up {lookups}; name "
            "the same tables in both"
        )
    if stream and described.embed not in [m.width for m in stream.values() if m.leaves]:
        return (
            f"embed={described.embed} is the width of no member of the stream that leaves the "
            "stack, and the head reads one; say leaves=True, or another embed"
        )
    return ""


def _unread_lookups(described: ModelDescription) -> str:
    """Returns the reason why the tables of a member are looked up in vain; "" if none are."""
    stack = (described.entry, *described.prefix.values(), *described.period)
    (nodes, ends), names = chain_with_ends(stack), entry_members(stack)
    read = {number for node in nodes for number in node.inputs} | {*ends.members.values()}
    for number, name in enumerate(names):
        if described.stream[name].lookups and number not in read:
            return f"the tables of {name!r} are looked up, and an Update replaces what they gave"
    return ""


def untrue(model: Any, split: ModuleSplit, buffers: Set[str]) -> list[str]:
    """Returns a violation for each way in which a model's description contradicts the parameters
    that its module has. buffers: names of parameters that no operation has to name."""
    described = description_of(model)
    if described is None:
        return []
    prefix, params = "model.describe():", split.params
    described_shapes = {
        path + weight.leaf: (weight.rows, weight.columns)
        for path, block in described.blocks.items()
        for weight in matrices(block)
    }
    head, embed = described.head, described.embed
    for member in described.members.values():
        described_shapes |= {name: (None, member.width) for name in member.lookups}
    described_shapes[head.leaf] = (head.padded, embed)
    violations = []
    for name, size in described_shapes.items():
        if name not in params:
            near = did_you_mean(name, params)
            violations.append(f"{prefix} {name} is no parameter of the module{near}")
            continue
        shape = params[name].shape[-2:]
        if any(a not in (None, b) for a, b in zip(size, shape, strict=True)):
            described_shape = [b if a is None else a for a, b in zip(size, shape, strict=True)]
            violations.append(
                f"{prefix} {name} is {described_shape}, and the module has {list(shape)}: say that"
            )
    of_blocks = [path + leaf for path, b in described.blocks.items() for leaf in leaf_names(b)]
    names = (*described.tables, *of_blocks, *leaf_names(described.entry))
    violations += [
        f"{prefix} {name} names no parameter of the module{did_you_mean(name, params)}"
        for name in dict.fromkeys(names)
        if name not in described_shapes and not any(named_by(leaf, (name,)) for leaf in params)
    ]
    of_adapters = [name + end for name in of_blocks for end in (ADAPTER_A, ADAPTER_B)]
    of_routers = [name + BIAS for name, _ in every_router(described)]
    named = (*of_blocks, *of_adapters, *of_routers, *buffers)
    violations += [
        f"{prefix} no operation names the parameter {leaf}; name it among the leaves of the one "
        "that uses it: of an own operation, a Bias or an Elementwise"
        for leaf in params
        if leaf.startswith(tuple(described.blocks)) and not named_by(leaf, named)
    ]
    if not head.vocab <= head.padded:
        violations.append(
            f"{prefix} head.vocab={head.vocab} of a table of padded={head.padded} rows"
        )
    depths = {len(p) for k, p in params.items() if k.startswith(STACK)} - {described.periods}
    violations += [
        f"{prefix} periods={described.periods}, and the module's stack has {n}; say periods={n}"
        for n in sorted(depths)
    ]
    return violations


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
    """Returns violations for names of extra sums that would hide a metric of every step."""
    return [
        f"a sum named {name!r} would hide the metric of that name; call it otherwise"
        for name in sums
        if name in METRICS_OF_A_STEP or name.startswith("eval_")
    ]


def describes(model: Any) -> bool:
    """Returns True if the model has a description, valid or not."""
    return isinstance(model, ModelConfig)


def described_where_sound(experiment: Experiment) -> ModelDescription | None:
    """Returns the model's description; None if it has none or its fields are invalid."""
    model = experiment.model
    if untried_violations(model):
        return None
    described = description_of(model)
    return None if described is None or _no_description(described) else described


def positions_of(experiment: Experiment) -> int | None:
    """Returns the longest sequence that the model has positions for."""
    described = described_where_sound(experiment)
    return None if described is None else described.positions


def vocab_of(experiment: Experiment) -> int | None:
    """Returns the rows of the model's vocabulary; for a user's own model, its field of that
    name."""
    described = described_where_sound(experiment)
    return getattr(experiment.model, "vocab", None) if described is None else described.head.vocab
