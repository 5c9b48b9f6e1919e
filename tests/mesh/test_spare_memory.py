"""What a device has room for beside a program: by its own word, and the compiler's of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxtrain.mesh.spare_memory import spare_bytes, working_bytes


@pytest.mark.parametrize(
    ("limits_and_uses", "working", "spare"),
    [
        ([(1000, 400)], 300, 280),  # 2% of it are left free
        ([(1000, 400), (1000, 600)], 300, 80),  # the fullest
        ([(1000, 400), (1000, 700)], 300, 0),  # not below nothing
        ([(1000, None)], 0, 0),  # it does not say what it holds
        ([None], 0, 0),  # nor anything: a CPU
        ([], 0, 0),
    ],
)
def test_spare_is_what_neither_arrays_nor_the_program_take(
    limits_and_uses: list[Any], working: int, spare: int
) -> None:
    def stats(of: tuple[int, int | None] | None) -> dict[str, int] | None:
        given = zip(("bytes_limit", "bytes_in_use"), of or (), strict=False)
        return {name: n for name, n in given if n is not None} or None

    devices: Any = [SimpleNamespace(memory_stats=lambda of=of: stats(of)) for of in limits_and_uses]
    program: Any = SimpleNamespace(memory_analysis=lambda: takes(working))
    assert spare_bytes(devices, program) == spare
    assert working or spare_bytes(devices) == spare  # no program, nothing beside


def takes(n: int) -> Any:
    """What XLA says of a program that takes `n` bytes beside its arguments."""
    return SimpleNamespace(output_size_in_bytes=n, alias_size_in_bytes=n, temp_size_in_bytes=n)


def test_a_program_is_not_asked_where_a_device_says_nothing() -> None:
    """It is waste, and what stands in for a program in a test cannot be asked."""
    silent: Any = [SimpleNamespace(memory_stats=lambda: None)]
    program: Any = object()
    assert spare_bytes(silent, program) == 0


def test_a_program_takes_its_temporaries_and_what_it_does_not_write_in_place() -> None:
    x = jnp.ones((64, 64))
    size = x.nbytes

    def out_of_place(x: jax.Array) -> jax.Array:
        return x + 1

    def through_another(x: jax.Array) -> jax.Array:
        return (x @ x) @ x

    def took(function: Any, **options: Any) -> int:
        return working_bytes(jax.jit(function, **options).lower(x).compile())

    assert took(out_of_place) == size
    assert took(out_of_place, donate_argnums=0) == 0
    assert took(through_another) >= 2 * size  # what it returns, and x @ x
