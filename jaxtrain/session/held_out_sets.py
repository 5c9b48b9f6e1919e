"""The held-out rows that an experiment is evaluated on: those of its own data, and named others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxtrain.data import BpeTokenizer
from jaxtrain.experiment import Experiment
from jaxtrain.session.held_out import open_held_out
from jaxtrain.session.other_data import GivenTokenizer, OneSplit, OwnData
from jaxtrain.violations import raise_violations

OWN = ""
"""Name of the experiment's own held-out split."""


def open_all(experiment: Experiment, fields: Any, cache_dir: Path) -> dict[str, Any]:
    """Returns the held-out rows of the experiment's data, under `OWN`, and of `Evaluation.sets`.
    Raises ValueError as `open_held_out` does, and for ids of another tokenizer."""
    of_experiment = _own(experiment, cache_dir)

    def opened(split: OneSplit) -> Any:
        of_experiment.refuse_other_ids(split, cache_dir)
        return open_held_out(replace(experiment, data=split), fields, cache_dir)

    own = open_held_out(experiment, fields, cache_dir)
    return {OWN: own} | for_each(_unopened(experiment, of_experiment), opened)


def absent_sets(experiment: Experiment, cache_dir: Path) -> list[str]:
    """Returns a message for each of `Evaluation.sets` that this machine lacks, or that is not of
    the experiment's form. Nothing is tokenised."""

    def look(split: OneSplit) -> None:
        if hasattr(split.data, "absent"):
            raise_violations(split.data.absent((split.split,)))

    try:
        for_each(_unopened(experiment, _own(experiment, cache_dir)), look)
    except ValueError as error:
        return [str(error)]
    return []


def for_each(sets: Mapping[str, Any], do: Callable[[Any], Any]) -> dict[str, Any]:
    """Returns `do` of each held-out set, by name. Raises ValueError with what all of them raise,
    each with its name."""
    results, violations = {}, []
    for name, data in sets.items():
        try:
            results[name] = do(data)
        except ValueError as error:
            violations.append(f"evaluation.sets[{name!r}]: {error}" if name else str(error))
    raise_violations(violations)
    return results


def _unopened(experiment: Experiment, own: OwnData) -> dict[str, OneSplit]:
    seq = getattr(experiment.data, "seq", None)

    def unopened(other: Any) -> OneSplit:
        split = own.split_of(other, None)
        other_seq = getattr(split.data, "seq", seq)
        if seq != other_seq:
            raise ValueError(
                f"its rows have seq={other_seq} and those of the experiment seq={seq}; use seq="
                f"{seq} there too: one program evaluates all sets"
            )
        return split

    sets = {} if experiment.evaluation is None else experiment.evaluation.named_sets
    return for_each(sets, unopened)


def _own(experiment: Experiment, cache_dir: Path) -> OwnData:
    """cache_dir: where a tokenizer is that is trained on the experiment's corpus."""
    data: Any = experiment.data
    tokenizer = getattr(data, "tokenizer", None)
    if isinstance(tokenizer, BpeTokenizer):
        tokenizer = GivenTokenizer(lambda: data.vocabulary(cache_dir))
    return OwnData(lambda: data, tokenizer, "this experiment")
