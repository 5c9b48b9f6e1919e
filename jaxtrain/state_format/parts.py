"""Assignment of each array's parts to processes that write them, in boxes of the stored leaves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import jax
import numpy as np

from jaxtrain.state_format.chunks import Box, Part, boxes_of
from jaxtrain.state_format.slots import AS_THEY_REST, AllSlots, BoxPiece, pieces_of


@dataclass
class OwnedParts:
    """The parts of a state that this process writes; the arrays themselves may be donated.

    pending: of a leaf, pieces of an array on the host, or of a copy on its device that is being
    transferred. copy_failure: why no copy could be made on the devices; empty where none was tried,
    or none failed.
    """

    pending: list[tuple[str, list[BoxPiece], np.ndarray | jax.Array]]
    copy_failure: str = ""

    def take(self) -> list[Part]:
        """Returns the parts once they are on the host, and releases them here: each copy on a
        device as soon as it is transferred. Raises `jax.errors.JaxRuntimeError` where one has
        failed."""
        parts = []
        self.pending.reverse()
        while self.pending:
            leaf, pieces, data = self.pending.pop()
            host = np.asarray(data)
            parts += [Part(leaf, piece.box, host[piece.place]) for piece in pieces]
        return parts


def owned_parts(
    arrays: dict[str, jax.Array], slots: AllSlots = AS_THEY_REST, spare_bytes: int = 0
) -> OwnedParts:
    """Returns the parts of `arrays` that this process writes: each distinct box on the devices is
    written by one of its devices, cut into boxes of the stored leaf where it is in `slots`. Padding
    is not written.

    Replicas take turns, so that processes with the same arrays share the work. The arrays may be
    donated when this returns. If each device has `spare_bytes` of memory for a copy of its parts,
    the copy is made there, and transferred to the host while the next program runs. Else, or if
    that copy fails, this waits for the host's copies, which start for all arrays before the first
    is waited for. On a CPU device there is no copy: the array is referenced, and a step that
    donates it writes elsewhere.

    Raises `jax.errors.JaxRuntimeError` where an array cannot be read.
    """
    local: list[tuple[str, list[BoxPiece], jax.Array]] = []
    turn = 0
    for leaf, array in arrays.items():
        shards = {shard.device: shard.data for shard in array.addressable_shards}
        for box, devices in placed_boxes(array.sharding, tuple(array.shape)):
            pieces = pieces_of(slots.get(leaf), box)
            data = shards.get(devices[turn % len(devices)]) if pieces else None
            turn += 1
            if data is not None:
                local.append((leaf, pieces, data))
    local_arrays = [data for *_, data in local]
    copies, failure = None, ""
    if 0 < _most_on_a_device(local_arrays) <= spare_bytes:
        try:
            copies = _copied(local_arrays)
        except jax.errors.JaxRuntimeError as error:
            failure = str(error).partition("\n")[0] or type(error).__name__
    for array in copies or local_arrays:
        array.copy_to_host_async()
    data_of = copies or [np.asarray(array) for array in local_arrays]
    pairs = zip(local, data_of, strict=True)
    return OwnedParts([(leaf, pieces, data) for (leaf, pieces, _), data in pairs], failure)


def _most_on_a_device(arrays: Iterable[jax.Array]) -> int:
    """Bytes of the arrays on the device that has most of them; each array is on one."""
    device_bytes: Counter[jax.Device] = Counter()
    for array in arrays:
        device_bytes[array.device] += array.nbytes
    return max(device_bytes.values(), default=0)


def _copied(arrays: list[jax.Array]) -> list[jax.Array]:
    """Returns copies of the arrays, each on its device in memory of its own; without a program,
    which would be compiled first. Raises `jax.errors.JaxRuntimeError`."""
    copies = [jax.device_put(array, array.device, may_alias=False) for array in arrays]
    return jax.block_until_ready(copies)  # an allocation may fail only here


@lru_cache(4096)
def placed_boxes(
    sharding: jax.sharding.Sharding, shape: tuple[int, ...]
) -> tuple[tuple[Box, tuple[jax.Device, ...]], ...]:
    """Returns the distinct boxes of an array, each with the devices that have it; the same on every
    process."""
    devices_of = boxes_of(sharding.devices_indices_map(shape), shape)
    return tuple((box, tuple(devices)) for box, devices in devices_of.items())
