"""What of a model is trained: all of it, the leaves that patterns name, or adapters beside them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from jaxtrain.experiment import Experiment
from jaxtrain.mesh.sharding import STAGE
from jaxtrain.models.adapter_config import with_adapters, without_adapters
from jaxtrain.models.adapters import adapter_places, is_adapter
from jaxtrain.models.decoder import DecoderConfig

PERIOD, ENTERING = "period.", ("embedding", "positions", "prefix.")
"""Beginnings of the leaves in a pipeline, and of those before it."""


def base_model(experiment: Experiment) -> Experiment:
    """The experiment without the adapters that were put into its model."""
    if not isinstance(experiment.model, DecoderConfig):
        return experiment
    return replace(experiment, model=without_adapters(experiment.model))


def adapted_model(
    experiment: Experiment, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[Experiment, list[str]]:
    """The experiment with the adapters it asks for in its model, and what is wrong with them.

    shapes: of the leaves of the model without adapters.
    """
    tuning = experiment.fine_tuning
    lora = None if tuning is None else tuning.lora
    if lora is None:
        return experiment, []
    where = "fine_tuning.lora"
    if not isinstance(experiment.model, DecoderConfig):
        return experiment, [f"{where} acts on built-in models only, and this one is its own"]
    sides = adapter_places(shapes)
    chosen, problems = matched(
        lora.targets, sides, f"{where}.targets", among="matrices that can have adapters"
    )
    problems += [
        f"{where}.rank={lora.rank} is not below the smaller side of {name}, {sides[name]}; use "
        f"rank={max(sides[name] // 2, 1)} or less"
        for name in chosen
        if lora.rank >= sides[name]
    ]
    model = with_adapters(experiment.model, chosen, lora.rank, lora.alpha / lora.rank)
    return replace(experiment, model=model), problems


def trained_leaves(
    experiment: Experiment, names: Iterable[str], sizes: Mapping[str, int]
) -> tuple[frozenset[str], list[str]]:
    """Of all leaves those that are trained, and what is wrong with that on these mesh axes."""
    tuning, everything = experiment.fine_tuning, frozenset(names)
    if tuning is None or (tuning.trainable is None and tuning.lora is None):
        return everything, []
    problems: list[str] = []
    found = frozenset(name for name in everything if is_adapter(name))
    if tuning.trainable is not None:
        others = sorted(everything - found)
        chosen, problems = matched(tuning.trainable, others, "fine_tuning.trainable")
        found |= set(chosen)
    in_pipeline = any(name.startswith((PERIOD, *ENTERING)) for name in found)
    if found and sizes.get(STAGE, 1) > 1 and not in_pipeline and not problems:
        problems.append(
            f"fine_tuning trains only {', '.join(sorted(found))}, behind the pipeline of stage="
            f"{sizes[STAGE]}, whose backward passes would make nothing; set stage=1"
        )
    return found, problems


def matched(
    patterns: tuple[str, ...], names: Iterable[str], field: str, *, among: str = "leaves"
) -> tuple[tuple[str, ...], list[str]]:
    """The names that any pattern fits, in their order, and each pattern that fits none."""
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


def with_trained(places: Mapping[str, Any], trained: frozenset[str]) -> dict[str, Any]:
    """The places of leaves, each knowing whether it is trained."""
    return {k: place._replace(trained=k in trained) for k, place in places.items()}
