"""What a saved run is looked at with: files, sources, data, rows, as data of the run's own form."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.data import Csv, JsonLines, Parquet, TextData, TextFiles, TokenFiles
from jaxtrain.data.mixture import Mixture
from jaxtrain.experiment.reading import Trust
from jaxtrain.experiment.stored import stored_field
from jaxtrain.inspection.opened import kept_vocabulary, same_ids
from jaxtrain.sources.files import FileSource, kind

BY_SUFFIX = {suffix: source for source in (JsonLines, Csv, Parquet) for suffix in source.suffixes}
HELD_OUT = "held_out"


@dataclass(frozen=True)
class OneSplit:
    """Data of which one split takes the place of all."""

    data: Any
    split: str

    def open(self, split: str, *, seed: int, cache_dir: Path) -> Any:
        return self.data.open(self.split, seed=seed, cache_dir=cache_dir)

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "data"), name)


@dataclass(frozen=True)
class GivenTokenizer:
    """A tokenizer that is at work already."""

    vocabulary: Any

    def build(self, texts: Any, *, corpus: str, cache_dir: Path) -> Any:
        return self.vocabulary


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


def data_for(run: Path, data: Any, split: str | None, cache: Path, trust: Trust) -> OneSplit:
    """Returns a split of data as rows for a run's model; what it may be, `evaluate` says. Raises
    ValueError for what is no data, and for texts that another tokenizer encodes."""
    if data is None:
        return OneSplit(stored_field(run, "data", trust=trust), split or HELD_OUT)
    patterns = (data,) if isinstance(data, str | Path) else data
    if isinstance(patterns, list | tuple) and all(isinstance(p, str | Path) for p in patterns):
        data = _files(run, tuple(map(str, patterns)), trust)
    is_source = hasattr(data, "pieces") or isinstance(data, Mixture | TokenFiles)
    if is_source and not isinstance(data, type):
        if split is None and isinstance(data, FileSource):  # nobody asked for a part of them
            data, split = replace(data, held_out=0.0, held_out_patterns=()), "train"
        data = _of_source(run, data, trust)
    elif isinstance(data, type) or not callable(getattr(data, "open", None)):
        raise ValueError(
            f"data={data!r} cannot be read; give files by name or pattern, a source such as "
            "TextFiles(...), or data such as TextData(...)"
        )
    elif isinstance(data, TextData) and not same_ids(
        data.vocabulary(cache), kept_vocabulary(run, trust)
    ):
        source = type(data.source).__name__
        raise ValueError(
            f"the tokenizer of this data, {data.tokenizer}, is not that of {run}: its ids mean "
            f"other texts to the model; give the source alone, {source}(...), which the run's own "
            "tokenizer encodes"
        )
    return OneSplit(data, split or HELD_OUT)


def _files(run: Path, patterns: tuple[str, ...], trust: Trust) -> FileSource:
    """Returns the source of files, by the suffix of the first; with the fields of the run's own
    source if that reads such files."""
    suffix = kind(patterns[0])
    own = getattr(stored_field(run, "data", trust=trust), "source", None)
    reads = isinstance(own, FileSource) and (
        suffix in own.suffixes or (isinstance(own, TextFiles) and suffix not in BY_SUFFIX)
    )
    if isinstance(own, FileSource) and reads:
        return replace(own, patterns=patterns)
    return BY_SUFFIX.get(suffix, TextFiles)(patterns)


def _of_source(run: Path, source: Any, trust: Trust) -> TextData:
    """Returns rows of a source as the run's own data makes them, by the tokenizer that it keeps."""
    own = stored_field(run, "data", trust=trust)
    if not isinstance(own, TextData):
        raise ValueError(
            f"{run} was trained on {type(own).__name__}, which is no text; give rows for it, a "
            f"value with `open`, and not {type(source).__name__}"
        )
    more: Any = {name: getattr(own, name) for name in ("seq", "isolate_documents", "packing")}
    return TextData(source, GivenTokenizer(kept_vocabulary(run, trust)), **more)


def warn_of_other_rows(metadata: Mapping[str, Any], dataset: Any, split: str) -> None:
    """Warns if the run's own data is no longer that of its step."""
    saved = metadata.get({"train": "data", HELD_OUT: HELD_OUT}[split])
    if saved is not None and saved != getattr(dataset, "digest", None):
        warnings.warn(
            f"the {split} rows are not those of step {metadata.get('step')}: the data has changed "
            "since, and its loss does not compare with the run's own",
            stacklevel=3,
        )
