"""Packs: the files that hold chunks, one after the other, with nothing between.

Every byte of a pack is of one chunk, so every damaged byte has a name. A pack is never changed
once it is written; a later step that has some of its chunks unchanged holds it by a hard link, and
it goes with the last step that does.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from io import FileIO
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxtrain.checkpoint.chunks import Box, Chunk, Part, as_bytes, cut, digest, hasher_of

PIECE = 2**18
"""Read at a time: what was just read is in the processor's cache when its digest is taken."""

Digest = Callable[[str, Box, np.ndarray], str]


class Earlier(NamedTuple):
    """The chunks of an earlier step, and where its packs are. `sizes`: bytes of each pack."""

    directory: Path
    chunks: Mapping[tuple[str, Box], Chunk]
    sizes: Mapping[str, int]


NOTHING = Earlier(Path(), {}, {})


def write_chunks(
    directory: Path,
    name: str,
    parts: Iterable[Part],
    earlier: Earlier = NOTHING,
    *,
    digest_of: Digest = digest,
) -> list[Chunk]:
    """Write `parts` as chunks of the pack `name`, but for those that `earlier` has, and return all.

    Digests are taken ahead of the writes, in a thread of their own. Everything is on the disk when
    this returns. Raises OSError.
    """
    pieces = [piece for part in parts for piece in cut(part)]
    shared = _Shared(directory, earlier)
    chunks, offset = [], 0
    with (directory / name).open("wb", buffering=0) as file, ThreadPoolExecutor(1) as pool:
        try:
            digests = pool.map(lambda p: digest_of(p.leaf, p.box, p.data), pieces)
            for piece, found in zip(pieces, digests, strict=True):
                chunk = shared.find(piece, found)
                if chunk is None:
                    chunk = Chunk(piece.leaf, piece.box, found, name, offset, piece.data.nbytes)
                    _write(file, as_bytes(piece.data))
                    offset += piece.data.nbytes
                chunks.append(chunk)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
        os.fsync(file.fileno())
    if not offset:
        (directory / name).unlink()
    return chunks


class _Shared:
    """Chunks of an earlier step that need not be written again."""

    def __init__(self, directory: Path, earlier: Earlier) -> None:
        self.directory, self.earlier = directory, earlier
        self.linked: dict[str, bool] = {}
        live = dict.fromkeys(earlier.sizes, 0)
        for chunk in earlier.chunks.values():
            live[chunk.pack] += chunk.size
        # Mostly chunks that nothing needs any more: let it go with the steps that have them.
        self.stale = {pack for pack, size in earlier.sizes.items() if 2 * live[pack] < size}

    def find(self, piece: Part, found: str) -> Chunk | None:
        chunk = self.earlier.chunks.get((piece.leaf, piece.box))
        if chunk is None or chunk.digest != found or chunk.pack in self.stale:
            return None
        if chunk.pack not in self.linked:
            self.linked[chunk.pack] = self.link(chunk.pack)
        return chunk if self.linked[chunk.pack] else None

    def link(self, pack: str) -> bool:
        """Whether the pack is here now; False where it is not whole or the file system cannot."""
        source = self.earlier.directory / pack
        try:
            if source.stat().st_size != self.earlier.sizes[pack]:
                return False
            os.link(source, self.directory / pack)
        except FileExistsError:
            return True  # another process of this save was first
        except OSError:
            return False
        return True


def _write(file: FileIO, data: memoryview) -> None:
    """All of `data`: an unbuffered write may take less."""
    while data:
        data = data[file.write(data) :]


def read_chunk(pack: Path, chunk: Chunk, dtype: np.dtype) -> np.ndarray:
    """The elements of a chunk, verified. Raises ValueError that says what is wrong with it."""
    try:
        with pack.open("rb", buffering=0) as file:
            data = np.empty(chunk.size, np.uint8)
            got, hasher = 0, hasher_of(chunk.leaf, chunk.box, dtype)
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
