"""What a saved run is looked at with: files, sources, data, rows, as data of the run's own form."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.data import TokenizerFile
from jaxtrain.experiment.reading import Trust
from jaxtrain.experiment.stored import stored_field
from jaxtrain.files.pointer import StoreFailed
from jaxtrain.inspection.opened import kept_vocabulary
from jaxtrain.session.other_data import HELD_OUT, GivenTokenizer, OneSplit, OwnData


@dataclass(frozen=True, eq=False)
class GivenRows:
    """Rows as data: arrays [rows, ...] by field."""

    arrays: Mapping[str, np.ndarray]
    isolate_documents: bool
    seq: int

    def open(self, split: str, *, seed: int, cache_dir: Path) -> GivenRows:
        return self

    def __len__(self) -> int:
        return len(next(iter(self.arrays.values()), ()))

    def rows(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        return {name: values[indices] for name, values in self.arrays.items()}


def stored_data(run: Path, trust: Trust) -> Any:
    """Returns the data of a run; with the tokenizer that the run keeps where its file is gone."""
    data = stored_field(run, "data", trust=trust)
    tokenizer = getattr(data, "tokenizer", None)
    try:
        absent = tokenizer.absent() if isinstance(tokenizer, TokenizerFile) else []
    except StoreFailed as error:
        absent = [str(error)]
    if not absent:
        return data
    warnings.warn(
        f"{'; '.join(absent)}: texts are encoded by the tokenizer that {run} keeps, "
        "and whether the data has changed since is not known",
        stacklevel=4,
    )
    return replace(data, tokenizer=GivenTokenizer(partial(kept_vocabulary, run, trust)))


def uses_kept_tokenizer(rows: OneSplit) -> bool:
    """True for rows of a run's own data by the tokenizer that it keeps: their digest is another."""
    return isinstance(getattr(rows.data, "tokenizer", None), GivenTokenizer)


def data_for(run: Path, data: Any, split: str | None, cache: Path, trust: Trust) -> OneSplit:
    """Returns a split of data as rows for a run's model; what it may be, `evaluate` says. Raises
    ValueError for what is no data, and for texts that another tokenizer encodes."""
    own = partial(stored_data, run, trust)
    if data is None:
        return OneSplit(own(), split or HELD_OUT)
    of_run = OwnData(own, GivenTokenizer(partial(kept_vocabulary, run, trust)), str(run))
    rows = of_run.split_of(data, split)
    of_run.refuse_other_ids(rows, cache)
    return rows


def warn_of_other_rows(metadata: Mapping[str, Any], dataset: Any, split: str) -> None:
    """Warns if the run's own data is no longer that of its step."""
    saved = metadata.get({"train": "data", HELD_OUT: HELD_OUT}[split])
    if saved is not None and saved != getattr(dataset, "digest", None):
        _warn(f"the {split} rows are", metadata)


def warn_of_other_sets(metadata: Mapping[str, Any], digests: Mapping[str, str | None]) -> None:
    """Warns of each named held-out set that is no longer that of the run's step."""
    for name, saved in metadata.get("held_out_sets", {}).items():
        if name in digests and saved not in (None, digests[name]):
            _warn(f"the rows of the held-out set {name} are", metadata)


def _warn(rows_are: str, metadata: Mapping[str, Any]) -> None:
    warnings.warn(
        f"{rows_are} not those of step {metadata.get('step')}: the data has changed since, and its "
        "loss does not compare with the run's own",
        stacklevel=4,
    )
