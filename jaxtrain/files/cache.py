"""Finds the directory in which tokenised corpora, packing indexes, trained tokenizers and files of
object stores are kept between runs, and notes when one of them is used."""

from __future__ import annotations

import logging
import math
import os
import stat
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

from jaxtrain.files.stores import local_path

log = logging.getLogger(__name__)

CACHE = "JAXTRAIN_CACHE"
"""Environment variable that names the directory."""
LIMIT = "JAXTRAIN_CACHE_GB"
"""Environment variable: GB that it may take (see jaxtrain/files/cache_entries.py)."""
DEFAULT_LIMIT_GB = 100.0
ABOUT = ".about"
"""Suffix of a text that says what an entry was made of."""
ABOUT_LENGTH = 300
USED = ".used"
"""Suffix of an empty file: an entry of another user was last used when that was changed."""


def cache_directory(chosen: str | Path | None = None) -> Path:
    """Returns the chosen directory. None: that of JAXTRAIN_CACHE, or else `jaxtrain` in that of
    XDG_CACHE_HOME, or else `~/.cache/jaxtrain`; if the last two cannot be written, a directory of
    the user's among the system's temporary ones, with a warning. Raises ValueError for a limit that
    is no number."""
    limit_gb()
    if chosen is not None:
        return _chosen("cache_dir", chosen)
    if own := os.environ.get(CACHE):
        return _chosen(CACHE, own)
    base = os.environ.get("XDG_CACHE_HOME", "")
    # A path that is not absolute is to be ignored, by the specification of XDG_CACHE_HOME.
    usual = (Path(base) if os.path.isabs(base) else Path("~/.cache")) / "jaxtrain"
    try:
        usual = usual.expanduser()
        if not (reason := _unusable(usual)):
            return usual
    except RuntimeError as error:  # no home is known
        reason = str(error)
    path = _own_temporary()
    _warn(usual, reason, path)
    return path


@cache
def _warn(usual: Path, reason: str, path: Path) -> None:
    """Says once where things are kept."""
    log.warning(
        "%s cannot be used (%s); what is made of the data is kept in %s, as long as that lasts: "
        "set %s, or jaxtrain.train(cache_dir=...)",
        usual,
        reason,
        path,
        CACHE,
    )


def _chosen(name: str, path: str | Path) -> Path:
    """Returns a directory that a user names; one that is there may be read-only. Raises ValueError
    where it is no directory, or none that can be made."""
    folder = local_path(name, path)
    try:
        folder = folder.expanduser()
        reason = "" if folder.is_dir() else _unusable(folder)
    except (RuntimeError, OSError) as error:
        reason = str(error)
    if reason:
        raise ValueError(f"{name}={str(path)!r} cannot be used ({reason}); name another, or none")
    return folder


def _unusable(folder: Path) -> str:
    """Returns why nothing can be written into a directory, which need not be there yet; "" if it
    can be."""
    try:
        existing = next(path for path in (folder, *folder.parents) if path.exists())
    except OSError as error:
        return str(error)
    if not existing.is_dir():
        return f"{existing} is no directory"
    return "" if os.access(existing, os.W_OK | os.X_OK) else f"{existing} cannot be written"


def _own_temporary() -> Path:
    """Returns a directory that only this user can write: an earlier run's, if there is one."""
    path = Path(tempfile.gettempdir()) / f"jaxtrain-cache-{os.getuid()}"
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        status = path.lstat()
    except OSError:
        return _new_temporary(tempfile.gettempdir())
    private = status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if stat.S_ISDIR(status.st_mode) and private:
        return path
    return _new_temporary(tempfile.gettempdir())


@cache  # one for a process
def _new_temporary(folder: str) -> Path:
    return Path(tempfile.mkdtemp(prefix="jaxtrain-cache-", dir=folder))


def mark_used(path: Path, about: str = "") -> None:
    """Notes that an entry is used now, and what it was made of, where the directory can be
    written."""
    with suppress(OSError):
        try:
            os.utime(path)
        except PermissionError:  # another user's
            path.with_name(path.name + USED).touch()
        note = path.with_name(path.name + ABOUT)
        if about and not note.exists():
            note.write_text(about[:ABOUT_LENGTH], encoding="utf-8")


def limit_gb() -> float:
    """Returns the limit. Raises ValueError for one that is no number of GB."""
    text = os.environ.get(LIMIT, "")
    try:
        limit = float(text) if text else DEFAULT_LIMIT_GB
    except ValueError:
        limit = math.nan
    if not limit >= 0:
        raise ValueError(
            f"{LIMIT}={text!r} must be a number of GB of 0 or more; use 100, or inf for no limit"
        )
    return limit
