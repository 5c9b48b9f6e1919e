"""Trained parameters of a model: all, the leaves that patterns name, or adapters besides them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from jaxtrain.experiment.fine_tuning import FineTuning, LoRA
from jaxtrain.mesh.sharding import Leaf
from jaxtrain.models.adapters import Adapters, adapter_places, is_adapter
from jaxtrain.models.buffers import Buffers, moved_buffers
from jaxtrain.models.description import STACK, ModelDescription


def adapters_of(
    lora: LoRA | None, described: ModelDescription | None
) -> tuple[Adapters | None, list[str]]:
    """Returns the configured adapters of a model, None without, and violations."""
    path = "fine_tuning.lora"
    if lora is None:
        return None, []
    if described is None or "adapters" not in described.can:
        kind = "says that it has none" if described else "does not describe itself"
        return None, [
            f"{path} puts adapters beside matrices that a model names by describe(), and this one "
            f"{kind}; use lora=None"
        ]
    sides = adapter_places(described)
    chosen, problems = match_patterns(
        lora.targets, sides, f"{path}.targets", among="matrices that can have adapters"
    )
    problems += [
        f"{path}.rank={lora.rank} is not below the smaller side of {name}, {sides[name]}; use "
        f"rank={max(sides[name] // 2, 1)} or less"
        for name in chosen
        if lora.rank >= sides[name]
    ]
    return Adapters(lora.rank, lora.alpha / lora.rank, chosen), problems


def trained_leaves(
    tuning: FineTuning | None,
    described: ModelDescription | None,
    buffers: Buffers,
    names: Iterable[str],
    *,
    stages: int,
) -> tuple[frozenset[str], list[str]]:
    """Returns those of the leaves `names` that have a gradient, and violations on a mesh of
    `stages`. A leaf that no optimizer updates has one only if its operation's output has one."""
    everything = frozenset(names)
    if tuning is None or (tuning.trainable is None and tuning.lora is None):
        return everything, []
    problems: list[str] = []
    trained = frozenset(filter(is_adapter, everything))
    if tuning.trainable is not None:
        candidates = sorted(everything - trained - buffers.names)
        chosen, problems = match_patterns(tuning.trainable, candidates, "fine_tuning.trainable")
        trained |= set(chosen)
    in_pipeline = described is None or any(
        name.startswith(STACK) or described.enters(name) for name in trained
    )
    if trained and stages > 1 and not in_pipeline and not problems:
        problems.append(
            f"fine_tuning trains only {', '.join(sorted(trained))}, behind the pipeline of stage="
            f"{stages}, whose backward passes would make nothing; set stage=1"
        )
    moved = moved_buffers(described, buffers, trained) if described else frozenset()
    return trained | moved, problems


def match_patterns(
    patterns: tuple[str, ...], names: Iterable[str], field: str, *, among: str = "leaves"
) -> tuple[tuple[str, ...], list[str]]:
    """Returns the names that match any pattern, in their order, and a violation for each pattern
    without a match."""
    names = list(names)
    problems = []
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.3) or names[:3]
            problems.append(
                f"{field}: {pattern!r} names none of the {among}; near it are {', '.join(near)}"
            )
    fits = (name for name in names if any(fnmatchcase(name, p) for p in patterns))
    return tuple(fits), problems


def with_trained(places: Mapping[str, Leaf], trained: frozenset[str]) -> dict[str, Leaf]:
    """Returns the places of leaves with `trained` set."""
    return {k: place._replace(trained=k in trained) for k, place in places.items()}
