"""A digest of what each device holds of each leaf of the state: nothing is sent for it.

Copies of a leaf must have the same one, bit for bit, and a step that is taken twice from the same
state must end in the same ones: what differs has been computed, or kept, wrongly (Dixit et al.,
"Silent Data Corruptions at Scale", 2021).
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
"""2^32 / golden ratio, as Knuth has it for hashing: neighbours get unlike weights."""

Rows = dict[int, np.ndarray]
"""Device id -> a digest for each leaf, uint32."""


def digest(x: jax.Array) -> jax.Array:
    """A number of the bits of x, uint32: sum of word i times an odd w(i), modulo 2^32. A change of
    any one word changes it, for an odd weight has an inverse there."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.uint8)
    size = x.dtype.itemsize
    words = lax.bitcast_convert_type(x, f"uint{8 * size}" if size < 8 else jnp.uint32)
    words = words.astype(jnp.uint32)
    place, stride = jnp.zeros(words.shape, jnp.uint32), 1
    for dim in reversed(range(words.ndim)):
        place += lax.broadcasted_iota(jnp.uint32, words.shape, dim) * np.uint32(stride % 2**32)
        stride *= words.shape[dim]
    weights = (place * np.uint32(SPREAD)) << np.uint32(1) | np.uint32(1)
    return jnp.sum(words * weights, dtype=jnp.uint32)


def digests_of(program: jax.stages.Compiled, state: TrainState) -> Rows:
    """The digests of this process's devices, by `compile_digests`; the state is kept."""
    shards = program(state).addressable_shards
    return {shard.device.id: np.asarray(shard.data)[0] for shard in shards}


def compile_digests(
    abstract: TrainState, shardings: TrainState, mesh: jax.sharding.Mesh
) -> jax.stages.Compiled:
    """The program by which each device digests what it holds of the leaves."""
    specs = jax.tree.map(lambda where: where.spec, shardings)
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
    """The devices that hold the same part of one leaf. bytes: of that part."""

    leaf: int
    devices: tuple[int, ...]
    bytes: int


def copies_of(abstract: TrainState, shardings: TrainState) -> list[Copies]:
    """Of every leaf, by what its sharding says."""
    found, known = [], dict[Any, list[tuple[int, ...]]]()
    leaves, places = jax.tree.leaves(abstract), jax.tree.leaves(shardings)
    for number, (leaf, where) in enumerate(zip(leaves, places, strict=True)):
        if (where, leaf.shape) not in known:
            groups = defaultdict(list)
            for device, part in where.devices_indices_map(leaf.shape).items():
                box = tuple(cut.indices(n)[:2] for cut, n in zip(part, leaf.shape, strict=True))
                groups[box].append(device.id)
            known[where, leaf.shape] = [tuple(sorted(each)) for each in groups.values()]
        parts = known[where, leaf.shape]
        itemsize = 4 if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf.dtype.itemsize
        found += [Copies(number, each, leaf.size * itemsize // len(parts)) for each in parts]
    return found


class Difference(NamedTuple):
    """Copies of a leaf that are not the same. devices: those that are wrong, where most of three or
    more agree against them; else all that hold it, one of which is."""

    path: str
    devices: tuple[int, ...]
    known: bool


def compare(
    rows: Mapping[int, np.ndarray], copies: list[Copies], paths: list[str]
) -> list[Difference]:
    """The differences between copies. rows: of all devices; paths: of the leaves."""
    found = []
    for leaf, devices, _ in copies:
        digests = {device: int(rows[device][leaf]) for device in devices}
        if len(set(digests.values())) == 1:
            continue
        held = list(digests.values())
        most = max(set(held), key=held.count)
        known = held.count(most) > len(held) / 2
        wrong = tuple(device for device in devices if not known or digests[device] != most)
        found.append(Difference(paths[leaf], wrong, known))
    return found


def certain(found: Iterable[Difference], process_of: Mapping[int, int]) -> tuple[int, ...]:
    """The processes that have a wrong device for certain. process_of: device id -> its process."""
    wrong = set[int]()
    for each in found:
        processes = {process_of[device] for device in each.devices}
        wrong |= processes if each.known or len(processes) == 1 else set()
    return tuple(sorted(wrong))


def sole(devices: Iterable[int], process_of: Mapping[int, int]) -> tuple[int, ...]:
    """The process of devices that came out unlike themselves, where it is one of several, none
    where they are of more: what one computes wrongly reaches others through sums."""
    found = {process_of[device] for device in devices}
    return tuple(found) if len(found) == 1 < len(set(process_of.values())) else ()


class Shared(NamedTuple):
    """Copies that the same processes hold parts of: what one of them has to say of all is one
    digest."""

    processes: frozenset[int]
    copies: tuple[Copies, ...]


def shared_copies(copies: list[Copies], process_of: Mapping[int, int]) -> list[Shared]:
    """Copies by the processes that hold them; without what one device alone holds."""
    found = defaultdict[frozenset[int], list[Copies]](list)
    for each in copies:
        if len(each.devices) > 1:
            found[frozenset(process_of[device] for device in each.devices)].append(each)
    return [Shared(processes, tuple(each)) for processes, each in found.items()]


def summary(mine: Rows, shared: Shared) -> str:
    """Of the rows of one process; "" where devices of its own differ."""
    whole = hashlib.blake2b(digest_size=8)
    for leaf, devices, _ in shared.copies:
        own = {int(mine[device][leaf]) for device in devices if device in mine}
        if len(own) > 1:
            return ""
        whole.update(own.pop().to_bytes(4, "little"))
    return whole.hexdigest()


def differing(told: Sequence[Sequence[str]], shared: Sequence[Shared]) -> list[Shared]:
    """Those of which a difference has been told. told: of each process its `summary` of what it
    holds parts of, in their order."""
    said: list[set[str]] = [set() for _ in shared]
    for process, summaries in enumerate(told):
        held = [number for number, each in enumerate(shared) if process in each.processes]
        for number, text in zip(held, summaries, strict=True):
            said[number].add(text)
    return [each for each, texts in zip(shared, said, strict=True) if "" in texts or len(texts) > 1]


def covered(copies: list[Copies]) -> float:
    """The share of the state's bytes, without copies, that two or more devices hold."""
    whole = sum(each.bytes for each in copies)
    return sum(each.bytes for each in copies if len(each.devices) > 1) / max(whole, 1)
