"""Which process writes which part of which array, in the boxes of the stored leaves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import jax
import numpy as np

from jaxtrain.state_format.chunks import Box, Part, boxes_of
from jaxtrain.state_format.slots import AS_THEY_REST, AllSlots, Piece, pieces_of


@dataclass
class OwnedParts:
    """What this process writes of a state, whatever becomes of the arrays that it was read from.

    held: of a leaf, pieces of an array on the host, or of a copy on its device that is on its way
    there. copy_failure: why no copy was made on the devices though there was room for one; empty
    where none was tried, or none failed.
    """

    held: list[tuple[str, list[Piece], np.ndarray | jax.Array]]
    copy_failure: str = ""

    def take(self) -> list[Part]:
        """The parts, once they are on the host; nothing is held here then, and each copy on a
        device only until it has come. Raises `jax.errors.JaxRuntimeError` where one has failed."""
        parts = []
        self.held.reverse()
        while self.held:
            leaf, pieces, data = self.held.pop()
            host = np.asarray(data)
            parts += [Part(leaf, piece.box, host[piece.at]) for piece in pieces]
        return parts


def owned_parts(
    arrays: dict[str, jax.Array], slots: AllSlots = AS_THEY_REST, spare_bytes: int = 0
) -> OwnedParts:
    """What this process writes of `arrays`: of each box that devices hold, one of them writes it,
    cut into boxes of the stored leaf where it rests in `slots`. What is padding nobody writes.

    Replicas take turns, so that processes which hold the same arrays share the work. The arrays may
    be donated when this returns. Where each device has `spare_bytes` of memory for a copy of what
    is read from it, the copy is made there, and goes to the host beside the program that runs next.
    Else, and where that copy fails, this waits for the host's copies, which start for all arrays
    before one is waited for. On a CPU device there is none: the array is held, and a step that
    donates it writes elsewhere.

    Raises `jax.errors.JaxRuntimeError` where an array cannot be read.
    """
    here: list[tuple[str, list[Piece], jax.Array]] = []
    turn = 0
    for leaf, array in arrays.items():
        shards = {shard.device: shard.data for shard in array.addressable_shards}
        for box, devices in placed_boxes(array.sharding, tuple(array.shape)):
            pieces = pieces_of(slots.get(leaf), box)
            data = shards.get(devices[turn % len(devices)]) if pieces else None
            turn += 1
            if data is not None:
                here.append((leaf, pieces, data))
    arrays_here = [data for *_, data in here]
    copies, failure = None, ""
    if 0 < _most_on_a_device(arrays_here) <= spare_bytes:
        try:
            copies = _copied(arrays_here)
        except jax.errors.JaxRuntimeError as error:
            failure = str(error).partition("\n")[0] or type(error).__name__
    for array in copies or arrays_here:
        array.copy_to_host_async()
    data_of = copies or [np.asarray(array) for array in arrays_here]
    pairs = zip(here, data_of, strict=True)
    return OwnedParts([(leaf, pieces, data) for (leaf, pieces, _), data in pairs], failure)


def _most_on_a_device(arrays: Iterable[jax.Array]) -> int:
    """Bytes of the arrays on the device that has most of them; each array is on one."""
    taken: Counter[jax.Device] = Counter()
    for array in arrays:
        taken[array.device] += array.nbytes
    return max(taken.values(), default=0)


def _copied(arrays: list[jax.Array]) -> list[jax.Array]:
    """Copies of the arrays, each on its device in memory of its own; by no program, which would be
    compiled first. Raises `jax.errors.JaxRuntimeError`."""
    copies = [jax.device_put(array, array.device, may_alias=False) for array in arrays]
    return jax.block_until_ready(copies)  # where there is no memory for one, it may say so only now


@lru_cache(4096)
def placed_boxes(
    sharding: jax.sharding.Sharding, shape: tuple[int, ...]
) -> tuple[tuple[Box, tuple[jax.Device, ...]], ...]:
    """The distinct boxes that devices hold of an array, each with those that hold it; the same on
    every process."""
    found = boxes_of(sharding.devices_indices_map(shape), shape)
    return tuple((box, tuple(devices)) for box, devices in found.items())
