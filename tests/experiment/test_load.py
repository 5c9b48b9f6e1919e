"""Experiment files, loaded as scripts are."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from jaxtrain.experiment import load_experiment

FILE = """
import jaxtrain
from jaxtrain.data import BigramChain
import {module} as beside

def experiment():
    import {module}_later
    return jaxtrain.Experiment(
        model=beside.model, data=BigramChain(16, 8), optimizer=jaxtrain.SGD({module}_later.RATE),
        steps=1, batch=8,
    )
"""


def test_a_file_imports_what_is_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From any working directory, at its top and later; what is installed comes first."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "own_parts.py").write_text("def model(rngs):\n    return None\n")
    (folder / "own_parts_later.py").write_text("RATE = 0.25\n")
    (folder / "json.py").write_text("raise ImportError('not the library')\n")
    (folder / "lab.py").write_text(FILE.format(module="own_parts"))
    experiment = load_experiment("mine/lab.py")
    assert experiment.model.__module__ == "own_parts"
    assert experiment.optimizer.learning_rate == 0.25
    load_experiment("mine/lab.py")
    assert sys.path.count(str(folder)) == 1 and sys.path[-1] == str(folder)
    monkeypatch.delitem(sys.modules, "json")
    import json

    assert json.dumps([1]) == "[1]"


def test_a_file_beside_another_experiment_is_not_taken_for_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both of one name, in one process; a file that is not imported is nobody's matter."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in "first", "second", "third":
        folder = tmp_path / name
        folder.mkdir()
        (folder / "common_parts.py").write_text(f"def model(rngs):\n    return {name!r}\n")
        (folder / "common_parts_later.py").write_text("RATE = 0.25\n")
        text = FILE.format(module="common_parts")
        if name == "third":
            text = text.replace("import common_parts as beside", "def beside(rngs): pass")
            text = text.replace("import common_parts_later", "pass").replace(
                "beside.model", "beside"
            )
            text = text.replace("common_parts_later.RATE", "0.5")
        (folder / "lab.py").write_text(text)
    assert load_experiment(tmp_path / "first" / "lab.py").model(None) == "first"
    with pytest.raises(ValueError, match=r"imports common_parts and means .*second.*first"):
        load_experiment(tmp_path / "second" / "lab.py")
    assert load_experiment(tmp_path / "third" / "lab.py").optimizer.learning_rate == 0.5
    assert load_experiment(tmp_path / "first" / "lab.py").model(None) == "first"
