"""Where what is made of the data is kept: at home, or where a user can write instead."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

import pytest

from jaxtrain.files.cache import cache_directory


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_a_home_that_can_be_written_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_directory() == tmp_path / ".cache" / "jaxtrain"
    assert list(tmp_path.iterdir()) == [] and caplog.messages == [], "it may not be needed"
    assert cache_directory("~/mine") == tmp_path / "mine"


def test_else_a_directory_of_the_users_among_the_temporary_ones(
    tmp_path: Path,
    temporary: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The same at every start, told, and written by nobody else."""
    (tmp_path / "home").write_text("")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    path = cache_directory()
    assert path == cache_directory() and path.parent == temporary
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert "~/.cache/jaxtrain cannot be used" in caplog.messages[0]
    assert str(path) in caplog.messages[0] and "set HOME" in caplog.messages[0]


@pytest.mark.parametrize("kind", ["writable by others", "a link", "a file", "of another user"])
def test_what_another_may_have_put_there_is_not_taken(
    kind: str, tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "home").write_text("")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    usual = temporary / f"jaxtrain-cache-{os.getuid()}"
    if kind == "a link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        usual.symlink_to(tmp_path / "elsewhere")
    elif kind == "a file":
        usual.write_text("")
    else:
        usual.mkdir(mode=0o700)
    if kind == "writable by others":
        usual.chmod(0o777)
    if kind == "of another user":
        user = os.getuid()
        monkeypatch.setattr(os, "getuid", iter([user, *[user + 1] * 9]).__next__)
    path = cache_directory()
    assert path != usual and path.parent == temporary and path.is_dir() and not path.is_symlink()
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
