"""The held-out rows that an experiment is evaluated on: those of its own data, and named others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxtrain.data import BpeTokenizer
from jaxtrain.experiment import Evaluation, Experiment
from jaxtrain.session.held_out import open_held_out
from jaxtrain.session.other_data import GivenTokenizer, OneSplit, OwnData
from jaxtrain.violations import raise_violations

OWN = ""
"""Name of the experiment's own held-out split."""
OF_ALL = ("seq", "isolate_documents")
"""Fields of text that are the same in all sets: one program evaluates them."""


def open_all(experiment: Experiment, fields: Any, cache_dir: Path) -> dict[str, Any]:
    """Returns the held-out rows of the experiment's data, under `OWN`, and of `Evaluation.sets`.
    Raises ValueError as `open_held_out` does, and for ids of another tokenizer."""
    own = own_data(experiment.data, cache_dir, "this experiment")

    def opened(other: Any) -> Any:
        split = _of_one_form(own.split_of(other, None), experiment.data)
        own.refuse_other_ids(split, cache_dir)
        return open_held_out(
            replace(experiment, data=split), fields, cache_dir, otherwise="leave the set out"
        )

    rows = open_held_out(experiment, fields, cache_dir)
    return {OWN: rows} | for_each(_sets(experiment.evaluation), opened)


def absent_sets(experiment: Experiment, cache_dir: Path) -> list[str]:
    """Returns a message for each of `Evaluation.sets` that this machine lacks, or that is not of
    the experiment's form. Nothing is tokenised."""
    own = own_data(experiment.data, cache_dir, "this experiment")

    def look(other: Any) -> None:
        split = _of_one_form(own.split_of(other, None), experiment.data)
        if hasattr(split.data, "absent"):
            raise_violations(split.data.absent((split.split,)))

    try:
        for_each(_sets(experiment.evaluation), look)
    except ValueError as error:
        return [str(error)]
    return []


def own_data(data: Any, cache_dir: Path, owner: str) -> OwnData:
    """Returns the data of an experiment or a run, to whose form sets are brought. cache_dir: where
    a tokenizer is that is trained on its corpus. owner: it in messages."""
    tokenizer = getattr(data, "tokenizer", None)
    if isinstance(tokenizer, BpeTokenizer):
        tokenizer = GivenTokenizer(lambda: data.vocabulary(cache_dir))
    return OwnData(lambda: data, tokenizer, owner)


def for_each(sets: Mapping[str, Any], do: Callable[[Any], Any]) -> dict[str, Any]:
    """Returns `do` of each held-out set, by name. Raises ValueError with what all of them raise,
    each with its name; another error has it as a note."""
    results, violations = {}, []
    for name, data in sets.items():
        try:
            results[name] = do(data)
        except ValueError as error:
            violations.append(f"evaluation.sets[{name!r}]: {error}" if name else str(error))
        except Exception as error:  # whatever the code of a user's own data raises
            if name:
                error.add_note(f"jaxtrain: this is of evaluation.sets[{name!r}]")
            raise
    raise_violations(violations)
    return results


def _sets(evaluation: Evaluation | None) -> dict[str, Any]:
    return {} if evaluation is None else evaluation.named_sets


def _of_one_form(split: OneSplit, own: Any) -> OneSplit:
    """Returns the split. Raises ValueError if a field that all sets share has another value, or if
    pairs of answers are beside rows that are none."""
    of_pairs = [getattr(data, "of_pairs", None) for data in (own, split.data)]
    if of_pairs == [False, True]:
        raise ValueError("it has pairs of answers, and the experiment has none; leave the set out")
    if of_pairs == [True, False]:
        raise ValueError(
            "it has no pairs of answers, as the experiment has; use Preferences(...) or leave the "
            "set out"
        )
    fields = {name: getattr(own, name, None) for name in OF_ALL}
    others = {name: getattr(split.data, name, value) for name, value in fields.items()}
    raise_violations(
        f"it has {name}={others[name]}, and the experiment {name}={value}; use that there too: one "
        "program evaluates all sets"
        for name, value in fields.items()
        if value is not None and others[name] != value
    )
    return split
