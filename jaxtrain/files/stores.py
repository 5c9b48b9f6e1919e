"""Refuses addresses of object stores: as a path, `gs://bucket` would be a folder named `gs:`."""

from __future__ import annotations

import re
from pathlib import Path

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")
"""`Path` keeps one of an address's two slashes."""


def store_violations(name: str, path: object) -> list[str]:
    """Returns violations if a field's or argument's path, or a tuple of paths, has an address."""
    if isinstance(path, tuple):
        return [violation for part in path for violation in store_violations(name, part)]
    match = _SCHEME.match(str(path)) if isinstance(path, str | Path) else None
    if match is None:
        return []
    scheme = match[1]
    if scheme == "file":
        return [f"{name}={str(path)!r} is an address; give the path alone, without file://"]
    return [
        f"{name}={str(path)!r} is an address, and {scheme}:// is not read or written yet: it "
        f"would be taken for a local folder named '{scheme}:'; give a local path, or one under "
        "which the store is mounted"
    ]


def local_path(name: str, path: str | Path) -> Path:
    """Returns the path of the argument `name`. Raises ValueError for the address of a store."""
    if violations := store_violations(name, path):
        raise ValueError(violations[0])
    return Path(path)
