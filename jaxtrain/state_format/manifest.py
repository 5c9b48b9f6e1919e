"""The manifest of a step: its number, leaves and metadata, and where each chunk is with which
digest.

    STEP/state/manifest.json          the first line holds the digest of the rest
    STEP/state/{step}.{process}*.pack the chunks; a pack of an earlier step is a hard link to it

Nothing here imports Orbax, so that a fresh run learns cheaply that there is nothing to resume.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxtrain.files.folder import file_of, plain_name
from jaxtrain.files.json_text import parse_json
from jaxtrain.files.regular import open_regular, read_text, write_all
from jaxtrain.state_format.chunks import Box, Chunk, covers_once, digest
from jaxtrain.state_format.hashing import hasher
from jaxtrain.state_format.leaves import LeafRecord, records_from_json
from jaxtrain.state_format.pack import Earlier

ITEM = "state"
"""The item of Orbax's that holds everything of ours; a directory of a step."""
NAME = "manifest.json"
FAILED = "failed"
"""In place of a manifest: why processes could not write their parts. Such a step is removed."""
FORMAT = 2
HEAD = f"jaxtrain checkpoint {FORMAT}"
MALFORMED = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""What reading JSON of another form than ours may raise."""
STEP = "step"
"""The leaf of a state that counts the steps done, if it has one, and the metadata's word for it."""
Foreign = Callable[[dict[str, Any]], list[str]]
"""Why a step with that metadata is none of a run's, a line for each reason."""


class Manifest(NamedTuple):
    """step: as it was saved; None in one of an older version. directory: where the packs are.
    sizes: bytes of each pack."""

    step: int | None
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
    step: int,
    leaves: dict[str, LeafRecord],
    metadata: dict[str, Any],
    chunks: Iterable[Chunk],
) -> None:
    """Raises OSError, and ValueError where the chunks are not all of the leaves."""
    by_leaf: dict[str, list[Chunk]] = {}
    for c in chunks:
        by_leaf.setdefault(c.leaf, []).append(c)
    refuse_gaps(leaves, by_leaf)
    packs = sorted({c.pack for held in by_leaf.values() for c in held})
    body = {
        "step": step,
        "leaves": leaves,
        "metadata": metadata,
        "chunks": {k: [[*c.box, *c[2:]] for c in held] for k, held in by_leaf.items()},
        "packs": {pack: (directory / pack).stat().st_size for pack in packs},
    }
    text = json.dumps(body).encode()
    write_synced(directory / NAME, f"{HEAD} {text_digest(text)}\n".encode() + text)


def read_manifest(step: Path) -> Manifest:
    """The manifest of a step's directory, verified. Whoever made the directory can have written a
    digest too: nothing is believed of what it holds. Raises ValueError that says what is wrong, and
    LacksPackage where the digest cannot be taken here."""
    directory = step / ITEM
    for path in (step, directory):
        if path.is_symlink():
            raise ValueError(
                f"{path} is a symbolic link to {os.readlink(path)}; it is not followed"
            )
    try:
        head, _, text = read_text(file_of(directory, NAME)).partition("\n")
    except FileNotFoundError:
        if (step / "metadata" / "metadata").is_file():
            raise ValueError(f"format 1, of an older version; this one reads {FORMAT}") from None
        if (problem := read_failure(step)) is not None:
            raise ValueError(f"it was not written whole: {problem}") from None
        raise ValueError(f"{NAME} is missing") from None
    except OSError as error:
        raise ValueError(f"{NAME} cannot be read: {error}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{NAME} is not as it was written: {error}") from error
    told = head.removeprefix(f"{HEAD} ")
    if told == head or told != text_digest(text.encode(), told):
        raise ValueError(f"{NAME} is not as it was written: its digest differs")
    try:
        return _from_json(directory, parse_json(text))
    except MALFORMED as error:
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise ValueError(f"{NAME} is no manifest: {kind}{error}") from error


def read_failure(step: Path) -> str | None:
    """What stands in place of the manifest of a step that was not written whole. Raises ValueError
    where it cannot be read."""
    try:
        return read_text(file_of(step / ITEM, FAILED))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ValueError(f"{FAILED} cannot be read: {error}") from error


def _from_json(directory: Path, body: Mapping[str, Any]) -> Manifest:
    """Raises one of MALFORMED where the body of a manifest is not what `write_manifest` writes."""
    leaves = records_from_json(body["leaves"])
    chunks = {
        leaf: [Chunk.from_json([leaf, row[:2], *row[2:]]) for row in rows]
        for leaf, rows in body["chunks"].items()
    }
    sizes, metadata = body["packs"], body["metadata"]
    packs = {c.pack for held in chunks.values() for c in held} | sizes.keys()
    if paths := sorted(pack for pack in packs if not plain_name(pack)):
        raise ValueError(f"it names {paths[0]!r}, which is no file of its directory")
    if not isinstance(metadata, dict):
        raise ValueError(f"its metadata is a {type(metadata).__name__}, and no object")
    if wrong := [size for size in sizes.values() if not isinstance(size, int)]:
        raise ValueError(f"the size of a pack is {wrong[0]!r}")
    refuse_gaps(leaves, chunks)
    for c in (c for held in chunks.values() for c in held):
        if c.offset + c.size > sizes[c.pack]:
            raise ValueError(f"a chunk of {c.leaf} ends beyond its pack {c.pack}")
    return Manifest(body.get("step"), directory, leaves, metadata, chunks, sizes)


def other_steps(manifest: Manifest, step: int) -> list[str]:
    """Where a manifest says that it is not of `step`, a line for each: in its own number, in the
    metadata, and in the state's count of steps, whose digest tells it without a byte being read."""
    told = {"its manifest": manifest.step, "its metadata": manifest.metadata.get(STEP)}
    found = [f"{where} says step {n}" for where, n in told.items() if n is not None and n != step]
    leaf = manifest.leaves.get(STEP)
    if leaf is not None and _counts_steps(leaf):
        (chunk,) = manifest.chunks[STEP]
        fits = step <= np.iinfo(leaf.dtype).max
        if not fits or chunk.digest != _digest_of_step(step, leaf.dtype, chunk.digest):
            found.append(f"its state's count of steps is not {step}")
    return found


def _digest_of_step(step: int, dtype: str, like: str) -> str:
    return digest(STEP, Box((), ()), np.asarray(step, dtype), like)


def refuse_other_step(step: int, metadata: Mapping[str, Any], leaves: Mapping[str, Any]) -> None:
    """Raise ValueError where what is to be saved as `step` says that it is of another: it would be
    taken for damaged."""
    told = metadata.get(STEP, step)
    if told != step:
        raise ValueError(f"metadata['{STEP}'] is {told!r}, saved as step {step}; they are the same")
    leaf = leaves.get(STEP)
    if leaf is not None and _counts_steps(leaf) and int(leaf) != step:
        raise ValueError(
            f"the state's leaf '{STEP}' is {int(leaf)}, saved as step {step}; it counts the steps "
            "done: save it as that step, or call what counts something else by another name"
        )


def _counts_steps(leaf: LeafRecord | jax.Array) -> bool:
    """Whether a leaf named `step` can be the count of steps."""
    return tuple(leaf.shape) == () and str(leaf.dtype) in ("int32", "int64", "uint32", "uint64")


def refuse_gaps(leaves: Mapping[str, LeafRecord], chunks: Mapping[str, list[Chunk]]) -> None:
    """Raise ValueError where chunks are not each element of each leaf, once, or are of no leaf;
    also TypeError where they hold something else than `Chunk` says."""
    if unknown := sorted(chunks.keys() - leaves.keys()):
        raise ValueError(f"there are chunks of {unknown[0]!r}, which is no leaf")
    for name, leaf in leaves.items():
        held = chunks.get(name, [])
        shape, dtype = leaf.stored
        for c in held:
            _refuse_misfit(c, shape, dtype.itemsize)
        if len({c.box for c in held}) != len(held):
            raise ValueError(f"two chunks are the same part of {name}")
        if sum(c.size for c in held) != leaf.stored_bytes:
            raise ValueError(f"the chunks of {name} are not all of it")
        if not covers_once([c.box for c in held], shape):
            raise ValueError(f"the chunks of {name} overlap, and are not all of it")


def _refuse_misfit(c: Chunk, shape: tuple[int, ...], itemsize: int) -> None:
    """Raise ValueError where a chunk is no part of an array, or has not as many bytes as that."""
    spans = list(zip(*c.box, shape, strict=True))
    inside = all(0 <= start <= start + n <= whole for start, n, whole in spans)
    whole_numbers = all(isinstance(n, int) for n in (*c.box.start, *c.box.shape, c.offset, c.size))
    texts = isinstance(c.digest, str) and isinstance(c.pack, str)
    if not (inside and whole_numbers and texts) or c.offset < 0:
        raise ValueError(f"{c} is no chunk of an array {list(shape)}")
    if c.size != math.prod(c.box.shape) * itemsize:
        raise ValueError(f"{c} has not the bytes of its elements, {itemsize} each")


def write_part(directory: Path, process: int, chunks: list[Chunk] | str) -> None:
    """What one process wrote, or why it could not, for the manifest that is made when all have."""
    write_synced(_part(directory, process), json.dumps(chunks).encode())


def take_parts(directory: Path, processes: int) -> tuple[list[Chunk], list[str]]:
    """What all of them wrote, and why some could not; their files are removed."""
    found, problems = [], []
    for process in range(processes):
        path = _part(directory, process)
        told = json.loads(path.read_bytes())
        path.unlink()
        if isinstance(told, str):
            problems.append(f"process {process}: {told}")
        else:
            found += map(Chunk.from_json, told)
    return found, problems


def write_synced(path: Path, data: bytes) -> None:
    """On the disk, with its name, when this returns. Raises ValueError where a link is there."""
    with open_regular(path, "wb") as file:
        write_all(file, data)
        os.fsync(file.fileno())
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _part(directory: Path, process: int) -> Path:
    return directory / f"{process}.part.json"


def text_digest(data: bytes, like: str | None = None) -> str:
    """Of a manifest or a record of a part. like: a digest that it is compared with; raises as
    `hashing.hasher`."""
    return hasher(data, like).hexdigest()
