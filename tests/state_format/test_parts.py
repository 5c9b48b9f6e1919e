"""What is held of a state to be written outlives the arrays it was read from."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxtrain.state_format import parts
from jaxtrain.state_format.parts import owned_parts


def placed(shape: tuple[int, ...], *split: str | None) -> jax.Array:
    mesh = jax.make_mesh((2, 4), ("a", "b"))
    numbers = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    return jax.device_put(numbers, NamedSharding(mesh, PartitionSpec(*split)))


# Of x [16, 8] in halves, copied four times: a device that takes a turn has 256 bytes, and one of
# y [8] in eighths 4. Turns go round: x's two boxes to the first of each half, y's each its own.
MOST = 256 + 4


@pytest.mark.parametrize("spare", [0, MOST - 1, MOST])
def test_parts_are_the_state_as_it_was(spare: int) -> None:
    """Copied on the devices exactly where the fullest has the room; else on the host already."""
    arrays = {"x": placed((16, 8), "a"), "y": placed((8,), ("a", "b"))}
    expected = {name: np.array(array) for name, array in arrays.items()}
    owned = owned_parts(arrays, spare_bytes=spare)
    beside = [isinstance(data, jax.Array) for *_, data in owned.pending]
    assert beside == [spare == MOST] * len(owned.pending)
    if beside[0]:
        for array in arrays.values():
            array.delete()  # as a donated one is
    found = {name: np.full(array.shape, np.nan) for name, array in expected.items()}
    for part in owned.take():
        where = tuple(slice(a, a + n) for a, n in zip(*part.box, strict=True))
        assert np.isnan(found[part.leaf][where]).all()
        found[part.leaf][where] = part.data
    for name, array in expected.items():
        assert np.array_equal(found[name], array)
    assert owned.pending == [] and owned.take() == [] and not owned.copy_failure


def test_where_a_copy_fails_on_a_device_the_host_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused at once, or only when it is waited for. An interrupt is not caught."""
    array = placed((16, 8), "a")
    refused = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory\nallocating 7 bytes")

    def refuse(*args: Any, **options: Any) -> Any:
        raise refused

    for function in ("device_put", "block_until_ready"):
        with monkeypatch.context() as patch:
            patch.setattr(parts.jax, function, refuse)
            owned = owned_parts({"x": array}, spare_bytes=MOST)
        assert owned.copy_failure == "RESOURCE_EXHAUSTED: Out of memory"
        halves = {part.box[0][0]: part.data for part in owned.take()}
        assert np.array_equal(np.concatenate([halves[0], halves[8]]), array)
    refused = KeyboardInterrupt()
    monkeypatch.setattr(parts.jax, "device_put", refuse)
    with pytest.raises(KeyboardInterrupt):
        owned_parts({"x": array}, spare_bytes=MOST)
