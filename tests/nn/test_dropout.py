"""A mask depends on name, step key, layer, row and position, and on nothing else."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxtrain.nn.dropout import DropoutKeys, dropout

ROWS, SEQ, EMBED = 4, 8, 32


def grid(key=0, rows=range(ROWS), positions=range(SEQ)):
    pairs = np.array([(r, p) for r in rows for p in positions], np.int32)
    return DropoutKeys(jax.random.key(key), jnp.asarray(pairs[:, 0]), jnp.asarray(pairs[:, 1]))


def mask(keys, *, rate=0.5, name="mlp", layer=0, embed=EMBED):
    ones = jnp.ones((len(keys.rows), embed))
    return np.asarray(dropout(ones, rate, keys, name=name, layer=layer)) != 0


BASE = mask(grid())


@pytest.mark.parametrize(
    "other",
    [mask(grid(key=1)), mask(grid(), name="attention"), mask(grid(), layer=1),
     mask(grid(rows=range(4, 8))), mask(grid(positions=range(8, 16)))],
    ids=["step key", "name", "layer", "row", "position"],
)  # fmt: skip
def test_each_thing_named_changes_the_mask(other):
    # Independent fair coins agree on half of the elements: 5 standard deviations.
    n = BASE.size
    assert abs((other == BASE).mean() - 0.5) < 5 * 0.5 / n**0.5


def test_no_two_tokens_share_a_mask():
    assert len({row.tobytes() for row in BASE}) == ROWS * SEQ


@pytest.mark.parametrize("order", [slice(0, 7), slice(20, 30), slice(None, None, -1), [3, 17, 5]])
def test_a_part_of_the_tokens_gets_its_part_of_the_mask(order):
    keys = grid()
    index = order if isinstance(order, slice) else jnp.array(order)
    part = DropoutKeys(keys.key, keys.rows[index], keys.positions[index])
    np.testing.assert_array_equal(mask(part), BASE[order])


def test_the_mask_is_the_same_on_eight_devices_and_under_a_traced_layer():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    keys = grid()

    def local(x, rows, positions):
        keys_here = DropoutKeys(keys.key, rows, positions)
        out, _ = jax.lax.scan(
            lambda x, layer: (dropout(x, 0.5, keys_here, name="mlp", layer=layer), None),
            x, jnp.arange(1),
        )  # fmt: skip
        return out

    run = jax.shard_map(local, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    found = jax.jit(run)(jnp.ones((ROWS * SEQ, EMBED)), keys.rows, keys.positions)
    np.testing.assert_array_equal(np.asarray(found) != 0, BASE)


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_the_share_dropped_and_the_scale(rate):
    keys = grid(rows=range(16), positions=range(16))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(256, 64)), jnp.float32)
    y = np.asarray(dropout(x, rate, keys, name="embedding"))
    n = y.size
    assert abs((y == 0).mean() - rate) < 5 * (rate * (1 - rate) / n) ** 0.5
    np.testing.assert_allclose(y, np.where(y == 0, 0, np.asarray(x) / (1 - rate)), rtol=1e-6)


def test_the_gradient_has_the_same_mask_and_scale():
    keys = grid()
    x = jnp.asarray(np.random.default_rng(0).normal(size=(ROWS * SEQ, EMBED)), jnp.float32)
    grad = jax.grad(lambda x: dropout(x, 0.5, keys, name="mlp").sum())(x)
    np.testing.assert_array_equal(grad, 2.0 * BASE)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_dtypes_are_kept(dtype):
    y = dropout(jnp.ones((ROWS * SEQ, EMBED), dtype), 0.25, grid(), name="mlp")
    assert y.dtype == dtype


@pytest.mark.parametrize(("rate", "keys"), [(0.5, None), (0.0, grid())])
def test_evaluation_and_rate_zero_return_the_input_itself(rate, keys):
    x = jnp.ones((ROWS * SEQ, EMBED))
    assert dropout(x, rate, keys, name="mlp") is x
