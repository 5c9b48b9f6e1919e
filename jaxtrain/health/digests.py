"""A digest of what each device holds of each leaf of the state, computed without communication.

Copies of a leaf must have equal digests, bit for bit, and a step repeated from the same state must
end in equal ones: a difference was computed or stored wrongly (Dixit et al., "Silent Data
Corruptions at Scale", 2021).
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxtrain.mesh.sharding import named_sharding, partition_spec
from jaxtrain.step.state import TrainState

SPREAD = 0x9E3779B1
"""2^32 / golden ratio (Knuth's hashing constant): neighbours get different weights."""

DigestRows = dict[int, np.ndarray]
"""Device id -> a digest for each leaf, uint32."""


def digest(x: jax.Array) -> jax.Array:
    """Digest of the bits of x, uint32: the sum of word i times an odd w(i), modulo 2^32. A change
    of one word always changes it, since an odd weight has an inverse modulo 2^32."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.uint8)
    size = x.dtype.itemsize
    words = lax.bitcast_convert_type(x, f"uint{8 * size}" if size < 8 else jnp.uint32)
    words = words.astype(jnp.uint32)
    index, stride = jnp.zeros(words.shape, jnp.uint32), 1
    for dim in reversed(range(words.ndim)):
        index += lax.broadcasted_iota(jnp.uint32, words.shape, dim) * np.uint32(stride % 2**32)
        stride *= words.shape[dim]
    weights = (index * np.uint32(SPREAD)) << np.uint32(1) | np.uint32(1)
    return jnp.sum(words * weights, dtype=jnp.uint32)


def digests_of(program: jax.stages.Compiled, state: TrainState) -> DigestRows:
    """Digests of this process's devices, by a compiled program; `state` is kept."""
    shards = program(state).addressable_shards
    return {shard.device.id: np.asarray(shard.data)[0] for shard in shards}


def compile_digests(
    abstract: TrainState, shardings: TrainState, mesh: jax.sharding.Mesh
) -> jax.stages.Compiled:
    """Compiles a program in which each device digests its shard of each leaf."""
    specs = jax.tree.map(lambda sharding: sharding.spec, shardings)
    every = (tuple(mesh.axis_names), ())

    def rows(state: TrainState) -> jax.Array:
        return jnp.stack([digest(leaf) for leaf in jax.tree.leaves(state)])[None]

    on_devices = jax.shard_map(
        rows, mesh=mesh, in_specs=(specs,), out_specs=partition_spec(every), check_vma=False
    )
    out = named_sharding(mesh, every)
    return (
        jax.jit(on_devices, in_shardings=(shardings,), out_shardings=out).lower(abstract).compile()
    )


class Copies(NamedTuple):
    """The devices that hold the same part of one leaf. bytes: size of that part."""

    leaf: int
    devices: tuple[int, ...]
    bytes: int


def copies_of(abstract: TrainState, shardings: TrainState) -> list[Copies]:
    """Copies of every leaf, from its sharding."""
    copies, devices_of = [], dict[Any, list[tuple[int, ...]]]()
    leaves, places = jax.tree.leaves(abstract), jax.tree.leaves(shardings)
    for number, (leaf, sharding) in enumerate(zip(leaves, places, strict=True)):
        if (sharding, leaf.shape) not in devices_of:
            groups = defaultdict(list)
            for device, part in sharding.devices_indices_map(leaf.shape).items():
                box = tuple(cut.indices(n)[:2] for cut, n in zip(part, leaf.shape, strict=True))
                groups[box].append(device.id)
            devices_of[sharding, leaf.shape] = [
                tuple(sorted(devices)) for devices in groups.values()
            ]
        parts = devices_of[sharding, leaf.shape]
        itemsize = 4 if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf.dtype.itemsize
        copies += [Copies(number, devices, leaf.size * itemsize // len(parts)) for devices in parts]
    return copies


class LeafDifference(NamedTuple):
    """A part of a leaf whose copies differ. by_majority: True if more than half of the copies
    agree, and `devices` hold the others; False if not, and `devices` hold all copies, of which at
    least one is wrong."""

    path: str
    devices: tuple[int, ...]
    by_majority: bool


def compare(
    rows: Mapping[int, np.ndarray], copies: list[Copies], paths: list[str]
) -> list[LeafDifference]:
    """Differences between copies. rows: digests of all devices; paths: of the leaves."""
    differences = []
    for leaf, devices, _ in copies:
        digests = {device: int(rows[device][leaf]) for device in devices}
        if len(set(digests.values())) == 1:
            continue
        values = list(digests.values())
        usual = max(set(values), key=values.count)
        by_majority = values.count(usual) > len(values) / 2
        wrong = tuple(device for device in devices if not by_majority or digests[device] != usual)
        differences.append(LeafDifference(paths[leaf], wrong, by_majority))
    return differences


def certain(
    differences: Iterable[LeafDifference], process_of: Mapping[int, int]
) -> tuple[int, ...]:
    """Processes that certainly have a wrong device. process_of: device id -> its process."""
    wrong = set[int]()
    for difference in differences:
        processes = {process_of[device] for device in difference.devices}
        wrong |= processes if difference.by_majority or len(processes) == 1 else set()
    return tuple(sorted(wrong))


def sole(devices: Iterable[int], process_of: Mapping[int, int]) -> tuple[int, ...]:
    """The process of `devices` if it is a single one of several, else empty: an error of one
    process reaches others through sums."""
    processes = {process_of[device] for device in devices}
    return tuple(processes) if len(processes) == 1 < len(set(process_of.values())) else ()


class Shared(NamedTuple):
    """Copies whose parts are held by the same processes: one process summarises all of them in a
    single digest."""

    processes: frozenset[int]
    copies: tuple[Copies, ...]


def shared_copies(copies: list[Copies], process_of: Mapping[int, int]) -> list[Shared]:
    """Copies grouped by the processes that hold them; parts held by one device are left out."""
    groups = defaultdict[frozenset[int], list[Copies]](list)
    for part in copies:
        if len(part.devices) > 1:
            groups[frozenset(process_of[device] for device in part.devices)].append(part)
    return [Shared(processes, tuple(parts)) for processes, parts in groups.items()]


def summary(rows: DigestRows, shared: Shared) -> str:
    """Hex digest of shared copies in a process's rows; empty if its devices differ."""
    hasher = hashlib.blake2b(digest_size=8)
    for leaf, devices, _ in shared.copies:
        own = {int(rows[device][leaf]) for device in devices if device in rows}
        if len(own) > 1:
            return ""
        hasher.update(own.pop().to_bytes(4, "little"))
    return hasher.hexdigest()


def differing(all_summaries: Sequence[Sequence[str]], shared: Sequence[Shared]) -> list[Shared]:
    """Groups of copies that differ. all_summaries: for each process the `summary` of every group
    that it holds parts of, in order."""
    texts_of: list[set[str]] = [set() for _ in shared]
    for process, summaries in enumerate(all_summaries):
        indices = [number for number, group in enumerate(shared) if process in group.processes]
        for number, text in zip(indices, summaries, strict=True):
            texts_of[number].add(text)
    return [
        group
        for group, texts in zip(shared, texts_of, strict=True)
        if "" in texts or len(texts) > 1
    ]


def covered(copies: list[Copies]) -> float:
    """Share of the state's bytes, each part counted once, that two or more devices hold."""
    total = sum(part.bytes for part in copies)
    return sum(part.bytes for part in copies if len(part.devices) > 1) / max(total, 1)
