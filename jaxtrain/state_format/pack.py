"""Packs: files with chunks, one after the other, with nothing between.

    {step}.{process}.pack        chunks that changed since the previous save, and all small chunks
    {step}.{process}.still.pack  unchanged chunks of SMALL bytes and more

Every byte of a pack is of one chunk, so every damaged byte has a name. A pack is never changed once
it is written. A later step may share a pack of unchanged chunks by a hard link; its space is freed
with the last such step. A step shares a complete pack or none of it, so that all bytes on the disk
are needed by some step. An object store copies such a pack: nothing is sent for it again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxtrain.files.store import (
    AnyPath,
    Writer,
    reading,
    share_file,
    size_of,
    writing,
)
from jaxtrain.state_format.chunks import Box, Chunk, Part, as_bytes, cut, digest, hasher_of

PIECE = 2**18
"""Bytes of one read, which are still in the processor's cache when they are hashed."""

Digest = Callable[[str, Box, np.ndarray], str]


SMALL = 16 * 2**10
"""A smaller chunk is always written: a link would save less than it costs."""
STILL = ".still.pack"


class Earlier(NamedTuple):
    """The chunks of an earlier step, by leaf and box: a save may share its packs of unchanged
    chunks. directory: has the packs. sizes: bytes of each pack, by name."""

    directory: AnyPath
    chunks: Mapping[tuple[str, Box], Chunk]
    sizes: Mapping[str, int]

    def has(self, piece: Part, piece_digest: str) -> bool:
        """True if the step has the piece with this digest."""
        chunk = self.chunks.get((piece.leaf, piece.box))
        return chunk is not None and chunk.digest == piece_digest


NOTHING = Earlier(Path(), {}, {})


class Sharing(NamedTuple):
    """source: the step whose packs may be linked. apart: a step that is kept together with the new
    one, and shares none of the packs linked from `source`, so that no damage to one file affects
    both."""

    source: Earlier
    apart: Earlier


ALONE = Sharing(NOTHING, NOTHING)


def write_chunks(
    directory: AnyPath,
    name: str,
    parts: Iterable[Part],
    sharing: Sharing = ALONE,
    *,
    digest_of: Digest = digest,
) -> list[Chunk]:
    """Writes `parts` as chunks and returns all: changed ones into the pack `name`, unchanged ones
    into one more pack. Chunks in linked packs are not written.

    Digests are computed ahead of the writes, in another thread. Everything is on the disk when this
    returns. Raises OSError.
    """
    pieces = [piece for part in parts for piece in cut(part)]
    with ExitStack() as stack, ThreadPoolExecutor(1) as pool:
        moved = stack.enter_context(_Pack(directory / name))
        still = stack.enter_context(_Pack(directory / (name.removesuffix(".pack") + STILL)))

        def digests(hashed: list[Part]) -> Iterator[str]:
            return pool.map(lambda p: digest_of(p.leaf, p.box, p.data), hashed)

        try:
            chunks = _link_chunks(directory, sharing, pieces, digests)
            unlinked = [piece for piece in pieces if (piece.leaf, piece.box) not in chunks]
            for piece, piece_digest in zip(unlinked, digests(unlinked), strict=True):
                unchanged = sharing.source.has(piece, piece_digest) or sharing.apart.has(
                    piece, piece_digest
                )
                pack = still if unchanged and piece.data.nbytes >= SMALL else moved
                chunks[piece.leaf, piece.box] = pack.write(piece, piece_digest)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return list(chunks.values())


class _Pack:
    """A pack being written; its file is created by the first chunk."""

    def __init__(self, path: AnyPath) -> None:
        self.path, self.size = path, 0
        self._stack = ExitStack()
        self._writer: Writer | None = None

    def __enter__(self) -> _Pack:
        return self

    def __exit__(self, *exc: Any) -> None:
        self._stack.__exit__(*exc)

    def write(self, piece: Part, piece_digest: str) -> Chunk:
        if self._writer is None:
            self._writer = self._stack.enter_context(writing(self.path))
        size, offset = piece.data.nbytes, self.size
        self._writer.write(as_bytes(piece.data))
        self.size += size
        return Chunk(piece.leaf, piece.box, piece_digest, self.path.name, offset, size)


def _link_chunks(
    directory: AnyPath,
    sharing: Sharing,
    pieces: list[Part],
    digests: Callable[[list[Part]], Iterator[str]],
) -> dict[tuple[str, Box], Chunk]:
    """Links the packs of the source of which every chunk is unchanged, and returns their chunks."""
    source = sharing.source
    keys_of: dict[str, set[tuple[str, Box]]] = {}
    for key, chunk in source.chunks.items():
        if chunk.pack.endswith(STILL):
            keys_of.setdefault(chunk.pack, set()).add(key)
    linkable = set().union(*keys_of.values())
    candidates = [piece for piece in pieces if (piece.leaf, piece.box) in linkable]
    same = {
        (piece.leaf, piece.box)
        for piece, piece_digest in zip(candidates, digests(candidates), strict=True)
        if source.has(piece, piece_digest)
    }
    linked = {
        pack for pack, keys in keys_of.items() if keys <= same and _link(directory, sharing, pack)
    }
    return {key: source.chunks[key] for pack in linked for key in keys_of[pack]}


def _link(directory: AnyPath, sharing: Sharing, pack: str) -> bool:
    """Links a pack and returns True; False where `apart` shares it, it is incomplete, or the file
    system cannot."""
    source, apart = sharing
    path = source.directory / pack
    try:
        if size_of(path) != source.sizes[pack]:
            return False
        if any(_has_same_bytes(path, apart.directory / other) for other in apart.sizes):
            return False
        share_file(path, directory / pack)
    except OSError:
        return False
    return True


def _has_same_bytes(pack: AnyPath, other: AnyPath) -> bool:
    """True if damage to one pack, before it was shared, is in both. Raises OSError."""
    if isinstance(pack, Path):
        return pack.samefile(other)
    return pack.name == other.name  # which names the step that wrote it


def read_chunk(pack: AnyPath, chunk: Chunk, dtype: np.dtype) -> np.ndarray:
    """Returns the elements of a chunk, verified. Raises ValueError with the damage, LacksPackage
    where its digest cannot be computed here, and OSError for a store that does not answer."""
    try:
        with reading(pack, chunk.offset, chunk.size) as file:
            # Before anything is allocated: the manifest's size may be wrong.
            if file is None:
                raise ValueError(f"{pack.name} ends at byte {size_of(pack) or 0}, too early")
            data = np.empty(chunk.size, np.uint8)
            received, hasher = 0, hasher_of(chunk.leaf, chunk.box, dtype, chunk.digest)
            while received < chunk.size and (
                count := file.readinto(data.data[received : received + PIECE])
            ):
                hasher.update(data.data[received : received + count])
                received += count
    except FileNotFoundError:
        raise ValueError(f"{pack.name} is missing") from None
    except OSError as error:
        if not isinstance(pack, Path):
            raise
        raise ValueError(f"{pack.name} cannot be read: {error}") from error
    if received < chunk.size:
        raise ValueError(f"{pack.name} ends at byte {chunk.offset + received}, too early")
    if (read_digest := hasher.hexdigest()) != chunk.digest:
        place = f"bytes {chunk.offset}..{chunk.offset + chunk.size} of {pack.name}"
        raise ValueError(
            f"{place} have digest {read_digest[:12]}, written with {chunk.digest[:12]}"
        )
    return data.view(dtype).reshape(chunk.box.shape)
