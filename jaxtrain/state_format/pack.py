"""Packs: the files that hold chunks, one after the other, with nothing between.

    {step}.{process}.pack        what changed since the save before, and all small chunks
    {step}.{process}.still.pack  what did not, of SMALL bytes and more

Every byte of a pack is of one chunk, so every damaged byte has a name. A pack is never changed once
it is written. One of chunks that stand still may be held by a later step too, by a hard link, and
goes with the last step that holds it: whole or not at all, so that nothing is on the disk that no
step needs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from io import FileIO
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxtrain.files.regular import open_regular, write_all
from jaxtrain.state_format.chunks import Box, Chunk, Part, as_bytes, cut, digest, hasher_of

PIECE = 2**18
"""Read at a time: what was just read is in the processor's cache when its digest is taken."""

Digest = Callable[[str, Box, np.ndarray], str]


SMALL = 16 * 2**10
"""A chunk of fewer bytes is always written: a link would save less than the file it is."""
STILL = ".still.pack"


class Earlier(NamedTuple):
    """The chunks of an earlier step, and where its packs are. `sizes`: bytes of each pack."""

    directory: Path
    chunks: Mapping[tuple[str, Box], Chunk]
    sizes: Mapping[str, int]

    def has(self, piece: Part, found: str) -> bool:
        """Whether it has the piece as it is now, of digest `found`."""
        chunk = self.chunks.get((piece.leaf, piece.box))
        return chunk is not None and chunk.digest == found


NOTHING = Earlier(Path(), {}, {})


class Sharing(NamedTuple):
    """source: the step whose packs may be held again. apart: one that is kept beside the new step,
    and holds none of the packs that this takes from `source`: no damage to one file is in both."""

    source: Earlier
    apart: Earlier


ALONE = Sharing(NOTHING, NOTHING)


def write_chunks(
    directory: Path,
    name: str,
    parts: Iterable[Part],
    sharing: Sharing = ALONE,
    *,
    digest_of: Digest = digest,
) -> list[Chunk]:
    """Write `parts` as chunks of the pack `name`, and of one beside it for those that stand still,
    but for those in packs that are linked, and return all.

    Digests are taken ahead of the writes, in a thread of their own. Everything is on the disk when
    this returns. Raises OSError.
    """
    pieces = [piece for part in parts for piece in cut(part)]
    with ExitStack() as stack, ThreadPoolExecutor(1) as pool:
        moved = stack.enter_context(_Pack(directory / name))
        still = stack.enter_context(_Pack(directory / (name.removesuffix(".pack") + STILL)))

        def digests(some: list[Part]) -> Iterator[str]:
            return pool.map(lambda p: digest_of(p.leaf, p.box, p.data), some)

        try:
            chunks = _link_chunks(directory, sharing, pieces, digests)
            others = [piece for piece in pieces if (piece.leaf, piece.box) not in chunks]
            for piece, found in zip(others, digests(others), strict=True):
                known = sharing.source.has(piece, found) or sharing.apart.has(piece, found)
                pack = still if known and piece.data.nbytes >= SMALL else moved
                chunks[piece.leaf, piece.box] = pack.write(piece, found)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return list(chunks.values())


class _Pack:
    """A pack that is being written; there is none where nothing is."""

    def __init__(self, path: Path) -> None:
        self.path, self.size = path, 0
        self._file: FileIO | None = None

    def __enter__(self) -> _Pack:
        return self

    def __exit__(self, kind: object, *exc: object) -> None:
        if self._file is not None:
            with self._file:
                if kind is None:
                    os.fsync(self._file.fileno())

    def write(self, piece: Part, found: str) -> Chunk:
        if self._file is None:
            self._file = open_regular(self.path, "wb")
        size, offset = piece.data.nbytes, self.size
        write_all(self._file, as_bytes(piece.data))
        self.size += size
        return Chunk(piece.leaf, piece.box, found, self.path.name, offset, size)


def _link_chunks(
    directory: Path,
    sharing: Sharing,
    pieces: list[Part],
    digests: Callable[[list[Part]], Iterator[str]],
) -> dict[tuple[str, Box], Chunk]:
    """The chunks in packs of the source that are here now too: those of which every chunk is as it
    was."""
    source = sharing.source
    held: dict[str, set[tuple[str, Box]]] = {}
    for key, chunk in source.chunks.items():
        if chunk.pack.endswith(STILL):
            held.setdefault(chunk.pack, set()).add(key)
    wanted = set().union(*held.values())
    asked = [piece for piece in pieces if (piece.leaf, piece.box) in wanted]
    same = {
        (piece.leaf, piece.box)
        for piece, found in zip(asked, digests(asked), strict=True)
        if source.has(piece, found)
    }
    taken = {
        pack for pack, keys in held.items() if keys <= same and _link(directory, sharing, pack)
    }
    return {key: source.chunks[key] for pack in taken for key in held[pack]}


def _link(directory: Path, sharing: Sharing, pack: str) -> bool:
    """Whether the pack is here now; False where `apart` relies on it, it is not whole, or the file
    system cannot."""
    source, apart = sharing
    try:
        found = (source.directory / pack).stat()
        if found.st_size != source.sizes[pack]:
            return False
        files = [(apart.directory / other).stat() for other in apart.sizes]
        if any(os.path.samestat(found, other) for other in files):
            return False
        os.link(source.directory / pack, directory / pack)
    except OSError:
        return False
    return True


def read_chunk(pack: Path, chunk: Chunk, dtype: np.dtype) -> np.ndarray:
    """The elements of a chunk, verified. Raises ValueError that says what is wrong with it, and
    LacksPackage where its digest cannot be taken here."""
    try:
        with open_regular(pack, "rb") as file:
            # Before anything is allocated: the size is what a manifest says.
            if (length := os.fstat(file.fileno()).st_size) < chunk.offset + chunk.size:
                raise ValueError(f"{pack.name} ends at byte {length}, too early")
            data = np.empty(chunk.size, np.uint8)
            got, hasher = 0, hasher_of(chunk.leaf, chunk.box, dtype, chunk.digest)
            file.seek(chunk.offset)
            while got < chunk.size and (count := file.readinto(data.data[got : got + PIECE])):
                hasher.update(data.data[got : got + count])
                got += count
    except FileNotFoundError:
        raise ValueError(f"{pack.name} is missing") from None
    except OSError as error:
        raise ValueError(f"{pack.name} cannot be read: {error}") from error
    if got < chunk.size:
        raise ValueError(f"{pack.name} ends at byte {chunk.offset + got}, too early")
    if (found := hasher.hexdigest()) != chunk.digest:
        at = f"bytes {chunk.offset}..{chunk.offset + chunk.size} of {pack.name}"
        raise ValueError(f"{at} have digest {found[:12]}, written with {chunk.digest[:12]}")
    return data.view(dtype).reshape(chunk.box.shape)
