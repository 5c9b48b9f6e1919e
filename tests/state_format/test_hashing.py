"""Digests say how they were made, so that what one machine wrote another can verify, or refuses."""

from __future__ import annotations

import hashlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xxhash

from jaxtrain.checkpoint import CheckpointManager, DamagedCheckpoint, SavePolicy
from jaxtrain.state_format import hashing
from jaxtrain.state_format.chunks import Box, digest
from jaxtrain.state_format.hashing import hasher
from jaxtrain.state_format.manifest import read_manifest


@pytest.fixture
def without_xxhash(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(hashing, "XXH3", None)
    return monkeypatch


def save(directory: Path, step: int) -> dict[str, jax.Array]:
    state = {"w": jnp.arange(step, step + 4096.0), "step": jnp.int32(step)}
    with CheckpointManager(directory, SavePolicy(every=1)) as manager:
        manager.save(step, state, {})
    return state


def restore(directory: Path, step: int) -> dict[str, jax.Array]:
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    template = {
        "w": jax.ShapeDtypeStruct((4096,), jnp.float32, sharding=here),
        "step": jax.ShapeDtypeStruct((), jnp.int32, sharding=here),
    }
    with CheckpointManager(directory, SavePolicy(every=1)) as manager:
        assert manager.newest_whole() == step
        return manager.restore(step, template)[0]


def digests(directory: Path, step: int) -> list[str]:
    chunks = read_manifest(directory / str(step)).chunks
    return [chunk.digest for held in chunks.values() for chunk in held]


def test_digests_are_those_of_the_algorithms_they_name(without_xxhash: pytest.MonkeyPatch) -> None:
    made = hasher(b"abc")
    made.update(b"def")
    wanted = hashlib.sha256(b"abcdef").hexdigest()
    assert made.hexdigest() == f"sha256:{wanted}"
    without_xxhash.undo()
    for like in (None, xxhash.xxh3_128_hexdigest(b"")):
        made = hasher(b"abc", like)
        made.update(b"def")
        assert made.hexdigest() == xxhash.xxh3_128_hexdigest(b"abcdef")
    assert hasher(b"", f"sha256:{wanted}").hexdigest().startswith("sha256:")


def test_what_is_written_without_xxhash_is_read_with_and_without(
    tmp_path: Path, without_xxhash: pytest.MonkeyPatch
) -> None:
    state = save(tmp_path, 1)
    assert all(each.startswith("sha256:") for each in digests(tmp_path, 1))
    for _ in ("without", "with"):
        found = restore(tmp_path, 1)
        assert all(np.array_equal(found[name], state[name]) for name in state)
        without_xxhash.undo()
    save(tmp_path, 2)
    assert not any(":" in each for each in digests(tmp_path, 2))


def test_a_flipped_byte_is_found_without_xxhash(
    tmp_path: Path, without_xxhash: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1)
    (pack,) = (tmp_path / "1" / "state").glob("*.pack")
    data = bytearray(pack.read_bytes())
    data[100] ^= 1
    pack.write_bytes(data)
    with pytest.raises(DamagedCheckpoint, match="have digest sha256:"):
        restore(tmp_path, 1)


def test_a_digest_is_of_a_place_a_shape_a_type_and_bytes() -> None:
    zeros = np.zeros((2, 2), np.float32)
    places = [("a", (0, 0)), ("b", (0, 0)), ("a", (2, 0)), ("a", (0, 2))]
    made = {digest(leaf, Box(start, (2, 2)), zeros) for leaf, start in places}
    made |= {digest("a", Box((0, 0), (4,)), zeros), digest("a", Box((0, 0), (2, 2)), zeros + 1)}
    made |= {digest("a", Box((0, 0), (2, 2)), zeros.view(np.int32))}
    assert len(made) == 7
