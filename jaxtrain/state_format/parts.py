"""Which process writes which part of which array, in the boxes of the stored leaves."""

from __future__ import annotations

from functools import lru_cache

import jax
import numpy as np

from jaxtrain.state_format.chunks import Box, Part, boxes_of
from jaxtrain.state_format.slots import AS_THEY_REST, AllSlots, pieces_of


def owned_parts(arrays: dict[str, jax.Array], slots: AllSlots = AS_THEY_REST) -> list[Part]:
    """What this process writes of `arrays`: of each box that devices hold, one of them writes it,
    cut into boxes of the stored leaf where it rests in `slots`. What is padding nobody writes.

    Replicas take turns, so that processes which hold the same arrays share the work. Copies start
    for all arrays before one is waited for; on a CPU device there is no copy: the array is held,
    and a step that donates it writes elsewhere. No program runs on the devices.
    """
    here, turn = [], 0
    for leaf, array in arrays.items():
        shards = {shard.device: shard.data for shard in array.addressable_shards}
        for box, devices in placed_boxes(array.sharding, tuple(array.shape)):
            pieces = pieces_of(slots.get(leaf), box)
            data = shards.get(devices[turn % len(devices)]) if pieces else None
            turn += 1
            if data is not None:
                data.copy_to_host_async()
                here.append((leaf, pieces, data))
    parts = []
    for leaf, pieces, data in here:
        host = np.asarray(data)
        parts += [Part(leaf, piece.box, host[piece.at]) for piece in pieces]
    return parts


@lru_cache(4096)
def placed_boxes(
    sharding: jax.sharding.Sharding, shape: tuple[int, ...]
) -> tuple[tuple[Box, tuple[jax.Device, ...]], ...]:
    """The distinct boxes that devices hold of an array, each with those that hold it; the same on
    every process."""
    found = boxes_of(sharding.devices_indices_map(shape), shape)
    return tuple((box, tuple(devices)) for box, devices in found.items())
