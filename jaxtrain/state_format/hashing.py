"""Digests of what is stored, by name: who reads it may have other packages than who wrote it.

XXH3-128 of the package xxhash, 18 GB/s on one core; where that is not installed SHA-256 of Python's
own library, 1.2 (experiments/LOG.md). A digest says which it is: SHA-256's begins with the name,
XXH3's is hexadecimals alone. Whoever can write a checkpoint can write its digests: they find
accidents, not forgeries.
"""

from __future__ import annotations

import hashlib
from typing import Any, Protocol

try:
    import xxhash
except ModuleNotFoundError:
    XXH3: Any = None
else:
    XXH3 = xxhash.xxh3_128

SHA256 = "sha256"
SEPARATOR = ":"


class LacksPackage(ImportError):
    """What is to be read needs a package that is not here. It is no damage: a run stops, and passes
    over nothing."""


class Hasher(Protocol):
    """Takes bytes as they come."""

    def update(self, data: Any, /) -> None: ...

    def hexdigest(self) -> str: ...


class Sha256:
    """Its digest begins with its name."""

    def __init__(self, data: bytes) -> None:
        self._hash = hashlib.sha256(data)

    def update(self, data: Any, /) -> None:
        self._hash.update(data)

    def hexdigest(self) -> str:
        return f"{SHA256}{SEPARATOR}{self._hash.hexdigest()}"


def hasher(data: bytes, like: str | None = None) -> Hasher:
    """What begins with `data`. like: a digest that it will be compared with; None: of what is
    written here.

    Raises LacksPackage where it is like one of XXH3, and xxhash is not installed.
    """
    named = None if like is None else like.partition(SEPARATOR)[0]
    if named == SHA256 or (like is None and XXH3 is None):
        return Sha256(data)
    if XXH3 is None:
        raise LacksPackage(
            "the checkpoint has digests of XXH3-128 and cannot be verified without the package "
            "xxhash, which is not installed; pip install xxhash, or go on where it is (a run that "
            f"begins without it has digests of {SHA256}, which are read anywhere)"
        )
    return XXH3(data)
