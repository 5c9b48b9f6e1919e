"""Digests of stored data by name, since a reader may have other packages than the writer.

XXH3-128 of the package xxhash, 18 GB/s on one core; where that is not installed SHA-256 of Python's
own library, 1.2 (experiments/LOG.md). A SHA-256 digest begins with its name, an XXH3 digest is
hexadecimal only. Digests detect accidents, not forgeries: a writer of a checkpoint can write its
digests.
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
    """Reading needs a package that is not installed. The checkpoint is not damaged, so the run
    stops instead of passing over it."""

    refusal = True


class Hasher(Protocol):
    """A running hash: `update` with bytes, then `hexdigest`."""

    def update(self, data: Any, /) -> None: ...

    def hexdigest(self) -> str: ...


class Sha256:
    """SHA-256 with its name in front of the digest."""

    def __init__(self, data: bytes) -> None:
        self._hash = hashlib.sha256(data)

    def update(self, data: Any, /) -> None:
        self._hash.update(data)

    def hexdigest(self) -> str:
        return f"{SHA256}{SEPARATOR}{self._hash.hexdigest()}"


def hasher(data: bytes, like: str | None = None) -> Hasher:
    """Returns a hasher that has read `data`. like: a digest that it will be compared with, whose
    algorithm it uses; None for the algorithm of new digests.

    Raises LacksPackage where `like` is of XXH3, and xxhash is not installed.
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
