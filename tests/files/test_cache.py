"""Where what is made of the data is kept: where the user says, at home, or where a user can write
instead; and when it was used."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

import pytest

from jaxtrain.files.cache import ABOUT, cache_directory, mark_used


@pytest.fixture(autouse=True)
def nothing_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("JAXTRAIN_CACHE", "JAXTRAIN_CACHE_GB", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)


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


def test_what_is_said_goes_before_what_is_usual(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """`cache_dir`, then JAXTRAIN_CACHE, then XDG_CACHE_HOME, then the home."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    assert cache_directory() == tmp_path / ".cache" / "jaxtrain"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_directory() == tmp_path / "xdg" / "jaxtrain"
    monkeypatch.setenv("JAXTRAIN_CACHE", "~/shared")
    assert cache_directory() == tmp_path / "shared"
    assert cache_directory(tmp_path / "mine") == tmp_path / "mine"
    for nowhere in (f"{__file__}/below", "~nobody-of-that-name/cache", __file__):
        monkeypatch.setenv("JAXTRAIN_CACHE", nowhere)
        with pytest.raises(ValueError, match=f"JAXTRAIN_CACHE='{nowhere}' cannot be used"):
            cache_directory()
    assert caplog.messages == []
    monkeypatch.setenv("JAXTRAIN_CACHE", "gs://bucket/cache")
    with pytest.raises(ValueError, match="JAXTRAIN_CACHE"):
        cache_directory()


def test_an_unusable_xdg_directory_is_told_as_a_home_is(
    tmp_path: Path,
    temporary: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "xdg").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_directory().parent == temporary
    assert f"{tmp_path / 'xdg' / 'jaxtrain'} cannot be used" in caplog.messages[0]


@pytest.mark.parametrize("limit", ["much", "-1", "nan"])
def test_a_limit_that_is_none_is_refused_before_anything_is_made(
    limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAXTRAIN_CACHE_GB", limit)
    with pytest.raises(ValueError, match=f"JAXTRAIN_CACHE_GB='{limit}'.*use 100, or inf for"):
        cache_directory()


def test_use_is_marked_and_what_is_read_only_stays(tmp_path: Path) -> None:
    entry, note = tmp_path / "a.tokens", tmp_path / f"a.tokens{ABOUT}"
    entry.write_text("")
    os.utime(entry, (0, 0))
    mark_used(entry)
    assert entry.stat().st_mtime > 1e9 and not note.exists()
    mark_used(entry, "books")
    mark_used(entry, "other books")
    assert note.read_text() == "books"
    mark_used(tmp_path / "absent" / "a.tokens", "books")
    assert not (tmp_path / "absent").exists()


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
    assert f"{tmp_path}/home/.cache/jaxtrain cannot be used" in caplog.messages[0]
    assert str(path) in caplog.messages[0] and "set JAXTRAIN_CACHE" in caplog.messages[0]


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


def test_a_process_is_told_once_and_keeps_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where the usual temporary one is another's."""
    home = tmp_path / "home"
    home.write_text("no directory")
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    monkeypatch.delenv("JAXTRAIN_CACHE", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / f"jaxtrain-cache-{os.getuid()}").write_text("another's")
    first = cache_directory()
    assert cache_directory() == first and first.is_dir()
    assert len([r for r in caplog.records if "cannot be used" in r.getMessage()]) == 1
