"""Finds the directory in which tokenised corpora and packing indexes are kept between runs."""

from __future__ import annotations

import logging
import os
import stat
import tempfile
from pathlib import Path

from jaxtrain.files.stores import local_path

log = logging.getLogger(__name__)

CACHE_DIR = Path("~/.cache/jaxtrain")
"""May be deleted at any time."""


def cache_directory(chosen: str | Path | None = None) -> Path:
    """Returns the chosen directory. None: `CACHE_DIR`; if no home can be written, a directory of
    the user's among the system's temporary ones, with a warning."""
    if chosen is not None:
        return local_path("cache_dir", chosen).expanduser()
    try:
        home = CACHE_DIR.expanduser()
        existing = next(folder for folder in (home, *home.parents) if folder.exists())
        if existing.is_dir() and os.access(existing, os.W_OK | os.X_OK):
            return home
        reason = f"{existing} cannot be written"
    except RuntimeError as error:  # no home is known
        reason = str(error)
    path = _own_temporary()
    log.warning(
        "%s cannot be used (%s); what is made of the data is kept in %s, as long as that lasts: "
        "set HOME, or jaxtrain.train(cache_dir=...)",
        CACHE_DIR,
        reason,
        path,
    )
    return path


def _own_temporary() -> Path:
    """Returns a directory that only this user can write: an earlier run's, if there is one."""
    path = Path(tempfile.gettempdir()) / f"jaxtrain-cache-{os.getuid()}"
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        status = path.lstat()
    except OSError:
        return Path(tempfile.mkdtemp(prefix="jaxtrain-cache-"))
    private = status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if stat.S_ISDIR(status.st_mode) and private:
        return path
    return Path(tempfile.mkdtemp(prefix="jaxtrain-cache-"))
