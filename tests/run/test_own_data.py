"""Data of a user's own: what it lacks is told when it is opened, all at once."""

from __future__ import annotations

import copy
import io
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import SEQ, VOCAB

import jaxtrain
from jaxtrain.cluster.phases import Phases
from jaxtrain.data.row_stream import StreamedRows
from jaxtrain.session.rows import open_split


class Whole:
    """A dataset with all that a run asks for."""

    digest, vocab = "whole", VOCAB

    def __init__(self, split: str) -> None:
        self.split = split

    def __len__(self) -> int:
        return 64

    def rows(self, indices: np.ndarray) -> Any:
        stream = (indices[:, None] + np.arange(SEQ + 1)).astype(np.int32) % VOCAB
        return {
            "tokens": stream[:, :-1],
            "targets": stream[:, 1:],
            "weights": np.ones((len(indices), SEQ), np.float32),
        }

    def encode(self, text: str) -> list[int]:
        return [ord(letter) % VOCAB for letter in text]

    def decode(self, ids: Any) -> str:
        return "".join(chr(97 + i) for i in ids)


class NoDigest(Whole):
    digest = None  # type: ignore[assignment]


class NoLength(Whole):
    __len__ = None  # type: ignore[assignment]


class NoVocab(Whole):
    vocab = None  # type: ignore[assignment]


class NoText(Whole):
    encode = decode = None  # type: ignore[assignment]


class Listed(Whole):
    def rows(self, indices: np.ndarray) -> Any:
        return super().rows(indices)["tokens"]


class OneRow(Whole):
    def rows(self, indices: np.ndarray) -> Any:
        batch = super().rows(indices)
        return batch | {"targets": batch["targets"][0], "weights": [1.0, 1.0]}


class Shorter(Whole):
    """As many targets as there are pairs of tokens."""

    def rows(self, indices: np.ndarray) -> Any:
        batch = super().rows(indices)
        return {**batch, "targets": batch["targets"][:, 1:], "weights": batch["weights"][:, 0]}


def stream(split: str) -> Iterator[dict[str, np.ndarray]]:
    yield from ()


class Beyond(Whole):
    """One id of one row is beyond the vocabulary, or below 0."""

    def __init__(self, split: str, *, row: int, name: str, value: int, weight: float) -> None:
        super().__init__(split)
        self.at, self.name, self.value, self.weight = row, name, value, weight

    def rows(self, indices: np.ndarray) -> Any:
        batch = super().rows(indices)
        there = (indices == self.at)[:, None]
        batch[self.name] = np.where(there, self.value, batch[self.name])
        batch["weights"] = np.where(there, np.float32(self.weight), batch["weights"])
        return batch


@dataclass(frozen=True)
class Tagger:
    """A model that describes itself and has no field `vocab`."""

    decoder: Any

    def describe(self) -> Any:
        return self.decoder.describe()

    def build(self, key: Any) -> Any:
        return self.decoder.build(key)


KINDS: dict[str, Callable[[str], Any]] = {
    kind.__name__: kind for kind in (Whole, NoDigest, NoLength, NoVocab, NoText, Listed, OneRow)
} | {"Shorter": Shorter}
KINDS |= {"stream": stream}


@dataclass(frozen=True)
class OwnData:
    kind: str
    beyond: tuple[tuple[str, Any], ...] = ()

    def open(self, split: str, *, seed: int, cache_dir: Path) -> Any:
        return Beyond(split, **dict(self.beyond)) if self.beyond else KINDS[self.kind](split)


REFUSED = {
    "NoDigest": "NoDigest: it has digest=None; every save keeps a digest.*checkpoints=None",
    "NoText": r"no encode\(\) and no decode\(\), which a sample of text needs.*sample=None",
    "Listed": r"Listed: rows\(\[0, 1\]\) gave ndarray; give a dict",
    "OneRow": r"gave 'targets' a ndarray of shape \(8,\), 'weights' a list of shape \(2,\); give",
    "stream": r"(?s)generator: 3 problems.*no len\(\).*no rows\(.*no digest; every.*no encode",
    "NoLength": r"no len\(\), the rows of an epoch; give an object that reads any row by",
}


def test_fields_of_tokens_have_a_number_for_each(decoder: jaxtrain.Experiment) -> None:
    """By `check` too, and before anything is compiled."""
    given = replace(decoder, data=OwnData("Shorter"))
    text = (
        rf"(?s)the train rows of OwnData: 2 problems.*'targets' of a row is \[{SEQ - 1}\], and its "
        rf"'tokens' \[{SEQ}\]; give a number for each token.*'weights' of a row is \[\], and"
    )
    for act in (jaxtrain.check, jaxtrain.train):
        with pytest.raises(ValueError, match=text):
            act(given, "cpu_1")


@pytest.mark.parametrize("kind", REFUSED)
def test_what_it_lacks_is_told_when_it_is_opened(
    kind: str, own: jaxtrain.Experiment, decoder: jaxtrain.Experiment, tmp_path: Path
) -> None:
    """For any model; by `train` before a run directory is there, and by `check`."""
    text = kind in ("NoText", "stream")
    evaluation = jaxtrain.Evaluation(sample=jaxtrain.Sample("a", tokens=2)) if text else None
    for experiment in [decoder] if text else [own, decoder]:
        tried = replace(
            experiment,
            data=OwnData(kind),
            checkpoints=jaxtrain.SavePolicy(every=1),
            evaluation=evaluation,
        )
        mesh = jaxtrain.mesh_from_axes(data=2)
        with pytest.raises(ValueError, match=REFUSED[kind]):
            jaxtrain.train(tried, mesh, run_dir=tmp_path / "run", stream=io.StringIO())
        assert not (tmp_path / "run").exists()
        with pytest.raises(ValueError, match=REFUSED[kind]) as refused:
            jaxtrain.check(tried, mesh)
        assert str(refused.value).count("OwnData.open(") == 1, "not for the held-out rows again"


def test_what_a_run_does_not_ask_for_it_may_lack(
    decoder: jaxtrain.Experiment, tmp_path: Path
) -> None:
    for kind in "Whole", "NoDigest", "NoVocab", "NoText":
        dataset = open_split(replace(decoder, data=OwnData(kind)), "train", tmp_path)
        assert len(dataset) == 64 and dataset.rows(np.arange(3))["tokens"].shape == (3, SEQ)
        assert len(copy.copy(dataset)) == 64
    tried = replace(decoder, steps=1, data=OwnData("NoDigest"), checkpoints=jaxtrain.SavePolicy())
    mesh = jaxtrain.mesh_from_axes(data=2)
    assert jaxtrain.train(tried, mesh, stream=io.StringIO()).steps == 1, "nothing is saved"


@pytest.mark.parametrize("name", ["tokens", "targets"])
@pytest.mark.parametrize("value", [-1, VOCAB, VOCAB + 5])
def test_ids_beyond_the_vocabulary_are_refused(
    name: str, value: int, decoder: jaxtrain.Experiment, tmp_path: Path
) -> None:
    """Where one of the first rows has one when the data is opened, else when it is read."""

    def opened(row: int, value: int, weight: float = 1.0) -> Any:
        beyond = (("row", row), ("name", name), ("value", value), ("weight", weight))
        return open_split(replace(decoder, data=OwnData("", beyond)), "train", tmp_path)

    opened(31, VOCAB - 1), opened(31, 0)
    says = f"row 31 of the data has the id {value} in '{name}', and model.vocab=16 has 0 to 15; "
    says += f"use vocab={value + 1} or more" if value > 0 else "ids count from 0: mend that row"
    with pytest.raises(ValueError, match=says):
        opened(31, value)
    dataset = opened(40, value)
    dataset.rows(np.arange(40))
    with pytest.raises(ValueError, match="row 40"):
        dataset.rows(np.arange(38, 44))
    # A target that counts for nothing may be anything, as -100 is in other trainers.
    with nullcontext() if name == "targets" else pytest.raises(ValueError, match=says):
        opened(31, value, 0.0)


@dataclass(frozen=True)
class NothingHeldOut:
    """It raises `error` for the held-out split, and counts the most rows asked for at once."""

    error: str = ""

    def open(self, split: str, *, seed: int, cache_dir: Path) -> Any:
        if split == "held_out" and self.error:
            raise {"KeyError": KeyError, "FileNotFoundError": FileNotFoundError}[self.error](split)
        return Counted(split)


class Counted(Whole):
    most = 0

    def rows(self, indices: np.ndarray) -> Any:
        Counted.most = max(Counted.most, len(indices))
        return super().rows(indices)

    def __len__(self) -> int:
        return 4096


@pytest.mark.parametrize("error", ["KeyError", "FileNotFoundError"])
def test_held_out_rows_that_are_not_there_are_told_with_all_else(
    error: str, decoder: jaxtrain.Experiment
) -> None:
    """Whatever the user's code raises; not where the data is on another machine."""
    evaluation = jaxtrain.Evaluation(every=4, batches=2)
    e = replace(decoder, data=NothingHeldOut(error), evaluation=evaluation)
    mesh = jaxtrain.mesh_from_axes(data=2)
    said = rf"open\('held_out'\) raised {error}: '?held_out'?; .*or use evaluation=None"
    with pytest.raises(ValueError, match=rf"(?s)2 things.*microbatches.*{said}"):
        jaxtrain.check(replace(e, batch=7, microbatches=3), mesh)
    assert jaxtrain.check(e, mesh, data_here=False).parameters
    assert jaxtrain.check(replace(e, evaluation=None), mesh).parameters


def test_a_check_reads_few_rows(decoder: jaxtrain.Experiment) -> None:
    e = replace(decoder, data=NothingHeldOut(), batch=1024)
    e = replace(e, evaluation=jaxtrain.Evaluation(batches=2, final_batches=4))
    jaxtrain.check(e, jaxtrain.mesh_from_axes(data=2))
    assert Counted.most == 32


def rows_in_turn(split: str, *, seed: int, epoch: int) -> Iterator[np.ndarray]:
    rng = np.random.default_rng((split == "held_out", seed, epoch))
    while True:
        yield rng.integers(0, VOCAB, SEQ + 1)


def test_rows_of_an_iterable_go_on_where_a_run_stopped(
    decoder: jaxtrain.Experiment, tmp_path: Path
) -> None:
    """To the bit, over the end of an epoch and beside an evaluation."""
    data = jaxtrain.data.RowStream(rows_in_turn, "1", seq=SEQ, rows=80, held_out_rows=16)
    evaluation = jaxtrain.Evaluation(every=4, batches=2)
    e = replace(decoder, data=data, batch=8, steps=24, evaluation=evaluation)
    e = replace(e, checkpoints=jaxtrain.SavePolicy(every=100))
    mesh, quiet = jaxtrain.mesh_from_axes(data=2), io.StringIO()
    assert jaxtrain.check(e, mesh).parameters
    whole = jaxtrain.train(e, mesh, stream=quiet)
    jaxtrain.train(e, mesh, steps=19, run_dir=tmp_path / "run", stream=quiet)
    assert "passing over" not in quiet.getvalue()
    rest = jaxtrain.train(e, mesh, run_dir=tmp_path / "run", stream=quiet)
    assert [*map(numbers, rest.history)] == [*map(numbers, whole.history)][19:]
    told = "make('train', seed=0, epoch=1): passing over 72 rows by reading them"
    assert quiet.getvalue().count(told) == 1
    with pytest.raises(ValueError, match=rf"data.make is '{__name__}:.*give trust=\"{__name__}\""):
        jaxtrain.evaluate(tmp_path / "run", cache_dir=tmp_path)
    found = jaxtrain.evaluate(tmp_path / "run", cache_dir=tmp_path, trust=__name__)
    assert found["eval_loss"] == pytest.approx(whole.history[-1]["eval_loss"], rel=1e-6)
    unheld = replace(e, data=replace(data, held_out_rows=0))
    with pytest.raises(ValueError, match="no rows are held out; use held_out_rows="):
        jaxtrain.check(unheld, mesh)


def test_rows_are_passed_over_in_phases_of_long_deadlines(
    decoder: jaxtrain.Experiment, opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the main thread, which an interrupt stops; a step's deadline of seconds would end it."""
    phases, went = Phases(), []

    def go_to(self: StreamedRows, number: int) -> None:
        went.append((number, phases.now.phase, threading.current_thread().name))

    monkeypatch.setattr(StreamedRows, "go_to", go_to)
    data = jaxtrain.data.RowStream(rows_in_turn, "1", seq=SEQ, rows=80)
    session = opened(replace(decoder, data=data, evaluation=None), phases=phases, data=2)
    session.go_back(session.state, 2, session.loader.skips)
    session.go_back(session.state, session.experiment.steps, session.loader.skips)
    expected = [(0, "open", "MainThread"), (16, "restore", "MainThread")]
    assert went == expected, "nothing is passed over behind the last step"


def numbers(line: dict[str, Any]) -> dict[str, Any]:
    return {name: line[name] for name in ("step", "loss", "eval_loss") if name in line}


def test_ids_of_two_tables_are_not_compared(decoder: jaxtrain.Experiment, tmp_path: Path) -> None:
    """A model whose outputs are no words of its inputs has no `vocab` of both."""
    beyond = (("row", 3), ("name", "tokens"), ("value", VOCAB), ("weight", 1.0))
    tried = replace(decoder, data=OwnData("", beyond), model=Tagger(decoder.model))
    assert open_split(tried, "train", tmp_path).rows(np.arange(4))["tokens"].max() == VOCAB
