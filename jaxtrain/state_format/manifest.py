"""The manifest of a step: number, leaves and metadata, and the location and digest of each chunk.

    STEP/state/manifest.json          the first line holds the digest of the rest
    STEP/state/{step}.{process}*.pack the chunks; a pack of an earlier step is a hard link to it

Nothing here imports Orbax, so that a fresh run can check for checkpoints quickly.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxtrain.files.folder import plain_name
from jaxtrain.files.json_text import parse_json
from jaxtrain.files.store import (
    AnyPath,
    is_local,
    put,
    read_named,
    remove_file,
    required_size,
    size_of,
)
from jaxtrain.state_format.chunks import Box, Chunk, covers_once, digest
from jaxtrain.state_format.hashing import hasher
from jaxtrain.state_format.leaves import LeafRecord, records_from_json
from jaxtrain.state_format.pack import Earlier

ITEM = "state"
"""Name of our item in Orbax, a directory within a step."""
NAME = "manifest.json"
FAILED = "failed"
"""File instead of a manifest, with the reasons of a failed save. Such a step is removed."""
FORMAT = 2
HEAD = f"jaxtrain checkpoint {FORMAT}"
MALFORMED = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""Exceptions of reading JSON in another format."""
STEP = "step"
"""Name of the leaf with the number of finished steps, if there is one, and of a metadata key."""
Foreign = Callable[[dict[str, Any]], list[str]]
"""Returns reasons why a step with that metadata is not of a run."""


class Manifest(NamedTuple):
    """step: its number when it was saved; None in an older format. directory: of the packs. sizes:
    bytes of each pack."""

    step: int | None
    directory: AnyPath
    leaves: dict[str, LeafRecord]
    metadata: dict[str, Any]
    chunks: dict[str, list[Chunk]]
    sizes: dict[str, int]

    @property
    def digest(self) -> str:
        """Names the whole state: a digest of all chunks."""
        listed = (chunk for chunks in self.chunks.values() for chunk in chunks)
        texts = sorted(repr((c.leaf, c.box, c.digest)) for c in listed)
        return sha256("".join(texts).encode()).hexdigest()

    def earlier(self) -> Earlier:
        """Returns the chunks by leaf and box, for a later save that can share them."""
        listed = (chunk for chunks in self.chunks.values() for chunk in chunks)
        return Earlier(self.directory, {(c.leaf, c.box): c for c in listed}, self.sizes)


def write_manifest(
    directory: AnyPath,
    step: int,
    leaves: dict[str, LeafRecord],
    metadata: dict[str, Any],
    chunks: Iterable[Chunk],
) -> None:
    """Writes a step's manifest. Raises OSError, and ValueError where the chunks do not cover the
    leaves."""
    by_leaf: dict[str, list[Chunk]] = {}
    for c in chunks:
        by_leaf.setdefault(c.leaf, []).append(c)
    refuse_gaps(leaves, by_leaf)
    packs = sorted({c.pack for leaf_chunks in by_leaf.values() for c in leaf_chunks})
    body = {
        "step": step,
        "leaves": leaves,
        "metadata": metadata,
        "chunks": {
            k: [[*c.box, *c[2:]] for c in leaf_chunks] for k, leaf_chunks in by_leaf.items()
        },
        "packs": {pack: required_size(directory / pack) for pack in packs},
    }
    text = json.dumps(body).encode()
    put(directory / NAME, f"{HEAD} {text_digest(text)}\n".encode() + text)


def read_manifest(step: AnyPath) -> Manifest:
    """Returns the manifest of a step's directory, verified. Its content is not trusted, since the
    directory's author can write a digest too. Raises ValueError with the reason, LacksPackage where
    the digest cannot be computed here, and OSError for a store that does not answer: a disk that
    does not has lost the file."""
    directory = step / ITEM
    for path in (step, directory):
        if isinstance(path, Path) and path.is_symlink():
            raise ValueError(
                f"{path} is a symbolic link to {os.readlink(path)}; it is not followed"
            )
    try:
        head, _, text = read_named(directory, NAME).partition("\n")
    except FileNotFoundError:
        if size_of(step / "metadata" / "metadata") is not None:
            raise ValueError(f"format 1, of an older version; this one reads {FORMAT}") from None
        if (problem := read_failure(step)) is not None:
            raise ValueError(f"it was not written whole: {problem}") from None
        raise ValueError(f"{NAME} is missing") from None
    except OSError as error:
        if not is_local(step):
            raise
        raise ValueError(f"{NAME} cannot be read: {error}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{NAME} is not as it was written: {error}") from error
    stored_digest = head.removeprefix(f"{HEAD} ")
    if stored_digest == head or stored_digest != text_digest(text.encode(), stored_digest):
        raise ValueError(f"{NAME} is not as it was written: its digest differs")
    try:
        return _from_json(directory, parse_json(text))
    except MALFORMED as error:
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise ValueError(f"{NAME} is no manifest: {kind}{error}") from error


def read_failure(step: AnyPath) -> str | None:
    """Returns the failure of a step whose save failed, None if there is none. Raises ValueError
    where it cannot be read, and OSError for a store that does not answer."""
    try:
        return read_named(step / ITEM, FAILED)
    except FileNotFoundError:
        return None
    except OSError as error:
        if not is_local(step):
            raise
        raise ValueError(f"{FAILED} cannot be read: {error}") from error


def _from_json(directory: AnyPath, body: Mapping[str, Any]) -> Manifest:
    """Returns a manifest from JSON. Raises one of MALFORMED where `write_manifest` cannot have
    written it."""
    leaves = records_from_json(body["leaves"])
    chunks = {
        leaf: [Chunk.from_json([leaf, row[:2], *row[2:]]) for row in rows]
        for leaf, rows in body["chunks"].items()
    }
    sizes, metadata = body["packs"], body["metadata"]
    packs = {c.pack for leaf_chunks in chunks.values() for c in leaf_chunks} | sizes.keys()
    if paths := sorted(pack for pack in packs if not plain_name(pack)):
        raise ValueError(f"it names {paths[0]!r}, which is no file of its directory")
    if not isinstance(metadata, dict):
        raise ValueError(f"its metadata is a {type(metadata).__name__}, and no object")
    if wrong := [size for size in sizes.values() if not isinstance(size, int)]:
        raise ValueError(f"the size of a pack is {wrong[0]!r}")
    refuse_gaps(leaves, chunks)
    for c in (c for leaf_chunks in chunks.values() for c in leaf_chunks):
        if c.offset + c.size > sizes[c.pack]:
            raise ValueError(f"a chunk of {c.leaf} ends beyond its pack {c.pack}")
    return Manifest(body.get("step"), directory, leaves, metadata, chunks, sizes)


def other_steps(manifest: Manifest, step: int) -> list[str]:
    """Returns a line for each place of a manifest with another number than `step`: its own number,
    the metadata, and the state's count of steps, by its digest and without reading it."""
    numbers = {"its manifest": manifest.step, "its metadata": manifest.metadata.get(STEP)}
    conflicts = [
        f"{place} says step {n}" for place, n in numbers.items() if n is not None and n != step
    ]
    leaf = manifest.leaves.get(STEP)
    if leaf is not None and _counts_steps(leaf):
        (chunk,) = manifest.chunks[STEP]
        fits = step <= np.iinfo(leaf.dtype).max
        if not fits or chunk.digest != _digest_of_step(step, leaf.dtype, chunk.digest):
            conflicts.append(f"its state's count of steps is not {step}")
    return conflicts


def _digest_of_step(step: int, dtype: str, like: str) -> str:
    return digest(STEP, Box((), ()), np.asarray(step, dtype), like)


def refuse_other_step(step: int, metadata: Mapping[str, Any], leaves: Mapping[str, Any]) -> None:
    """Raises ValueError where metadata or state to be saved as `step` have another number: the
    saved step would look damaged."""
    number = metadata.get(STEP, step)
    if number != step:
        raise ValueError(
            f"metadata['{STEP}'] is {number!r}, saved as step {step}; they are the same"
        )
    leaf = leaves.get(STEP)
    if leaf is not None and _counts_steps(leaf) and int(leaf) != step:
        raise ValueError(
            f"the state's leaf '{STEP}' is {int(leaf)}, saved as step {step}; it counts the steps "
            "done: save it as that step, or call what counts something else by another name"
        )


def _counts_steps(leaf: LeafRecord | jax.Array) -> bool:
    """True if a leaf named `step` can be the count of steps."""
    return tuple(leaf.shape) == () and str(leaf.dtype) in ("int32", "int64", "uint32", "uint64")


def refuse_gaps(leaves: Mapping[str, LeafRecord], chunks: Mapping[str, list[Chunk]]) -> None:
    """Raises ValueError where chunks do not cover each element of each leaf once, or have no leaf;
    TypeError where a field has a wrong type."""
    if unknown := sorted(chunks.keys() - leaves.keys()):
        raise ValueError(f"there are chunks of {unknown[0]!r}, which is no leaf")
    for name, leaf in leaves.items():
        leaf_chunks = chunks.get(name, [])
        shape, dtype = leaf.stored
        for c in leaf_chunks:
            _refuse_misfit(c, shape, dtype.itemsize)
        if len({c.box for c in leaf_chunks}) != len(leaf_chunks):
            raise ValueError(f"two chunks are the same part of {name}")
        if sum(c.size for c in leaf_chunks) != leaf.stored_bytes:
            raise ValueError(f"the chunks of {name} are not all of it")
        if not covers_once([c.box for c in leaf_chunks], shape):
            raise ValueError(f"the chunks of {name} overlap, and are not all of it")


def _refuse_misfit(c: Chunk, shape: tuple[int, ...], itemsize: int) -> None:
    """Raises ValueError where a chunk is outside its array, or has another size than its
    elements."""
    spans = list(zip(*c.box, shape, strict=True))
    inside = all(0 <= start <= start + n <= length for start, n, length in spans)
    integers = all(isinstance(n, int) for n in (*c.box.start, *c.box.shape, c.offset, c.size))
    texts = isinstance(c.digest, str) and isinstance(c.pack, str)
    if not (inside and integers and texts) or c.offset < 0:
        raise ValueError(f"{c} is no chunk of an array {list(shape)}")
    if c.size != math.prod(c.box.shape) * itemsize:
        raise ValueError(f"{c} has not the bytes of its elements, {itemsize} each")


def write_part(directory: AnyPath, process: int, chunks: list[Chunk]) -> None:
    """Writes the chunks of one process, for the manifest that is made later."""
    put(_part(directory, process), json.dumps(chunks).encode())


def take_parts(directory: AnyPath, processes: int) -> list[Chunk]:
    """Returns the chunks of all processes; removes their files. Raises OSError, and ValueError for
    one that is cut."""
    chunks = []
    for process in range(processes):
        path = _part(directory, process)
        chunks += map(Chunk.from_json, json.loads(read_named(directory, path.name)))
        remove_file(path)
    return chunks


def _part(directory: AnyPath, process: int) -> AnyPath:
    return directory / f"{process}.part.json"


def text_digest(data: bytes, like: str | None = None) -> str:
    """Returns the digest of the text of a manifest or a record. like: a stored digest to compare
    with, whose algorithm is used. Raises LacksPackage as `hashing.hasher`."""
    return hasher(data, like).hexdigest()
