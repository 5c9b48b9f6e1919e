"""`jaxtrain new`: what it writes runs, and nothing is written over."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

import jaxtrain
from jaxtrain import cli


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_what_it_writes_is_checked_and_trains_a_step(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["new", "mine"]) == 0
    commands = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    assert [words[:2] for words in commands] == [["jaxtrain", "check"], ["jaxtrain", "train"]]
    check, train = (words[1:] for words in commands)
    assert cli.main(check) == 0
    assert "fsdp=8" in capsys.readouterr().out
    assert cli.main([*train, "--steps", "1", *small()]) == 0
    assert (folder / "runs/mine/metrics.jsonl").is_file()
    named = (folder / "mine.py").read_text().splitlines()
    assert shlex.split(named[2]) == ["jaxtrain", *train]


def small() -> list[str]:
    """The model made smaller and without the corpus's text, for the test's time."""
    fields = ["model.layers=1", "model.embed=32", "evaluation=None"]
    fields += ["data=BigramChain(vocab=257, seq=32)"]
    return [word for field in fields for word in ("--set", field)]


@pytest.mark.parametrize("taken", ["mine.py", "mine.toml"])
@pytest.mark.parametrize("link", [False, True])
def test_a_file_that_exists_stays(
    taken: str, link: bool, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / taken).symlink_to("nowhere") if link else (folder / taken).write_text("own")
    assert cli.main(["new", "mine"]) == 2
    assert f"{taken} exists; give another name" in capsys.readouterr().err
    assert [path.name for path in folder.iterdir()] == [taken]
    assert link or (folder / taken).read_text() == "own"


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("my-model", "NAME='my-model' must be letters, digits and _"),
        ("", "NAME='' must be letters"),
        ("mine.py", "NAME='mine.py' must be letters"),
        ("gone/mine", "gone is not a directory; make it first"),
    ],
)
def test_a_name_that_is_none_is_refused(
    name: str, told: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["new", name]) == 2
    assert told in capsys.readouterr().err
    assert list(folder.iterdir()) == []


def test_without_a_mesh_check_is_of_one_device(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["new", "mine"]) == 0
    assert cli.main(["check", "mine.py"]) == 0
    assert "one device" in capsys.readouterr().out
    assert jaxtrain.load_mesh("mine.toml").devices == 8
