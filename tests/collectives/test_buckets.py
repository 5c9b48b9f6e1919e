"""Small leaves together: nothing lost, nothing mixed, and one bucket however many there are."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.collectives.buckets import buckets

AXES = {"a": ("data",), "b": ("data", "fsdp"), "c": ("data",), "d": (), "e": ("data",)}
LEAVES = {
    "a": jnp.arange(6.0).reshape(2, 3),
    "b": jnp.arange(4.0),
    "c": jnp.float32(7),
    "d": jnp.arange(3.0),
    "e": jnp.arange(5),
}


@pytest.mark.parametrize(
    ("small_leaf", "wanted"),
    [
        (10**9, [("a", "c"), ("b",), ("e",)]),
        (5, [("b",), ("c",), ("e",)]),
        (0, []),
    ],
)
def test_a_bucket_is_of_one_set_of_axes_and_one_dtype(small_leaf, wanted):
    found = buckets(LEAVES, AXES, small_leaf)
    assert [bucket.names for bucket in found] == wanted
    for bucket in found:
        assert {AXES[name] for name in bucket.names} == {bucket.axes}


def test_parted_is_the_inverse_of_joined():
    for bucket in buckets(LEAVES, AXES, 10**9):
        flat = bucket.concatenate(LEAVES)
        assert flat.shape == (sum(LEAVES[name].size for name in bucket.names),)
        back = bucket.split(flat, LEAVES)
        assert back.keys() == set(bucket.names)
        for name, leaf in back.items():
            np.testing.assert_array_equal(leaf, LEAVES[name], strict=True)


@pytest.mark.parametrize("count", [1, 10, 100])
def test_the_number_of_buckets_does_not_grow_with_the_leaves(count):
    leaves = {f"{i}": jnp.ones(i + 1) for i in range(count)}
    axes = dict.fromkeys(leaves, ("data",))
    assert [len(b.names) for b in buckets(leaves, axes, 200)] == [count]
