"""Parameters that are used behind the stack: gathered beside its last layer, scattered beside its
pull-back."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_stack import (
    EMBED,
    ROWS,
    SPLIT,
    SPLIT_EXTRAS,
    a_batch,
    assert_same,
    body,
    gather_and_scatter,
    name_of,
    plain,
)

from jaxtrain.collectives.recursive import Recursive
from jaxtrain.collectives.vary import vary
from jaxtrain.nn.stack import LayerLoop, Layers
from tests.permutes import bodies, tied_permutes


def gradients_on_four(loop, flops_per_byte):
    """Those of a loss of layers and a table behind them, split over four devices."""
    mesh = jax.make_mesh((4,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    gathered, summed = gather_and_scatter(Recursive())

    def summed_in_fp32(grads):
        return summed({k: g.astype(jnp.float32) for k, g in grads.items()})

    def on_device(params, table, x, dy, extras):
        params, table, x, dy, extras = jax.tree.map(
            lambda a: vary(a, ("fsdp",)), (params, table, x, dy, extras)
        )
        layers = Layers(
            body, gathered, summed, loop, flops_per_byte=flops_per_byte,
            fetch_tables=gathered, scatter_tables=summed_in_fp32,
        )  # fmt: skip

        def loss(params, table, x):
            y, tables = layers.with_tables(params, x, extras, {"table": table})
            return jnp.sum(jnp.tanh(y @ tables["table"]) * dy)

        grads, of_table, dx = jax.grad(loss, (0, 1, 2))(params, table, x)
        grads = {k: g if g.ndim > 2 else jax.lax.psum(g, "fsdp") for k, g in grads.items()}
        return {**grads, "table": of_table, "x": dx}

    specs = (SPLIT, ROWS, ROWS, ROWS, SPLIT_EXTRAS)
    outs = {**SPLIT, "table": ROWS, "x": ROWS}
    return jax.jit(
        jax.shard_map(on_device, mesh=mesh, in_specs=specs, out_specs=outs, check_vma=False)
    )


def a_batch_and_a_table(layers):
    params, x, dy, extras = a_batch(layers)
    table = np.random.default_rng(2).normal(size=(EMBED, EMBED)) / EMBED**0.5
    return params, jnp.asarray(table, jnp.float32), x, dy, extras


LOOPS = [
    (LayerLoop(), 0.0),
    (LayerLoop(), None),
    (LayerLoop(reshard_after_forward=False), 0.0),
    (LayerLoop(prefetch=False), None),
    (LayerLoop(unroll=True), None),
]


@pytest.mark.parametrize(
    ("loop", "flops_per_byte"), LOOPS, ids=lambda v: name_of(v) if isinstance(v, LayerLoop) else v
)
@pytest.mark.parametrize("layers", [1, 3])
def test_gradients_are_those_of_one_device(loop, flops_per_byte, layers):
    params, table, x, dy, extras = given = a_batch_and_a_table(layers)

    def loss(params, table, x):
        y = plain(params, x, extras=lambda: extras, fetch=lambda p: p)
        return jnp.sum(jnp.tanh(y @ table) * dy)

    grads, of_table, dx = jax.jit(jax.grad(loss, (0, 1, 2)))(params, table, x)
    wanted = {**grads, "table": of_table, "x": dx}
    assert_same(gradients_on_four(loop, flops_per_byte)(*given), wanted)


@pytest.mark.parametrize("loop", [LayerLoop(), LayerLoop(prefetch=False)], ids=name_of)
def test_the_gradient_of_a_table_has_its_dtype(loop):
    params, table, *others = a_batch_and_a_table(2)
    narrow = table.astype(jnp.bfloat16)
    found = jax.eval_shape(gradients_on_four(loop, None), params, narrow, *others)
    assert found["table"].dtype == jnp.bfloat16 and found["up"].dtype == jnp.float32


def test_permutes_of_a_table_are_tied_to_products_of_the_last_layer():
    """Forward to its two products, back to the first two of its pull-back."""
    traced = gradients_on_four(LayerLoop(), 0.0).trace(*a_batch_and_a_table(3))
    outside, forward, backward = map(tied_permutes, bodies(traced.jaxpr.jaxpr)[1:])
    hops = 2 * 2  # of two matrices' gather, or scatter; of the table's half as many
    of_table, of_layer = hops // 2 + hops // 2, hops
    assert [len(outside), len(forward), len(backward)] == [of_table + of_layer, hops, 2 * hops]
