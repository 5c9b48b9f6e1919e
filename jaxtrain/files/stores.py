"""Addresses of object stores. Where a path is needed they are refused: `gs://bucket` would be a
folder named `gs:`."""

from __future__ import annotations

import os
import re
from pathlib import Path

PACKAGES = {"gs": "gcsfs", "s3": "s3fs"}
"""Scheme of an address -> the package that reaches it, by fsspec."""
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")
"""`Path` keeps one of an address's two slashes."""


def scheme_of(path: object) -> str | None:
    """Returns the scheme of an address; None for a path."""
    match = _SCHEME.match(str(path)) if isinstance(path, str | os.PathLike) else None
    return None if match is None else match[1].lower()


def is_address(path: object) -> bool:
    """True for an address in a store that is read and written here."""
    return scheme_of(path) in PACKAGES


def store_violations(name: str, path: object) -> list[str]:
    """Returns violations if a field's or argument's path, or a tuple of paths, has an address."""
    if isinstance(path, tuple):
        return [violation for part in path for violation in store_violations(name, part)]
    scheme = scheme_of(path)
    if scheme is None:
        return []
    if scheme == "file":
        return [f"{name}={str(path)!r} is an address; give the path alone, without file://"]
    return [
        f"{name}={str(path)!r} is an address, and {scheme}:// is not read or written here: it "
        f"would be taken for a local folder named '{scheme}:'; give a local path, or one under "
        "which the store is mounted"
    ]


def address_violations(name: str, path: object) -> list[str]:
    """Returns violations of a path that may be an address with a scheme of PACKAGES."""
    violations = [] if is_address(path) else store_violations(name, path)
    ways = " or ".join(f"{scheme}://BUCKET/NAME" for scheme in PACKAGES)
    return [f"{violation}, or an address, {ways}" for violation in violations]


def local_path(name: str, path: str | Path) -> Path:
    """Returns the path of the argument `name`. Raises ValueError for the address of a store."""
    if violations := store_violations(name, path):
        raise ValueError(violations[0])
    return Path(path)
