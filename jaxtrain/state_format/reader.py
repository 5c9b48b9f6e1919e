"""Arrays from chunks, onto any sharding and into slots. Every chunk that is needed is verified."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import jax
import numpy as np

from jaxtrain.files.store import AnyPath, is_local
from jaxtrain.state_format.chunks import Box, Chunk, boxes_of
from jaxtrain.state_format.manifest import Manifest
from jaxtrain.state_format.pack import read_chunk
from jaxtrain.state_format.slots import AS_THEY_REST, AllSlots, Slots, part_of, pieces_of

READERS, STORE_READERS = 4, 16
"""Threads that read chunks. A store takes longer to begin an answer than to send it."""

Read = Callable[[Chunk, np.dtype], np.ndarray]
"""Returns the verified elements of a chunk. Raises ValueError with the damage; OSError."""


class Damaged(ValueError):
    """Chunks are damaged. damages: a line for each, with leaf and place."""

    def __init__(self, damages: list[str]) -> None:
        self.damages = damages
        super().__init__("; ".join(damages))


def read_from(directory: AnyPath) -> Read:
    """Returns a reader of the packs in one directory."""
    return lambda chunk, dtype: read_chunk(directory / chunk.pack, chunk, dtype)


def read_arrays(
    manifest: Manifest,
    specs: dict[str, jax.ShapeDtypeStruct],
    read: Read | None = None,
    slots: AllSlots = AS_THEY_REST,
) -> dict[str, jax.Array]:
    """Returns the arrays of `specs` on this process's devices, by their shardings; in `slots` where
    these have them, with zero padding.

    Reads a leaf at a time, so that the host holds the chunks of one. All chunks of which a part is
    needed here are read and verified as a whole. Raises Damaged after all are read.
    """
    read = read or read_from(manifest.directory)
    damages: list[str] = []
    arrays = {}
    with ThreadPoolExecutor(_readers(manifest)) as pool:
        for leaf, spec in specs.items():
            try:
                arrays[leaf] = _read_array(manifest, leaf, spec, read, pool, slots.get(leaf))
            except Damaged as error:
                damages += error.damages
    if damages:
        raise Damaged(damages)
    return arrays


def verify_chunks(manifest: Manifest, read: Read | None = None) -> list[str]:
    """Returns a line for each damaged chunk, of all; [] when every byte is as it was written."""
    read = read or read_from(manifest.directory)
    damages = []
    with ThreadPoolExecutor(_readers(manifest)) as pool:
        for leaf, record in manifest.leaves.items():
            _, dtype = record.stored
            chunks = manifest.chunks.get(leaf, [])
            check = partial(_attempt, read=read, dtype=dtype, keep=False)
            damages += [f for f in pool.map(check, chunks) if isinstance(f, str)]
    return damages


def _readers(manifest: Manifest) -> int:
    return READERS if is_local(manifest.directory) else STORE_READERS


def _read_array(
    manifest: Manifest,
    leaf: str,
    spec: jax.ShapeDtypeStruct,
    read: Read,
    pool: ThreadPoolExecutor,
    slots: Slots | None,
) -> jax.Array:
    shape, dtype = tuple(spec.shape), np.dtype(spec.dtype)
    assert spec.sharding is not None, "the manager refuses a template without shardings"
    devices_of = boxes_of(spec.sharding.addressable_devices_indices_map(shape), shape)
    needed = [piece.box for box in devices_of for piece in pieces_of(slots, box)]
    overlapping = [c for c in manifest.chunks.get(leaf, []) if any(map(c.box.intersect, needed))]
    results = list(pool.map(partial(_attempt, read=read, dtype=dtype), overlapping))
    if damages := [result for result in results if isinstance(result, str)]:
        raise Damaged(damages)
    pairs = zip(overlapping, results, strict=True)
    loaded = [(chunk.box, data) for chunk, data in pairs if isinstance(data, np.ndarray)]
    shards = []
    for box, devices in devices_of.items():
        data = part_of(slots, box, dtype, partial(_assemble, dtype=dtype, chunks=loaded))
        shards += [jax.device_put(data, device) for device in devices]
    return jax.make_array_from_single_device_arrays(shape, spec.sharding, shards)


def _attempt(
    chunk: Chunk, *, read: Read, dtype: np.dtype, keep: bool = True
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
