"""Folders of processes that were killed do not pile up."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from jaxtrain.files.temporary import LOCK, temporary_folder

HOLDS = """
import os, signal, sys, tempfile
from jaxtrain.files.temporary import temporary_folder
tempfile.tempdir = sys.argv[1]
with temporary_folder("a") as folder:
    print(folder.name, flush=True)
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_folders_of_killed_processes_are_removed_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process of another container may have any number: the lock tells who lives."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    command = [sys.executable, "-c", HOLDS, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    other = subprocess.Popen(command, **pipes)  # type: ignore[call-overload]
    held = other.stdout.readline().strip()
    stay = {"jaxtrain-a-without", "jaxtrain-b-x", "a-x"}
    for name in stay:
        (tmp_path / name / "within").mkdir(parents=True)
    (tmp_path / "jaxtrain-b-x" / LOCK).touch()
    with temporary_folder("a") as folder, temporary_folder("a") as another:
        assert folder != another and folder.is_dir() and another.is_dir()
        assert {path.name for path in tmp_path.iterdir()} - {folder.name, another.name} == {
            *stay,
            held,
        }
    other.communicate("")
    assert (tmp_path / held).is_dir(), "nothing of its own has removed it"
    with temporary_folder("a"):
        assert not (tmp_path / held).exists()
    assert {path.name for path in tmp_path.iterdir()} == stay
