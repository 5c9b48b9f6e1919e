"""Sums in bfloat16: the bits a model of them in NumPy has, on every device, by every algorithm."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxtrain.collectives import ring
from jaxtrain.collectives.lax_form import Lax
from jaxtrain.collectives.recursive import Recursive
from jaxtrain.collectives.ring import Ring
from jaxtrain.collectives.rounded import Rounded
from jaxtrain.collectives.vary import same

AXES = ("data", "fsdp")


def summed(by: Any, sizes: tuple[int, ...]) -> Any:
    """The jitted sum over all devices of an array whose entry d device d holds."""
    names = AXES[: len(sizes)]
    devices = np.array(jax.devices()[: math.prod(sizes)]).reshape(sizes)
    mesh = jax.sharding.Mesh(devices, names, axis_types=(jax.sharding.AxisType.Auto,) * len(sizes))

    def local(x: jax.Array) -> jax.Array:
        return same(by.all_reduce(x[0], names), names)[None]

    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P(names), out_specs=P()))


@pytest.mark.parametrize("by", [Lax(), Ring(), Ring(1, unroll=False), Recursive()], ids=str)
@pytest.mark.parametrize(("sizes", "shape"), [((3,), (7, 5)), ((2, 4), (33,)), ((1,), (3,))])
def test_terms_are_rounded_once_and_so_is_their_sum(
    by: Any, sizes: tuple[int, ...], shape: tuple[int, ...]
) -> None:
    """Of one sign of exponent, so that no sum in fp32 rounds, whatever its order."""
    rng = np.random.default_rng(5)
    signs = rng.choice([-1.0, 1.0], (math.prod(sizes), *shape))
    x = (signs * rng.uniform(0.5, 4, signs.shape)).astype(np.float32)
    found = summed(Rounded(by), sizes)(x)
    terms = x.astype(ml_dtypes.bfloat16).astype(np.float64)
    wanted = terms.sum(0).astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)
    assert found.dtype == np.float32
    for shard in found.addressable_shards:
        np.testing.assert_array_equal(shard.data[0], wanted)


def test_what_travels_is_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """(n - 1)/n of the padded array to the owners, and as much back."""
    sent: list[jax.Array] = []
    permute = ring.permute

    def noted(x: jax.Array, *where: Any) -> jax.Array:
        sent.append(x)
        return permute(x, *where)

    monkeypatch.setattr(ring, "permute", noted)
    summed(Rounded(Ring(1)), (4,)).lower(jnp.zeros((4, 10), jnp.float32))
    assert {each.dtype for each in sent} == {jnp.dtype(jnp.bfloat16)}
    assert sum(each.size for each in sent) == 2 * 3 * 12 // 4


def test_infinities_and_what_is_not_a_number_arrive() -> None:
    """A step whose gradients overflow is found by its sums."""
    x = np.ones((2, 4), np.float32)
    x[0, 1], x[1, 2], x[1, 3] = np.nan, np.inf, 3e38
    found = np.asarray(summed(Rounded(), (2,))(x))[0]
    assert found[0] == 2
    assert np.isnan(found[1])
    assert found[2] == np.inf
    assert found[3] == np.float32(ml_dtypes.bfloat16(3e38))


def test_a_field_that_is_no_algorithm_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"by='ring' must be an algorithm's value; use by=Ring\(\)"
    ):
        Rounded("ring")  # pyrefly: ignore
