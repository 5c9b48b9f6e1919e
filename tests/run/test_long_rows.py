"""Rows longer than those that the starting weights were trained on are told of."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest

import jaxtrain
from jaxtrain import FineTuning, FromHuggingFace, FromRun
from jaxtrain.session.notes import starting
from tests.tiny import SEQ


def declared(path: Path, number: object) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"max_position_embeddings": number}))


@pytest.mark.parametrize("number", [SEQ - 1, SEQ, None, "many"])
def test_a_note_where_rows_are_longer(own, tmp_path: Path, number: object) -> None:
    declared(tmp_path / "folder" / "config.json", number)
    declared(tmp_path / "run" / "positions.json", number)
    for start in (FromHuggingFace(tmp_path / "folder"), FromRun(tmp_path / "run")):
        notes = starting(replace(own, fine_tuning=FineTuning(start)))
        assert len(notes) == (number == SEQ - 1)
        for note in notes:
            assert f"data.seq={SEQ} is longer than the max_position_embeddings={SEQ - 1}" in note
            assert note.endswith(f"use seq={SEQ - 1} or less")
    assert starting(own) == starting(replace(own, fine_tuning=FineTuning())) == []


def test_check_and_train_say_so(own, tmp_path: Path) -> None:
    saved = replace(own, steps=1, checkpoints=jaxtrain.SavePolicy(every=1))
    jaxtrain.train(saved, "cpu_1", run_dir=tmp_path / "run", stream=io.StringIO())
    declared(tmp_path / "run" / "positions.json", 4)
    tuned, told = replace(own, steps=1, fine_tuning=FineTuning(FromRun(tmp_path / "run"))), ""
    assert "note: data.seq=8 is longer than" in jaxtrain.check(tuned, "cpu_1").summary()
    told = io.StringIO()
    jaxtrain.train(tuned, "cpu_1", stream=told)
    assert "NOTE data.seq=8 is longer than the max_position_embeddings=4" in told.getvalue()
