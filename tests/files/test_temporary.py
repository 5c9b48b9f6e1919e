"""Folders of processes that were killed do not pile up."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from jaxtrain.files.temporary import temporary_folder


def test_folders_of_killed_processes_are_removed_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    stay = [f"jaxtrain-a-{os.getppid()}-x", f"jaxtrain-b-{ended.pid}-x", "jaxtrain-a-me", "a-1-x"]
    gone = [f"jaxtrain-a-{ended.pid}-x", f"jaxtrain-a-{10**30}-x"]
    for name in (*stay, *gone):
        (tmp_path / name / "within").mkdir(parents=True)
    with temporary_folder("a") as folder, temporary_folder("a") as another:
        names = {path.name for path in tmp_path.iterdir()}
        assert names == {*stay, folder.name, another.name} and folder != another
        assert folder.name.startswith(f"jaxtrain-a-{os.getpid()}-")
    assert {path.name for path in tmp_path.iterdir()} == {*stay}
