"""Rows that come one after another from an iterable: a generator, a torch DataLoader, an iterable
dataset of Hugging Face, a grain pipeline."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.data.dataset import Batch
from jaxtrain.notices import Share, notice
from jaxtrain.sources.document import check_split
from jaxtrain.violations import INT32_MAX, count, raise_violations

RowMaker = Callable[..., Iterable[Any]]
"""(split, seed=, epoch=) -> rows."""

FIRST = 64
"""Rows of an epoch that are kept: they are looked at when the data is opened, and read again by the
first steps. To a row further on an iterable skips, if it can."""
RECENT = 64
"""Rows kept behind the newest."""
HELD_OUT_SEED = 0


@dataclass(frozen=True)
class RowStream:
    """Rows in the order in which an iterable gives them.

    A run that begins behind the first row, because it resumes or branches, passes over the rows
    before. It calls `skip(count)` of a new iterable if that has one, as those of Hugging Face do;
    it returns an iterable of what is behind the first `count` rows. Else the rows are read. A
    notice says which. Every process reads all rows, and keeps its own. So data in files is better
    read by `TextData`, whose rows are found by their number.

    make: a function at the top of a module, or a frozen dataclass with `__call__`; called with
    (split, seed=, epoch=) it returns an iterable of rows, the same at each call. A row is `seq` + 1
    token ids, or a dict of arrays with the fields that the model reads, such as tokens and targets
    [seq]. version: names the rows; another text when they are others. seq: tokens of a row. rows:
    of an epoch, in which each is read once; of an endless stream any number. held_out_rows: of the
    split that is evaluated.
    """

    make: RowMaker
    version: str
    seq: int
    rows: int
    held_out_rows: int = 0

    def __post_init__(self) -> None:
        problems = _make_violations(self.make)
        if not isinstance(self.version, str) or not self.version:
            problems.append(f"version={self.version!r} must be a text that names the rows")
        problems += count("seq", self.seq, 1, INT32_MAX) + count("rows", self.rows, 1)
        problems += count("held_out_rows", self.held_out_rows, 0)
        raise_violations(problems, "RowStream")

    def open(self, split: str, *, seed: int, cache_dir: Path) -> StreamedRows:
        """Returns the split's rows; the held-out ones do not depend on `seed`. Raises ValueError
        where there are none."""
        check_split(split)
        if split == "held_out":
            if not self.held_out_rows:
                raise ValueError(
                    "RowStream: no rows are held out; use held_out_rows=..., or evaluation=None"
                )
            return StreamedRows(self, split, HELD_OUT_SEED, self.held_out_rows)
        return StreamedRows(self, split, seed, self.rows)


def _make_violations(make: Any) -> list[str]:
    remedy = "give a function (split, seed, epoch) -> rows"
    if not callable(make):
        return [f"make={make!r} is no function; {remedy}"]
    try:
        signature(make).bind("train", seed=0, epoch=0)
    except TypeError as error:
        return [f"make cannot be called with ('train', seed=0, epoch=0): {error}; {remedy}"]
    except ValueError:  # a function that has no signature
        pass
    return []


class StreamedRows:
    """A `Dataset` over an iterable. Law: `rows(n)` are the same however they are asked for."""

    def __init__(self, stream: RowStream, split: str, seed: int, length: int) -> None:
        self.seq, self._stream, self._split = stream.seq, stream, split
        self._seed, self._length = seed, length
        made_of = (stream.version, split, seed, stream.seq, length)
        self.digest = sha256(repr(made_of).encode()).hexdigest()
        # The loader reads in a thread of its own.
        self._lock = threading.Lock()
        self._epoch = self._next = self._begun_at = -1
        """The epoch that is read, the row that comes next, and the one that it was begun at."""
        self._iterable: Any = None
        self._is_moved = False
        """The iterable is no longer at its beginning: its `skip` returned itself."""
        self._iterator: Iterator[Any] = iter(())
        self._first: list[Batch] = []
        self._recent: deque[Batch] = deque(maxlen=RECENT)

    def __len__(self) -> int:
        return self._length

    def rows(self, indices: np.ndarray) -> Batch:
        """Returns rows by global number. Raises ValueError for rows that are none."""
        indices = np.asarray(indices, dtype=np.int64)
        if indices.ndim != 1 or not len(indices) or indices.min() < 0:
            raise ValueError(f"rows are numbered 0, 1, .. in one dim, one or more; found {indices}")
        with self._lock:
            present = np.unique(indices)  # forwards, whatever the order asked for
            with self._begun_anew_after_errors():
                by_number = {int(n): self._row(*divmod(int(n), self._length)) for n in present}
        rows = [by_number[int(n)] for n in indices]
        return {name: np.stack([row[name] for row in rows]) for name in rows[0]}

    def go_to(self, number: int) -> None:
        """Moves to the row with a global number, past the rows of its epoch before it, by the
        iterable's `skip` or by reading them. A notice says which way, if more than FIRST rows are
        passed over. Raises ValueError as `rows`."""
        epoch, row = divmod(number, self._length)
        with self._lock, self._begun_anew_after_errors():
            if self._kept(epoch, row) is not None:
                return
            is_ahead = epoch == self._epoch and row >= self._next
            is_far = row - is_ahead * self._next > FIRST
            skips = callable(getattr(self._iterable, "skip", None))
            if not is_ahead or (is_far and skips):
                self._begin(epoch, row)
            if is_far:
                way = "by reading them" if self._next < row else "by its skip()"
                notice(f"{self._name(epoch)}: passing over {row:,} rows {way}")
            tell = Share("passing over rows")
            while self._next < row:
                self._read()
                tell(self._next, row)

    @contextmanager
    def _begun_anew_after_errors(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._epoch = -1  # the iterable may have ended with it
            raise

    def _kept(self, epoch: int, number: int) -> Batch | None:
        """Returns a row that was read already, None if it is not kept."""
        if epoch == self._epoch and number < self._next:
            if number < len(self._first):
                return self._first[number]
            if self._next - number <= len(self._recent):
                return self._recent[number - self._next]
        return None

    def _row(self, epoch: int, number: int) -> Batch:
        if (row := self._kept(epoch, number)) is not None:
            return row
        if epoch != self._epoch or number < self._next:
            self._begin(epoch, number)
        while self._next <= number:
            self._read()
        return self._recent[-1]

    def _begin(self, epoch: int, number: int) -> None:
        """Begins an epoch, at the row `number` if that is far and the iterable can skip."""
        name, iterable = self._name(epoch), self._made(epoch)
        skip = getattr(iterable, "skip", None) if number > FIRST else None
        if callable(skip):
            iterable = skip(number)
            if not isinstance(iterable, Iterable):
                raise ValueError(
                    f"{name}.skip({number}) returned a {type(iterable).__name__}; return an "
                    "iterable of the rows behind them, or have no skip"
                )
            self._is_moved = iterable is self._iterable
        if epoch != self._epoch:
            self._first = []
        self._iterator, self._recent = iter(iterable), deque(maxlen=RECENT)
        self._epoch, self._next = epoch, number if callable(skip) else 0
        self._begun_at = self._next

    def _made(self, epoch: int) -> Iterable[Any]:
        rows = self._stream.make(self._split, seed=self._seed, epoch=epoch)
        if isinstance(rows, Mapping) or not isinstance(rows, Iterable):
            raise ValueError(
                f"{self._name(epoch)} returned a {type(rows).__name__}; return an iterable of rows"
            )
        if rows is self._iterable and (isinstance(rows, Iterator) or self._is_moved):
            raise ValueError(
                f"{self._name(epoch)} returned the iterable of an earlier call, which is no longer "
                "at its first row; return a new one at each call"
            )
        self._iterable, self._is_moved = rows, False
        return rows

    def _read(self) -> None:
        name = self._name(self._epoch)
        try:
            value = next(self._iterator)
        except StopIteration:
            ended = f"{name} ended after {self._next:,} rows"
            if self._begun_at == self._next > 0:
                ended = f"{name} has no row {self._next:,}"
            use = f"use {self._field}={self._next}" if self._begun_at == 0 < self._next else ""
            raise ValueError(
                f"{ended}, and an epoch has {self._length:,}; "
                + " or ".join(filter(None, [use, "return more of them"]))
            ) from None
        row = self._converted(value, f"row {self._next:,} of {name}")
        if self._recent and _kinds(row) != _kinds(self._recent[-1]):
            raise ValueError(
                f"row {self._next:,} of {name} has other fields, shapes or dtypes than the row "
                f"before it: {_forms(row)}, and {_forms(self._recent[-1])}"
            )
        if self._next == len(self._first) < FIRST:
            self._first.append(row)
        self._recent.append(row)
        self._next += 1

    def _converted(self, value: Any, label: str) -> Batch:
        """Returns a row with whole numbers as int32. Raises ValueError for what is no row of this
        length."""
        seq = self.seq
        if not isinstance(value, Mapping):
            ids = _array(value, label)
            is_integer = np.issubdtype(ids.dtype, np.integer)
            if ids.shape != (seq + 1,) or not is_integer:
                is_row = is_integer and ids.ndim == 1 and ids.size > 1
                if isinstance(value, tuple) and ids.shape == (2, seq):
                    raise ValueError(f"{label} is a pair; give {{'tokens': .., 'targets': ..}}")
                raise ValueError(
                    f"{label} is a {type(value).__name__} of {ids.dtype} and shape {ids.shape}; "
                    f"give seq + 1 = {seq + 1} token ids, whole numbers, or a dict of arrays"
                    + f", or use seq={ids.size - 1}" * is_row
                    + ONE_BY_ONE * (ids.ndim > 1)
                )
            value = {"tokens": ids[:-1], "targets": ids[1:]}
        if not value:
            raise ValueError(f"{label} is an empty dict; give the fields that the model reads")
        row = {str(k): _array(v, f"{k!r} in {label}") for k, v in value.items()}
        for name in [k for k in TOKEN_FIELDS if k in row] if "tokens" in row else ():
            array, is_weight = row[name], name == "weights"
            if array.shape != (seq,):
                more = ONE_BY_ONE * (array.ndim > 1)
                raise ValueError(f"{label} has {name} of shape {array.shape}, and seq={seq}{more}")
            if not is_weight and not np.issubdtype(array.dtype, np.integer):
                raise ValueError(f"{label} has {name} of {array.dtype}; give whole numbers")
        return row

    @property
    def _field(self) -> str:
        return "rows" if self._split == "train" else "held_out_rows"

    def _name(self, epoch: int) -> str:
        return f"make({self._split!r}, seed={self._seed}, epoch={epoch})"


ONE_BY_ONE = "; rows come one by one, not in batches"
TOKEN_FIELDS = ("tokens", "targets", "weights", "segments", "positions")
"""Fields with an element for each token, of rows that have tokens."""


def _array(value: Any, label: str) -> np.ndarray:
    """Returns an array of its own: whole numbers as int32, double precision as single. Raises
    ValueError for what is no array of numbers, and for whole numbers beyond int32."""
    try:
        array = np.asarray(value)
    except (ValueError, TypeError, RuntimeError) as error:  # as torch does for other devices
        raise ValueError(f"{label} is no array on the host: {error}") from error
    if array.dtype.kind in "OSUMmc":
        form = "a text" if isinstance(value, str) else f"a {type(value).__name__} of {array.dtype}"
        raise ValueError(f"{label} is {form}; give token ids, or other numbers")
    if np.issubdtype(array.dtype, np.integer):
        if array.size and not -INT32_MAX <= array.min() <= array.max() <= INT32_MAX:
            raise ValueError(f"{label} has {array.min()} to {array.max()}, which is beyond int32")
        return array.astype(np.int32)
    return array.astype(np.float32 if array.dtype == np.float64 else array.dtype)  # a copy


def _kinds(row: Batch) -> dict[str, Any]:
    return {name: (array.dtype, array.shape) for name, array in row.items()}


def _forms(row: Batch) -> dict[str, str]:
    return {name: f"{array.dtype}{list(array.shape)}" for name, array in row.items()}
