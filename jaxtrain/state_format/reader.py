"""Arrays from chunks, onto any sharding and into slots. Every chunk that is needed is verified."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import jax
import numpy as np

from jaxtrain.files.store import AnyPath, is_local
from jaxtrain.state_format.chunks import Box, Chunk, boxes_of
from jaxtrain.state_format.manifest import Manifest
from jaxtrain.state_format.pack import read_chunk
from jaxtrain.state_format.slots import AS_THEY_REST, AllSlots, Slots, part_of, pieces_of

READERS, STORE_READERS = 4, 16
"""Threads that read chunks. A store takes longer to begin an answer than to send it."""

AHEAD = 2**28
"""Bytes of leaves that are read together, if one alone has not more."""

ReadChunk = Callable[[Chunk, np.dtype], np.ndarray]
"""Returns the verified elements of a chunk. Raises ValueError with the damage; OSError."""


class Damaged(ValueError):
    """Chunks are damaged. damages: a line for each, with leaf and place."""

    def __init__(self, damages: list[str]) -> None:
        self.damages = damages
        super().__init__("; ".join(damages))


def read_from(directory: AnyPath) -> ReadChunk:
    """Returns a reader of the packs in one directory."""
    return lambda chunk, dtype: read_chunk(directory / chunk.pack, chunk, dtype)


def read_arrays(
    manifest: Manifest,
    specs: dict[str, jax.ShapeDtypeStruct],
    read: ReadChunk | None = None,
    slots: AllSlots = AS_THEY_REST,
) -> dict[str, jax.Array]:
    """Returns the arrays of `specs` on this process's devices, by their shardings; in `slots` where
    these have them, with zero padding.

    All chunks of which a part is needed here are read and verified as a whole; the host holds those
    of one leaf, or of several that have AHEAD bytes together. Raises Damaged after all are read.
    """
    read = read or read_from(manifest.directory)
    damages: list[str] = []
    arrays = {}
    reads: deque[_LeafRead] = deque()
    ahead = 0

    def finish() -> int:
        """Returns the bytes of the leaf that was read."""
        leaf = reads.popleft()
        try:
            arrays[leaf.name] = leaf.array()
        except Damaged as error:
            damages.extend(error.damages)
        return leaf.bytes

    with ThreadPoolExecutor(_readers(manifest)) as pool:
        try:
            for name, spec in specs.items():
                leaf = _LeafRead.of(manifest.chunks.get(name, []), name, spec, slots.get(name))
                while reads and ahead + leaf.bytes > AHEAD:
                    ahead -= finish()
                reads.append(leaf.begun(pool, read))
                ahead += leaf.bytes
            while reads:
                finish()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    if damages:
        raise Damaged(damages)
    return arrays


def verify_chunks(manifest: Manifest, read: ReadChunk | None = None) -> list[str]:
    """Returns a line for each damaged chunk, of all; [] when every byte is as it was written."""
    read = read or read_from(manifest.directory)
    dtypes = {leaf: record.stored[1] for leaf, record in manifest.leaves.items()}
    chunks = [chunk for leaf in dtypes for chunk in manifest.chunks.get(leaf, [])]

    def check(chunk: Chunk) -> str | None:
        result = _attempt(chunk, read=read, dtype=dtypes[chunk.leaf], keep=False)
        return result if isinstance(result, str) else None

    with ThreadPoolExecutor(_readers(manifest)) as pool:
        return [damage for damage in pool.map(check, chunks) if damage is not None]


def _readers(manifest: Manifest) -> int:
    return READERS if is_local(manifest.directory) else STORE_READERS


class _LeafRead(NamedTuple):
    """A leaf that is being read. devices_of: this process's devices by their boxes. chunks: those
    that overlap the boxes. bytes: of these. results: of `_attempt`, for each chunk."""

    name: str
    spec: jax.ShapeDtypeStruct
    slots: Slots | None
    devices_of: dict[Box, list[jax.Device]]
    chunks: list[Chunk]
    bytes: int
    results: list[Future[np.ndarray | str | None]]

    @classmethod
    def of(
        cls, chunks: list[Chunk], name: str, spec: jax.ShapeDtypeStruct, slots: Slots | None
    ) -> _LeafRead:
        shape = tuple(spec.shape)
        assert spec.sharding is not None, "the manager refuses a template without shardings"
        devices_of = boxes_of(spec.sharding.addressable_devices_indices_map(shape), shape)
        needed = [piece.box for box in devices_of for piece in pieces_of(slots, box)]
        overlapping = [chunk for chunk in chunks if any(map(chunk.box.intersect, needed))]
        size = sum(chunk.size for chunk in overlapping)
        return cls(name, spec, slots, devices_of, overlapping, size, [])

    def begun(self, pool: Executor, read: ReadChunk) -> _LeafRead:
        """Returns this leaf, whose chunks are being read."""
        attempt = partial(_attempt, read=read, dtype=np.dtype(self.spec.dtype))
        return self._replace(results=[pool.submit(attempt, chunk) for chunk in self.chunks])

    def array(self) -> jax.Array:
        """Returns the array when all chunks are read. Raises Damaged."""
        dtype, results = np.dtype(self.spec.dtype), [future.result() for future in self.results]
        if damages := [result for result in results if isinstance(result, str)]:
            raise Damaged(damages)
        pairs = zip(self.chunks, results, strict=True)
        loaded = [(chunk.box, data) for chunk, data in pairs if isinstance(data, np.ndarray)]
        assemble, shards = partial(_assemble, dtype=dtype, chunks=loaded), []
        for box, devices in self.devices_of.items():
            data = part_of(self.slots, box, dtype, assemble)
            shards += [jax.device_put(data, device) for device in devices]
        shape, sharding = tuple(self.spec.shape), self.spec.sharding
        return jax.make_array_from_single_device_arrays(shape, sharding, shards)


def _attempt(
    chunk: Chunk, *, read: ReadChunk, dtype: np.dtype, keep: bool = True
) -> np.ndarray | str | None:
    """Returns the chunk's elements (None if not `keep`), or its damage as text."""
    try:
        data = read(chunk, dtype)
    except ValueError as error:
        return f"{chunk.leaf} {_span(chunk.box)}: {error}"
    return data if keep else None


def _assemble(box: Box, dtype: np.dtype, chunks: list[tuple[Box, np.ndarray]]) -> np.ndarray:
    """Returns the elements of `box` from chunks that cover it."""
    for chunk, data in chunks:
        if chunk == box:
            return data
    out, filled = np.empty(box.shape, dtype), 0
    for chunk, data in chunks:
        if overlap := box.intersect(chunk):
            out[overlap.within(box)] = data[overlap.within(chunk)]
            filled += math.prod(overlap.shape)
    assert filled == out.size, "a manifest with gaps is refused when it is read"
    return out


def _span(box: Box) -> str:
    """Returns the box as an index, like [0:8, 16:32]."""
    return f"[{', '.join(f'{a}:{a + n}' for a, n in zip(*box, strict=True))}]"
