"""Rows of an iterable: those of a list, however they are asked for, read as seldom as can be."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxtrain import notices
from jaxtrain.data import RowStream
from jaxtrain.data.row_stream import FIRST, RECENT, StreamedRows
from jaxtrain.notices import told_to

SEQ, ROWS, READ = 6, 200, []
"""READ: (split, seed, epoch, row) of each row that an iterable has given."""


def ids(split: str, seed: int, epoch: int, row: int) -> np.ndarray:
    names = (split == "held_out", seed, epoch, row)
    return np.random.default_rng(names).integers(0, 16, SEQ + 1)


def squares(split: str, *, seed: int, epoch: int) -> Iterator[np.ndarray]:
    row = 0
    while True:
        READ.append((split, seed, epoch, row))
        yield ids(split, seed, epoch, row)
        row += 1


class Skipping:
    def __init__(self, first: int = 0) -> None:
        self.first = first

    def skip(self, count: int) -> Skipping:
        return Skipping(self.first + count)

    def __iter__(self) -> Iterator[np.ndarray]:
        row = self.first
        while True:
            READ.append(row)
            yield ids("train", 0, 0, row)
            row += 1


@dataclass(frozen=True)
class Listed:
    """An iterable with fields of its own, of as many rows as it has."""

    rows: tuple[Any, ...]

    def __call__(self, split: str, *, seed: int, epoch: int) -> Any:
        return self.rows


STREAM = RowStream(squares, "squares 1", seq=SEQ, rows=ROWS, held_out_rows=100)


@pytest.fixture(autouse=True)
def nothing_read() -> None:
    READ.clear()


def opened(stream: RowStream = STREAM, split: str = "train", seed: int = 0) -> StreamedRows:
    return stream.open(split, seed=seed, cache_dir=Path())


def assert_rows(dataset: StreamedRows, split: str, seed: int, numbers: Any) -> None:
    numbers = np.asarray(numbers)
    batch = dataset.rows(numbers)
    epochs = [divmod(int(n), len(dataset)) for n in numbers]
    expected = np.stack([ids(split, seed, epoch, row) for epoch, row in epochs])
    np.testing.assert_array_equal(batch["tokens"], expected[:, :-1])
    np.testing.assert_array_equal(batch["targets"], expected[:, 1:])
    assert batch["tokens"].dtype == batch["targets"].dtype == np.int32


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_rows_are_those_of_the_iterable_in_any_order(split: str) -> None:
    """Also over the end of an epoch, several times the same, and those before."""
    dataset, length = opened(split=split, seed=5), 200 if split == "train" else 100
    seed = 5 if split == "train" else 0
    assert len(dataset) == length
    rng = np.random.default_rng(1)
    batches = [[0, 1], range(32), range(90), [length - 1, length, 3 * length + 7], [3, 3, 2], [150]]
    batches += [rng.integers(0, 4 * length, 9) for _ in range(5)]
    batches += [range(length, length + 99), [length + 3, length + 20]]
    for numbers in batches:
        assert_rows(dataset, split, seed, numbers)


def test_an_iterable_may_use_one_array_for_all_rows() -> None:
    def make(split: str, *, seed: int, epoch: int) -> Iterator[np.ndarray]:
        row, scale = np.zeros(SEQ + 1, np.int32), np.zeros(2, np.float32)
        for number in range(ROWS):
            row[:] = ids(split, seed, epoch, number)
            scale[:] = number
            yield {"tokens": row[:-1], "targets": row[1:], "scale": scale}

    dataset = opened(replace(STREAM, make=make))
    assert_rows(dataset, "train", 0, range(9))
    assert dataset.rows(np.arange(9))["scale"][:, 0].tolist() == [*range(9)]


def test_rows_in_turn_are_read_once() -> None:
    """The first ones are looked at when the data is opened; an epoch ends with its last row."""
    dataset = opened()
    for numbers in ([0, 1], range(32)):
        assert_rows(dataset, "train", 0, numbers)
    dataset.go_to(0)
    for numbers in (range(1), *(range(at, at + 50) for at in range(0, 2 * ROWS, 50))):
        assert_rows(dataset, "train", 0, numbers)
    expected = [("train", 0, epoch, row) for epoch in (0, 1) for row in range(ROWS)]
    assert expected == READ


def test_a_later_row_is_reached_by_reading_or_by_the_iterables_own_skip() -> None:
    assert_rows(opened(), "train", 0, [150, 151])
    assert len(READ) == 152
    READ.clear()
    dataset = opened(replace(STREAM, make=lambda split, seed, epoch: Skipping()))
    for numbers in ([150, 151], [FIRST], [0], [152], [3, 151], [199], [70], [135]):
        assert_rows(dataset, "train", 0, numbers)
    assert READ[:3] == [150, 151, *range(FIRST + 1)][:3] and len(READ) < 2 + 2 * FIRST + 200
    dataset = opened(replace(STREAM, make=lambda split, seed, epoch: Skipping()))
    assert_rows(dataset, "train", 0, range(32))
    dataset.go_to(100)
    for numbers in ([100], [80]):  # those kept from before the skip are no neighbours of it
        assert_rows(dataset, "train", 0, numbers)


def test_it_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notices, "EVERY_S", 0.0)
    told: list[str] = []
    with told_to(told.append):
        opened().go_to(100)
    assert told[1:] == [f"passing over rows: {n}%" for n in range(1, 100)]


class Counting:
    """Its own iterator, whose `skip` moves it, as a reader of a file has it."""

    def __init__(self) -> None:
        self.row = 0

    def __iter__(self) -> Counting:
        return self

    def __next__(self) -> np.ndarray:
        READ.append(("train", 0, 0, self.row))
        self.row += 1
        return ids("train", 0, 0, self.row - 1)

    def skip(self, count: int) -> Counting:
        self.row += count
        return self


RESUMED = {  # how, by what: the rows that are read in all
    "its skip()": (lambda *_, **__: Skipping(), [*range(32), *range(100, 182)]),
    "its skip() of an iterator": (lambda *_, **__: Counting(), [*range(32), *range(100, 182)]),
    "reading them": (squares, [*range(182)]),
}


@pytest.mark.parametrize("way", RESUMED)
def test_a_run_that_resumes_looks_at_the_first_rows_and_goes_on(way: str) -> None:
    """By one pass, in which rows of other processes between its own are read once."""
    make, expected = RESUMED[way]
    dataset, told = opened(replace(STREAM, make=make)), []
    for numbers in ([0, 1], range(32)):
        assert_rows(dataset, "train", 0, numbers)
    with told_to(told.append):
        dataset.go_to(100)
        dataset.go_to(101), dataset.go_to(101)
    says = "make('train', seed=0, epoch=0): passing over 100 rows by "
    assert told == [says + way.removesuffix(" of an iterator")]
    for numbers in ([101, 102], [180, 181]):
        assert_rows(dataset, "train", 0, numbers)
    assert [row if isinstance(row, int) else row[-1] for row in READ] == expected
    assert_rows(dataset, "train", 0, [3, 120, 31])


def test_a_run_goes_on_in_a_later_epoch() -> None:
    dataset, told = opened(), []
    assert_rows(dataset, "train", 0, range(32))
    with told_to(told.append):
        dataset.go_to(2 * ROWS + 3)
    assert not told, "three are soon read"
    assert_rows(dataset, "train", 0, [2 * ROWS + 3, 2 * ROWS])
    assert READ[32:] == [("train", 0, 2, row) for row in range(4)]


@pytest.mark.parametrize("skips", [False, True])
def test_an_iterable_that_ends_says_what_to_use(skips: bool) -> None:
    short = opened(replace(STREAM, make=lambda *_, **__: Short(skips)))
    says = "has no row 190, and an epoch has 200; return more of them"
    if not skips:
        says = "ended after 190 rows, and an epoch has 200; use rows=190 or return more of them"
    with pytest.raises(ValueError, match=says):
        short.rows(np.arange(2)), short.go_to(190), short.rows(np.arange(190, 192))


def test_what_skip_returns_is_an_iterable() -> None:
    class Moved(Counting):
        def skip(self, count: int) -> Any:
            self.row += count

    dataset = opened(replace(STREAM, make=lambda *_, **__: Moved()))
    with pytest.raises(ValueError, match=r"skip\(100\) returned a NoneType; return an iterable of"):
        dataset.go_to(100)


def test_threads_read_the_same_rows() -> None:
    dataset = opened(replace(STREAM, make=slowly))
    with ThreadPoolExecutor(4) as pool:
        for each in [pool.submit(assert_rows, dataset, "train", 0, range(n, 90)) for n in range(4)]:
            each.result()


def slowly(split: str, *, seed: int, epoch: int) -> Iterator[np.ndarray]:
    for row in range(ROWS):
        time.sleep(1e-4)
        yield ids(split, seed, epoch, row)


class Short(list):
    """190 rows; a `skip` if it `skips`."""

    def __init__(self, skips: bool) -> None:
        super().__init__([ids("train", 0, 0, row) for row in range(190)])
        if skips:
            self.skip = lambda count: self[count:]


def test_rows_that_are_asked_for_after_an_error_are_read_anew() -> None:
    fails = [True]

    def make(split: str, *, seed: int, epoch: int) -> Iterator[np.ndarray]:
        for row in range(ROWS):
            if row == 5 and fails.pop():
                raise OSError("gone")
            yield ids(split, seed, epoch, row)

    dataset = opened(replace(STREAM, make=make))
    with pytest.raises(OSError, match="gone"):
        dataset.rows(np.arange(10))
    fails.append(False)
    assert_rows(dataset, "train", 0, range(10))


def test_the_newest_rows_are_kept_and_others_read_again() -> None:
    """And those asked for at once are read in the order of the iterable."""
    dataset = opened()
    assert_rows(dataset, "train", 0, [149, 70])
    assert len(READ) == 150
    for number in (150 - RECENT, FIRST - 1):
        assert_rows(dataset, "train", 0, [number])
    assert len(READ) == 150
    older = 150 - RECENT - 1
    assert_rows(dataset, "train", 0, [older])
    assert len(READ) == 150 + older + 1


def test_a_row_may_be_a_dict_of_any_arrays() -> None:
    row = {"x": np.arange(3.0), "y": np.int64(2), "tokens": list(range(SEQ))}
    batch = opened(replace(STREAM, make=Listed((row,) * 3), rows=3)).rows(np.arange(3))
    assert {k: (v.shape, str(v.dtype)) for k, v in batch.items()} == {
        "x": ((3, 3), "float32"),
        "y": ((3,), "int32"),
        "tokens": ((3, SEQ), "int32"),
    }


TEXT = "row 0 of make.* is a text; give token ids"
LONG = {"tokens": np.zeros(SEQ + 1, int), "targets": np.zeros(SEQ + 1, int)}
BATCH = {"tokens": np.zeros((2, SEQ), int)}


class OfDevice:
    """As a tensor on a GPU answers."""

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")


GOOD = np.zeros(SEQ + 1, int)
NO_ROWS = {
    "too few": ([GOOD], "ended after 1 rows, and an epoch has 2; use rows=1 or return more"),
    "other length": (
        [np.zeros(SEQ, int)],
        "row 0 of .* is a ndarray of int32 and shape .6,.; give seq \\+ 1 = 7 .*, or use seq=5",
    ),
    "text": (["abc"], TEXT),
    "texts in a dict": ([{"tokens": GOOD[:-1], "text": "abc"}], "'text' in " + TEXT),
    "floats": ([GOOD / 2], "is a ndarray of float32 and shape .7,.; give seq .* whole numbers"),
    "float tokens": ([{"tokens": GOOD[:-1] / 2}], "tokens of float32; give whole numbers"),
    "a pair": ([(GOOD[1:], GOOD[1:])], "row 0 of .* is a pair; give {'tokens': .., 'targets': ..}"),
    "nothing": ([{}], "row 0 of .* is an empty dict; give the fields that the model reads"),
    "long targets": (
        [{"tokens": GOOD[1:], "targets": GOOD}],
        "row 0 of .* has targets of shape .7,., and seq=6$",
    ),
    "short weights": (
        [{"tokens": GOOD[1:], "weights": GOOD[3:]}],
        "row 0 of .* has weights of shape .4,., and seq=6$",
    ),
    "float targets": (
        [{"tokens": GOOD[1:], "targets": GOOD[1:] / 2}],
        "row 0 of .* has targets of float32; give whole numbers",
    ),
    "of a device": ([OfDevice()], "row 0 of .* is no array on the host: can't convert cuda:0"),
    "below int32": ([GOOD - 2**31], "has -2147483648 to -2147483648, which is beyond int32"),
    "dates": ([GOOD.astype("M8[s]")], "row 0 of .* is a ndarray of datetime64.s.; give token"),
    "ragged": ([[[1], [1, 2]]], "row 0 of make.* is no array"),
    "beyond int32": ([GOOD + 2**31], "has 2147483648 to 2147483648, which is beyond int32"),
    "arrays of several": ([np.zeros((2, SEQ + 1), int)], "shape .2, 7.; .*not in batches"),
    "long": ([LONG], "tokens of shape \\(7,\\), and seq=6"),
    "a batch": ([BATCH], "one by one, not in batches"),
    "others": ([GOOD, {"tokens": GOOD[:-1]}], "row 1 of .* has other fields, shapes or dtypes"),
    "other shapes": (
        [{"x": np.ones(2, np.float32)}, {"x": np.ones(3, np.float32)}],
        r"float32\[3\]'}, and {'x': 'float32\[2\]'}",
    ),
    "other dtypes": (
        [{"x": np.ones(2, np.float32)}, {"x": np.ones(2, np.float16)}],
        r"float16\[2\]'}, and {'x': 'float32\[2\]'}",
    ),
}


@pytest.mark.parametrize("name", NO_ROWS)
def test_what_is_no_row_is_named_by_its_number(name: str) -> None:
    rows, told = NO_ROWS[name]
    dataset = opened(replace(STREAM, make=Listed(tuple(rows)), rows=2))
    with pytest.raises(ValueError, match=told):
        dataset.rows(np.arange(2))


def test_a_value_that_cannot_be_is_refused_with_each_of_them() -> None:
    with pytest.raises(
        ValueError, match=r"(?s)make=3 is no.*version='' .*seq=0 .*rows=0 .*held_out"
    ):
        RowStream(3, "", seq=0, rows=0, held_out_rows=-1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"held_out_rows=\.\.\., or evaluation=None"):
        opened(replace(STREAM, held_out_rows=0), "held_out")
    with pytest.raises(ValueError, match=r"cannot be called with \('train', seed=0, epoch=0\)"):
        replace(STREAM, make=lambda split: [])
    once = iter([GOOD] * ROWS)
    dataset = opened(replace(STREAM, make=lambda *_, **__: once))
    says = r"the iterable of an earlier call.*; return a new one"
    with pytest.raises(ValueError, match=says):
        dataset.rows(np.arange(2)), dataset.rows(np.arange(ROWS, ROWS + 1))
    moved = Skipping()
    moved.skip = lambda count: moved  # type: ignore[method-assign]
    dataset = opened(replace(STREAM, make=lambda *_, **__: moved))
    with pytest.raises(ValueError, match=says):
        dataset.go_to(100), dataset.go_to(ROWS)
    with pytest.raises(
        ValueError, match=r"numbered 0, 1, .. in one dim, one or more; found \[-1\]"
    ):
        opened().rows(np.array([-1]))
    with pytest.raises(ValueError, match="returned a dict; return an iterable of rows"):
        opened(replace(STREAM, make=lambda split, **_: {"tokens": []})).rows(np.arange(1))


def test_a_digest_is_of_what_decides_the_rows() -> None:
    same = opened(replace(STREAM, make=Listed(()))).digest
    assert same == opened().digest
    others = [dict(version="squares 2"), dict(rows=ROWS + 1), dict(seq=SEQ + 1)]
    digests = {opened(replace(STREAM, **each)).digest for each in others}
    digests |= {
        opened(seed=1).digest,
        opened(replace(STREAM, held_out_rows=ROWS), "held_out").digest,
    }
    assert len({*digests, same, opened(split="held_out").digest}) == 7
    assert opened(split="held_out").digest == opened(split="held_out", seed=1).digest
