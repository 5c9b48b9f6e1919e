"""Addresses of object stores, which are no paths: `gs://bucket` would be a folder named `gs:`."""

from __future__ import annotations

import re
from pathlib import Path

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")
"""A path made of an address has one slash left of two."""


def store_violations(name: str, given: object) -> list[str]:
    """What is wrong with a path, or a tuple of them, that a field or an argument was given."""
    if isinstance(given, tuple):
        return [violation for each in given for violation in store_violations(name, each)]
    found = _SCHEME.match(str(given)) if isinstance(given, str | Path) else None
    if found is None:
        return []
    scheme = found[1]
    if scheme == "file":
        return [f"{name}={str(given)!r} is an address; give the path alone, without file://"]
    return [
        f"{name}={str(given)!r} is an address, and {scheme}:// is not read or written yet: it "
        f"would be taken for a local folder named '{scheme}:'; give a local path, or one under "
        "which the store is mounted"
    ]


def local_path(name: str, given: str | Path) -> Path:
    """The path that the argument `name` was given. Raises ValueError for the address of a store."""
    if violations := store_violations(name, given):
        raise ValueError(violations[0])
    return Path(given)
