"""Checks requests that a model's kind does not support, and its description against its module."""

from __future__ import annotations

from collections.abc import Iterable, Set

from jaxtrain.experiment.resolve import Resolved
from jaxtrain.models.description import (
    ABILITIES,
    ADAPTER_A,
    ADAPTER_B,
    STACK,
    ModelDescription,
    named_by,
)
from jaxtrain.models.routers import BIAS, every_router
from jaxtrain.nn.module import ModuleSplit
from jaxtrain.operations.block import leaf_names, matrices
from jaxtrain.violations import did_you_mean


def model_violations(resolved: Resolved) -> list[str]:
    """Returns requests that the model's kind does not support, and names of its sums that are
    taken. The model can be built."""
    e, described = resolved.experiment, resolved.description
    if described is not None:
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


def untrue(described: ModelDescription | None, split: ModuleSplit, buffers: Set[str]) -> list[str]:
    """Returns a violation for each way in which a model's description contradicts the parameters
    that its module has. buffers: names of parameters that no operation has to name."""
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
