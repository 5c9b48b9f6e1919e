"""Data beside a run's own, as rows of the same form: files, sources of texts, data with `open`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxtrain.data import Csv, JsonLines, Parquet, TextData, TextFiles
from jaxtrain.experiment.evaluation import GIVE_DATA, is_source, readable
from jaxtrain.sources.files import FileSource, kind
from jaxtrain.tokenizers import Vocabulary
from jaxtrain.tokenizers.same import same_ids

BY_SUFFIX = {suffix: source for source in (JsonLines, Csv, Parquet) for suffix in source.suffixes}
HELD_OUT = "held_out"


@dataclass(frozen=True)
class OneSplit:
    """Data that opens the same split whichever is asked for."""

    data: Any
    split: str

    def open(self, split: str, *, seed: int, cache_dir: Path) -> Any:
        return self.data.open(self.split, seed=seed, cache_dir=cache_dir)

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "data"), name)


@dataclass(frozen=True)
class GivenTokenizer:
    """A tokenizer that another data's texts are encoded by. make: returns it at work."""

    make: Callable[[], Vocabulary]

    def build(self, texts: Any, *, corpus: str, cache_dir: Path) -> Vocabulary:
        return self.make()


@dataclass(frozen=True)
class OwnData:
    """The data of a run or an experiment, to whose form other data is brought. data: returns it.
    tokenizer: of texts, None if there is none. owner: the run or the experiment in messages."""

    data: Callable[[], Any]
    tokenizer: Any
    owner: str

    def split_of(self, other: Any, split: str | None) -> OneSplit:
        """Returns a split of other data. Of files that nobody has split, None takes all. Raises
        ValueError for what is no data, and for texts where the own data is none."""
        if not readable(other):
            raise ValueError(f"data={other!r} cannot be read; {GIVE_DATA}")
        if isinstance(other, str | Path | list | tuple):
            patterns = (other,) if isinstance(other, str | Path) else other
            other = self._files(tuple(map(str, patterns)))
        if is_source(other):
            if split is None and isinstance(other, FileSource):
                other, split = replace(other, held_out=0.0, held_out_patterns=()), "train"
            other = self._encoded(other)
        return OneSplit(other, split or HELD_OUT)

    def refuse_other_ids(self, rows: OneSplit, cache_dir: Path) -> None:
        """Raises ValueError if the rows have a tokenizer whose ids mean other texts."""
        data = rows.data
        if not isinstance(data, TextData) or self.tokenizer in (None, data.tokenizer):
            return
        own = self.tokenizer.build(lambda: iter(()), corpus="", cache_dir=cache_dir)
        if not same_ids(data.vocabulary(cache_dir), own):
            raise ValueError(
                f"the tokenizer of this data, {data.tokenizer}, is not that of {self.owner}: its "
                "ids mean other texts to the model; give the source alone, "
                f"{type(data.source).__name__}(...), which {self.owner}'s own tokenizer encodes"
            )

    def _files(self, patterns: tuple[str, ...]) -> FileSource:
        """Returns the source of files, by the suffix of the first; with the fields of the own
        source if that reads such files."""
        suffix, own = kind(patterns[0]), getattr(self.data(), "source", None)
        reads = isinstance(own, FileSource) and (
            suffix in own.suffixes or (isinstance(own, TextFiles) and suffix not in BY_SUFFIX)
        )
        if isinstance(own, FileSource) and reads:
            return replace(own, patterns=patterns)
        return BY_SUFFIX.get(suffix, TextFiles)(patterns)

    def _encoded(self, source: Any) -> TextData:
        """Returns rows of a source as the own data makes them, by its tokenizer."""
        own = self.data()
        if not isinstance(own, TextData):
            raise ValueError(
                f"the data of {self.owner} is a {type(own).__name__}, which is no text; give rows "
                f"for it, a value with `open`, and not {type(source).__name__}"
            )
        with_own = replace(own, source=source)  # refuses one that its own tokenizer cannot encode
        return replace(with_own, tokenizer=self.tokenizer)
