"""The manifest of a step: its leaves, its metadata, and where each chunk is with which digest.

    STEP/state/manifest.json          the first line holds the digest of the rest
    STEP/state/{step}.{process}.pack  the chunks; a pack of an earlier step is a hard link to it

Nothing here imports Orbax, so that a fresh run learns cheaply that there is nothing to resume.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from jaxtrain.checkpoint.chunks import Box, Chunk
from jaxtrain.checkpoint.leaves import LeafRecord
from jaxtrain.checkpoint.pack import Earlier

ITEM = "state"
"""The item of Orbax's that holds everything of ours; a directory of a step."""
NAME = "manifest.json"
FORMAT = 2
HEAD = f"jaxtrain checkpoint {FORMAT}"


class Manifest(NamedTuple):
    """directory: where the packs are. sizes: bytes of each pack."""

    directory: Path
    leaves: dict[str, LeafRecord]
    metadata: dict[str, Any]
    chunks: dict[str, list[Chunk]]
    sizes: dict[str, int]

    def earlier(self) -> Earlier:
        """As a later save looks for what it need not write."""
        listed = (chunk for chunks in self.chunks.values() for chunk in chunks)
        return Earlier(self.directory, {(c.leaf, c.box): c for c in listed}, self.sizes)


def write_manifest(
    directory: Path,
    leaves: dict[str, LeafRecord],
    metadata: dict[str, Any],
    chunks: Iterable[Chunk],
) -> None:
    """Raises OSError, and ValueError where the chunks are not all of the leaves."""
    by_leaf: dict[str, list[Any]] = {}
    held: dict[str, int] = dict.fromkeys(leaves, 0)
    packs = set()
    for c in chunks:
        row = [*c.box, c.digest, c.pack, c.offset, c.size]
        by_leaf.setdefault(c.leaf, []).append(row)
        held[c.leaf] += c.size
        packs.add(c.pack)
    if lacking := [name for name, leaf in leaves.items() if held[name] != leaf.stored_bytes]:
        raise ValueError(f"no process wrote all of {', '.join(lacking)}")
    body = {
        "leaves": leaves,
        "metadata": metadata,
        "chunks": by_leaf,
        "packs": {pack: (directory / pack).stat().st_size for pack in sorted(packs)},
    }
    text = json.dumps(body).encode()
    write_synced(directory / NAME, f"{HEAD} {_digest(text)}\n".encode() + text)


def read_manifest(step: Path) -> Manifest:
    """The manifest of a step's directory, verified. Raises ValueError that says what is wrong."""
    directory = step / ITEM
    try:
        head, _, text = (directory / NAME).read_bytes().partition(b"\n")
    except FileNotFoundError:
        if (step / "metadata" / "metadata").is_file():
            raise ValueError(f"format 1, of an older version; this one reads {FORMAT}") from None
        raise ValueError(f"{NAME} is missing") from None
    except OSError as error:
        raise ValueError(f"{NAME} cannot be read: {error}") from error
    if head != f"{HEAD} {_digest(text)}".encode():
        raise ValueError(f"{NAME} is not as it was written: its digest differs")
    body = json.loads(text)
    leaves = {k: LeafRecord(tuple(s), *rest) for k, (s, *rest) in body["leaves"].items()}
    chunks = {
        leaf: [Chunk(leaf, Box(tuple(a), tuple(n)), *rest) for a, n, *rest in rows]
        for leaf, rows in body["chunks"].items()
    }
    return Manifest(directory, leaves, body["metadata"], chunks, body["packs"])


def write_part(directory: Path, process: int, chunks: list[Chunk]) -> None:
    """What one process wrote, for the manifest that is made when all have."""
    write_synced(_part(directory, process), json.dumps(chunks).encode())


def take_parts(directory: Path, processes: int) -> list[Chunk]:
    """What all of them wrote; their files are removed."""
    found = []
    for path in (_part(directory, process) for process in range(processes)):
        for leaf, (start, shape), *rest in json.loads(path.read_bytes()):
            found.append(Chunk(leaf, Box(tuple(start), tuple(shape)), *rest))
        path.unlink()
    return found


def write_synced(path: Path, data: bytes) -> None:
    """On the disk, with its name, when this returns."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _part(directory: Path, process: int) -> Path:
    return directory / f"{process}.part.json"


def _digest(data: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(data)
