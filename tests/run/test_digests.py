"""What each device holds, as a number: every change shows, and copies are told from parts."""

from __future__ import annotations

import random
from collections import defaultdict
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.health.digests import (
    Copies,
    DigestRows,
    LeafDifference,
    certain,
    compare,
    compile_digests,
    copies_of,
    covered,
    differing,
    digest,
    digests_of,
    shared_copies,
    sole,
    summary,
)
from jaxtrain.mesh.mesh import make_mesh, mesh_from_axes
from jaxtrain.mesh.sharding import named_sharding

DTYPES = ("float32", "bfloat16", "float16", "int32", "uint8", "bool", "float8_e4m3fn")


def bits(shape: tuple[int, ...], dtype: str) -> jax.Array:
    size = jnp.dtype(dtype).itemsize
    raw = np.random.default_rng(0).integers(0, 256, (*shape, size), np.uint8)
    if dtype == "bool":
        return jnp.asarray(raw[..., 0] % 2 == 1)
    return jnp.asarray(raw.view(jnp.dtype(dtype))[..., 0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (5,), (3, 4), (2, 3, 4)])
def test_a_change_of_any_bit_shows(shape: tuple[int, ...], dtype: str) -> None:
    x = np.array(bits(shape, dtype))
    found = [int(digest(jnp.asarray(x)))]
    flat = x.reshape(-1).view(np.uint8)
    for place in range(flat.size) if flat.size < 20 else (0, 7, flat.size - 1):
        for bit in range(1 if dtype == "bool" else 8):
            flat[place] ^= 1 << bit
            found.append(int(digest(jnp.asarray(x))))
            flat[place] ^= 1 << bit
    assert found[0] not in found[1:]


def test_it_is_the_sum_it_says_it_is() -> None:
    x = np.asarray(bits((3, 5), "float32"))
    words = [int(word) for word in x.reshape(-1).view(np.uint32)]
    weights = [((2 * i * 0x9E3779B1) | 1) % 2**32 for i in range(len(words))]
    wanted = sum(word * weight for word, weight in zip(words, weights, strict=True)) % 2**32
    assert int(digest(jnp.asarray(x))) == wanted
    assert int(digest(jnp.asarray(x[::-1]))) != wanted, "an order is told from another"


def test_a_key_has_the_digest_of_its_data() -> None:
    keys = jax.random.split(jax.random.key(0), 3)
    assert int(digest(keys)) == int(digest(jax.random.key_data(keys)))


SPLITS = {
    "whole": ((), ()),
    "fsdp": (("fsdp",), ()),
    "data and fsdp": (("data",), ("fsdp",)),
    "both on one dim": (("data", "fsdp"), ()),
}


def test_copies_are_those_of_equal_parts_and_only_they_are_compared() -> None:
    """On data=2 x fsdp=4: of each leaf, however it is split, the devices that hold the same
    numbers; what NumPy finds in their buffers is the judge."""
    mesh = make_mesh(mesh_from_axes(data=2, fsdp=4))
    state = {
        name: jax.device_put(bits((8, 12), "float32"), named_sharding(mesh, split))
        for name, split in SPLITS.items()
    }
    places = jax.tree.map(lambda leaf: leaf.sharding, state)
    rows = digests_of(compile_digests(state, places, mesh), state)
    assert sorted(rows) == [device.id for device in jax.devices()[:8]]
    copies, names = copies_of(state, places), sorted(state)
    for number, name in enumerate(names):
        same = defaultdict(list)
        for shard in state[name].addressable_shards:
            same[np.asarray(shard.data).tobytes()].append(shard.device.id)
            assert int(rows[shard.device.id][number]) == int(digest(jnp.asarray(shard.data)))
        found = [each.devices for each in copies if each.leaf == number]
        assert sorted(found) == sorted(tuple(sorted(each)) for each in same.values())
    assert compare(rows, copies, names) == []
    assert covered(copies) == pytest.approx(2 / 4), "two leaves lie on one device each"


def rows_of(*digests: int) -> dict[int, np.ndarray]:
    return {device: np.asarray([value], np.uint32) for device, value in enumerate(digests)}


DIFFERENCES = {
    "one of three": ((7, 9, 7), LeafDifference("w", (1,), True)),
    "two of five": ((9, 7, 7, 8, 7), LeafDifference("w", (0, 3), True)),
    "one of two": ((7, 9), LeafDifference("w", (0, 1), False)),
    "two and two": ((7, 9, 9, 7), LeafDifference("w", (0, 1, 2, 3), False)),
    "all of three": ((7, 8, 9), LeafDifference("w", (0, 1, 2), False)),
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_most_of_three_or_more_name_the_odd_one(name: str) -> None:
    digests, wanted = DIFFERENCES[name]
    copies = [Copies(0, tuple(range(len(digests))), 4)]
    assert compare(rows_of(*digests), copies, ["w"]) == [wanted]
    assert compare(rows_of(*[7] * len(digests)), copies, ["w"]) == []
    assert compare(rows_of(*digests), [Copies(0, (n,), 4) for n in range(2)], ["w"]) == []


def meshes(data: int, fsdp: int, tensor: int, leaves: int) -> list[Copies]:
    """Of leaves that are whole, or split over one axis or both, by turns; device numbers as the
    axes are named, the last one the fastest."""
    ids = {at: n for n, at in enumerate(product(range(data), range(fsdp), range(tensor)))}
    found = []
    for leaf in range(leaves):
        split = [(), (1,), (2,), (1, 2)][leaf % 4]
        groups = defaultdict(list)
        for at, device in ids.items():
            groups[tuple(at[axis] for axis in split)].append(device)
        found += [Copies(leaf, tuple(each), 4) for each in groups.values()]
    return found


def faulty(copies: list[Copies], drawn: random.Random, leaves: int, wrong: int) -> DigestRows:
    """Rows of all devices that agree, but for `wrong` of their digests."""
    devices = sorted({device for each in copies for device in each.devices})
    rows = {device: np.zeros(leaves, np.uint32) for device in devices}
    for leaf, held, _ in copies:
        value = drawn.getrandbits(32)
        for device in held:
            rows[device][leaf] = value
    for _ in range(wrong):
        rows[drawn.choice(devices)][drawn.randrange(leaves)] ^= 1 + drawn.randrange(3)
    return rows


@pytest.mark.parametrize("axes", [(2, 2, 2), (4, 2, 1), (1, 4, 2), (3, 1, 4), (8, 1, 1)])
@pytest.mark.parametrize("a_process", [1, 2, 4, 8])
def test_digests_of_processes_find_what_all_rows_find(axes, a_process: int) -> None:
    """With so many devices in each process; sometimes in an order that crosses them."""
    leaves, drawn = 9, random.Random(str((axes, a_process)))
    copies, names = meshes(*axes, leaves), list(map(str, range(leaves)))
    devices = sorted({device for each in copies for device in each.devices})
    for wrong in (0, 0, 1, 1, 1, 2, 3, 20):
        order = devices if wrong != 3 else drawn.sample(devices, len(devices))
        process_of = {device: at // a_process for at, device in enumerate(order)}
        rows = faulty(copies, drawn, leaves, wrong)
        shared = shared_copies(copies, process_of)
        told = [
            [
                summary({d: rows[d] for d in devices if process_of[d] == process}, each)
                for each in shared
                if process in each.processes
            ]
            for process in range(max(process_of.values()) + 1)
        ]
        plain = compare(rows, copies, names)
        unlike = {each for some in differing(told, shared) for each in some.copies}
        assert compare(rows, [each for each in copies if each in unlike], names) == plain
        assert bool(unlike) == bool(plain), "nothing more is asked for where nothing differs"
        assert max(map(len, told)) <= 2 * 4, "a text for each kind of split, not for each leaf"


CERTAIN = {
    "most are against it": ([LeafDifference("w", (2,), True)], (1,)),
    "one of two": ([LeafDifference("w", (0, 2), False)], ()),
    "one of two of the same process": ([LeafDifference("w", (2, 3), False)], (1,)),
    "one of two, and elsewhere most are against one": (
        [LeafDifference("w", (0, 2), False), LeafDifference("v", (2, 5), True)], (1, 2),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CERTAIN)
def test_who_is_wrong_for_certain(name: str) -> None:
    found, processes = CERTAIN[name]
    assert certain(found, {device: device // 2 for device in range(8)}) == processes


def test_one_alone_that_came_out_unlike_itself_is_wrong() -> None:
    """Of several: what is wrong in the sums of one is wrong in all."""
    process_of = {device: device // 2 for device in range(6)}
    assert sole([3], process_of) == sole([2, 3], process_of) == (1,)
    assert sole([1, 2], process_of) == sole(range(6), process_of) == ()
    assert sole([0], {0: 0, 1: 0}) == (), "one process: it may be the program"
