"""Arrays read back from chunks, onto any sharding and into slots; every chunk that is touched is
verified."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import jax
import numpy as np

from jaxtrain.state_format.chunks import Box, Chunk, boxes_of
from jaxtrain.state_format.manifest import Manifest
from jaxtrain.state_format.pack import read_chunk
from jaxtrain.state_format.slots import AS_THEY_REST, AllSlots, Slots, part_of, pieces_of

READERS = 4

Read = Callable[[Chunk, np.dtype], np.ndarray]
"""The verified elements of a chunk; raises ValueError that says what is wrong with it."""


class Damaged(ValueError):
    """Chunks that are not what was written. `damages`: a line for each, naming leaf and place."""

    def __init__(self, damages: list[str]) -> None:
        self.damages = damages
        super().__init__("; ".join(damages))


def read_from(directory: Path) -> Read:
    """From packs in one directory."""
    return lambda chunk, dtype: read_chunk(directory / chunk.pack, chunk, dtype)


def read_arrays(
    manifest: Manifest,
    wanted: dict[str, jax.ShapeDtypeStruct],
    read: Read | None = None,
    slots: AllSlots = AS_THEY_REST,
) -> dict[str, jax.Array]:
    """The arrays of `wanted`, as its shardings place them on this process's devices; in `slots`
    where these have them, their padding zero.

    A leaf at a time, so that the host holds the chunks of one. All chunks of which a part is needed
    here are read and verified, whole. Raises Damaged, when everything was looked at.
    """
    read = read or read_from(manifest.directory)
    damages: list[str] = []
    arrays = {}
    with ThreadPoolExecutor(READERS) as pool:
        for leaf, spec in wanted.items():
            try:
                arrays[leaf] = _read_array(manifest, leaf, spec, read, pool, slots.get(leaf))
            except Damaged as error:
                damages += error.damages
    if damages:
        raise Damaged(damages)
    return arrays


def verify_chunks(manifest: Manifest, read: Read | None = None) -> list[str]:
    """What is damaged of all chunks, a line for each; [] when every byte is as it was written."""
    read = read or read_from(manifest.directory)
    damages = []
    with ThreadPoolExecutor(READERS) as pool:
        for leaf, record in manifest.leaves.items():
            _, dtype = record.stored
            chunks = manifest.chunks.get(leaf, [])
            check = partial(_attempt, read=read, dtype=dtype, keep=False)
            damages += [f for f in pool.map(check, chunks) if isinstance(f, str)]
    return damages


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
    places = boxes_of(spec.sharding.addressable_devices_indices_map(shape), shape)
    needed = [piece.box for box in places for piece in pieces_of(slots, box)]
    touched = [c for c in manifest.chunks.get(leaf, []) if any(map(c.box.meet, needed))]
    found = list(pool.map(partial(_attempt, read=read, dtype=dtype), touched))
    if damages := [each for each in found if isinstance(each, str)]:
        raise Damaged(damages)
    pairs = zip(touched, found, strict=True)
    held = [(chunk.box, data) for chunk, data in pairs if isinstance(data, np.ndarray)]
    shards = []
    for box, devices in places.items():
        data = part_of(slots, box, dtype, partial(_assemble, dtype=dtype, held=held))
        shards += [jax.device_put(data, device) for device in devices]
    return jax.make_array_from_single_device_arrays(shape, spec.sharding, shards)


def _attempt(
    chunk: Chunk, *, read: Read, dtype: np.dtype, keep: bool = True
) -> np.ndarray | str | None:
    """The chunk's elements (None where they are not to be kept), or what is wrong with it."""
    try:
        data = read(chunk, dtype)
    except ValueError as error:
        return f"{chunk.leaf} {_span(chunk.box)}: {error}"
    return data if keep else None


def _assemble(box: Box, dtype: np.dtype, held: list[tuple[Box, np.ndarray]]) -> np.ndarray:
    """The elements of `box` out of chunks that cover it."""
    for chunk, data in held:
        if chunk == box:
            return data
    out, filled = np.empty(box.shape, dtype), 0
    for chunk, data in held:
        if both := box.meet(chunk):
            out[both.within(box)] = data[both.within(chunk)]
            filled += math.prod(both.shape)
    assert filled == out.size, "a manifest with gaps is refused when it is read"
    return out


def _span(box: Box) -> str:
    """As one would write the index: [0:8, 16:32]."""
    return f"[{', '.join(f'{a}:{a + n}' for a, n in zip(*box, strict=True))}]"
