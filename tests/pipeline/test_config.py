"""What an experiment says of its pipeline: what is refused, in which words."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import numpy as np
import pytest

from jaxtrain.pipeline.config import Pipeline
from jaxtrain.pipeline.schedule import make_schedule
from jaxtrain.pipeline.table_file import written


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"schedule": "one_f_oneb"},
            ("'one_f_oneb' is neither a schedule nor a .csv or .txt file", "one_f_one_b"),
        ),
        ({"schedule": "zero-bubble"}, ("did you mean", "zero_bubble")),
        ({"schedule": "1F1B"}, ("did you mean 'one_f_one_b'?",)),
        ({"schedule": 4}, ("schedule=4 is neither",)),
        ({"schedule": None}, ("schedule=None is neither",)),
        ({"schedule": "mine.toml"}, ("'mine.toml' is neither",)),
        ({"chunks": 0}, ("chunks=0 must be a whole number of at least 1",)),
        ({"chunks": 2.0}, ("chunks=2.0 must be",)),
        ({"chunks": True}, ("chunks=True must be",)),
        ({"save": "input"}, ("save='input' must be one of inputs, residuals",)),
        ({"save": ["inputs"]}, ("save=['inputs'] must be one of",)),
        (
            {"schedule": "gpip", "chunks": -1, "save": ""},
            ("did you mean", "'gpipe'", "chunks=-1", "save=''"),
        ),
    ],
    ids=str,
)
def test_what_says_nothing_is_refused_with_every_reason(fields, words) -> None:
    with pytest.raises(ValueError) as error:
        Pipeline(**fields)
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize(
    ("schedule", "chunks"),
    [("gpipe", 1), ("one_f_one_b", 1), ("interleaved", 2), ("zero_bubble", 1), ("zero_bubble", 3)],
)
def test_a_kind_is_its_table_on_a_mesh(schedule, chunks) -> None:
    found = Pipeline(schedule, chunks).table(stages=3, microbatches=5)
    due = make_schedule(schedule, 3, 5, chunks)
    assert found.kind == schedule and found.tables.keys() == due.tables.keys()
    for letter, table in due.tables.items():
        np.testing.assert_array_equal(found.tables[letter], table)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (("one_f_one_b", 2), ("one_f_one_b has no chunks, and chunks=2",)),
        (("gpipe", 3), ("gpipe has no chunks, and chunks=3",)),
        (("interleaved", 1), ("interleaved with chunks=1 is one_f_one_b",)),
    ],
)
def test_what_a_kind_cannot_do_is_refused_when_a_table_is_made(fields, words) -> None:
    with pytest.raises(ValueError) as error:
        Pipeline(*fields).table(stages=2, microbatches=4)
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize("suffix", [".csv", ".txt"])
@pytest.mark.parametrize("size", [("one_f_one_b", 2, 3, 1), ("zero_bubble", 2, 4, 2)], ids=str)
def test_a_file_is_the_table_it_has(size, suffix, tmp_path) -> None:
    schedule = make_schedule(*size)
    path = tmp_path / f"mine{suffix}"
    path.write_text(written(schedule))
    _, stages, microbatches, chunks = size
    found = Pipeline(str(path), chunks).table(stages=stages, microbatches=microbatches)
    assert (found.kind, found.stages) == ("mine", stages)
    for letter, table in schedule.tables.items():
        np.testing.assert_array_equal(found.tables[letter], table)


def test_a_file_of_another_run_is_refused_with_all_that_differs(tmp_path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(written(make_schedule("interleaved", 2, 4, 2)))
    pipeline = Pipeline(str(path), chunks=2)
    for due, words in (
        ({"stages": 4, "microbatches": 4}, ["stages=2 and this run has 4"]),
        ({"stages": 2, "microbatches": 6}, ["microbatches=4 and this run has 6"]),
        (
            {"stages": 1, "microbatches": 2},
            ["stages=2 and this run has 1", "microbatches=4 and this run has 2"],
        ),
    ):
        with pytest.raises(ValueError) as error:
            pipeline.table(**due)
        said = str(error.value)
        assert str(path) in said and said.count("this run has") == len(words)
        assert all(word in said for word in words), said
    with pytest.raises(ValueError, match="chunks=2 and this run has 3"):
        Pipeline(str(path), chunks=3).table(stages=2, microbatches=4)
    assert Pipeline(str(path)).table(stages=2, microbatches=4).chunks == 2, "its own"


def test_a_file_that_no_step_can_follow_or_that_is_not_there(tmp_path) -> None:
    path = tmp_path / "mine.csv"
    with pytest.raises(FileNotFoundError, match=r"mine\.csv"):
        Pipeline(str(path)).table(stages=2, microbatches=1)
    path.write_text("F0, F0\n, B0\nB0,\n")
    with pytest.raises(ValueError, match="not before tick 1"):
        Pipeline(str(path)).table(stages=2, microbatches=1)


def test_it_is_a_value() -> None:
    assert Pipeline() == Pipeline("one_f_one_b", 1, "inputs")
    assert hash(Pipeline("gpipe")) == hash(Pipeline("gpipe"))
    with pytest.raises(FrozenInstanceError):
        Pipeline().chunks = 2  # type: ignore[misc]
