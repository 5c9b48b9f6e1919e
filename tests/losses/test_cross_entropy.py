"""The chunked, vocabulary-split cross-entropy against optax on dense logits: values, gradients,
and memory."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend.core import jaxprs_in_params
from jax.sharding import PartitionSpec as P

from jaxtrain.collectives.vary import vary
from jaxtrain.losses.cross_entropy import MASKED, HeadConfig, cross_entropy, logits
from jaxtrain.mesh import sharding
from jaxtrain.mesh.roles import roles_of
from jaxtrain.nn.explicit import Explicit
from jaxtrain.nn.local import Local

ROWS, SEQ, EMBED, PADDED = 4, 12, 6, 32


def inputs(dtype=jnp.float32, vocab=PADDED, seed=0, loud=1.0):
    rng = np.random.default_rng(seed)
    x = jnp.asarray(loud * rng.normal(size=(ROWS * SEQ, EMBED)), dtype)
    head = jnp.asarray(rng.normal(size=(PADDED, EMBED)), dtype)
    targets = jnp.asarray(rng.integers(0, vocab, ROWS * SEQ), jnp.int32)
    weights = jnp.asarray(rng.uniform(size=ROWS * SEQ) * (rng.uniform(size=ROWS * SEQ) > 0.3))
    return x, head, targets, weights.astype(jnp.float32)


def dense(x, head, targets, weights, config):
    z = x.astype(jnp.float32) @ head[: config.vocab].astype(jnp.float32).T * config.scale
    if config.softcap is not None:
        z = config.softcap * jnp.tanh(z / config.softcap)
    return jnp.sum(optax.softmax_cross_entropy_with_integer_labels(z, targets) * weights)


def chunked(x, head, targets, weights, config):
    return cross_entropy(Local(), x, head, targets, weights, config, rows=ROWS)


CONFIGS = [
    HeadConfig(PADDED),
    HeadConfig(PADDED, scale=0.25),
    HeadConfig(PADDED, softcap=3.0),
    HeadConfig(25),
    HeadConfig(25, scale=0.5, softcap=2.0),
    HeadConfig(1, softcap=2.0),
]
CASES = [*((c, 13) for c in CONFIGS), (CONFIGS[0], 2048), (CONFIGS[4], 2048), (CONFIGS[4], 1)]


@pytest.mark.parametrize(("config", "chunk_tokens"), CASES, ids=str)
def test_values_and_gradients_equal_the_dense_ones(config, chunk_tokens):
    config = replace(config, chunk_tokens=chunk_tokens)
    x, head, targets, weights = inputs(vocab=config.vocab)
    both = [
        jax.jit(
            jax.value_and_grad(lambda x, h, w, f=f: 3.0 * f(x, h, targets, w, config), (0, 1, 2))
        )
        for f in (chunked, dense)
    ]
    (found, grads), (wanted, oracle) = (f(x, head, weights) for f in both)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
    for g, o in zip(grads, oracle, strict=True):
        np.testing.assert_allclose(g, o, rtol=1e-4, atol=1e-5)
    assert not np.any(np.asarray(grads[1])[config.vocab :]), "padded rows have a gradient"
    # Without a derivative the value is the same.
    np.testing.assert_allclose(3 * chunked(x, head, targets, weights, config), found, rtol=1e-6)


def test_the_slope_along_a_line_is_the_gradient():
    """Against the loss itself: no derivative of anybody's."""
    config = HeadConfig(25, scale=0.7, softcap=2.0, chunk_tokens=13)
    x, head, targets, weights = inputs(vocab=25)
    gx, gh = jax.grad(chunked, (0, 1))(x, head, targets, weights, config)
    dx, dh, *_ = inputs(seed=5)
    h = 1e-2
    up = chunked(x + h * dx, head + h * dh, targets, weights, config)
    down = chunked(x - h * dx, head - h * dh, targets, weights, config)
    np.testing.assert_allclose(
        (up - down) / (2 * h), jnp.vdot(gx, dx) + jnp.vdot(gh, dh), rtol=2e-3
    )


def test_large_logits_neither_overflow_nor_lose_the_target():
    config = HeadConfig(PADDED)
    args = inputs(loud=300.0)
    value, grads = jax.value_and_grad(chunked, (0, 1))(*args, config)
    np.testing.assert_allclose(value, dense(*args, config), rtol=1e-5)
    assert all(bool(jnp.isfinite(g).all()) for g in grads)


@pytest.mark.parametrize("config", CONFIGS[:5], ids=str)
def test_all_weights_zero(config):
    x, head, targets, _ = inputs(vocab=config.vocab)
    none = jnp.zeros(ROWS * SEQ)
    value, grads = jax.value_and_grad(chunked, (0, 1))(x, head, targets, none, config)
    assert value == 0.0
    assert all(not np.any(np.asarray(g)) for g in grads), "padding has a gradient"


def test_bf16_logits_and_sums_are_fp32():
    config = HeadConfig(25, chunk_tokens=12)
    x, head, targets, weights = inputs(jnp.bfloat16, vocab=25)
    (value, grads), (wanted, oracle) = (
        jax.value_and_grad(f, (0, 1))(x, head, targets, weights, config) for f in (chunked, dense)
    )
    assert value.dtype == jnp.float32
    np.testing.assert_allclose(value, wanted, rtol=1e-5)  # exact products, fp32 sums
    for g, o in zip(grads, oracle, strict=True):
        assert g.dtype == jnp.bfloat16
        error = np.abs(np.float32(g) - np.float32(o)).max() / np.abs(np.float32(o)).max()
        assert error < 2**-7, error


def test_logits_of_padded_ids():
    x, head, *_ = inputs()
    z = logits(x, head, HeadConfig(25, scale=0.5))
    np.testing.assert_allclose(z[:, :25], 0.5 * x @ head[:25].T, rtol=1e-4, atol=1e-5)
    assert np.all(np.asarray(z)[:, 25:] == np.float32(MASKED))
    sliced = logits(x, head[16:], HeadConfig(25, scale=0.5), offset=16)
    np.testing.assert_allclose(sliced, z[:, 16:], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize(
    ("data", "tensor", "config"),
    [
        (1, 8, HeadConfig(PADDED, chunk_tokens=16)),
        (2, 4, HeadConfig(25, scale=0.5, softcap=2.0, chunk_tokens=8)),
        (2, 4, HeadConfig(7, softcap=2.0)),  # whole slices are padding
        (4, 2, HeadConfig(25, chunk_tokens=4)),
    ],
)
def test_split_over_the_vocabulary(data, tensor, config, check_vma):
    """Shares add to the loss; gradients of a slice of the head and a share of tokens are right."""
    axes = ("data", "tensor")
    mesh = jax.make_mesh((data, tensor), axes, axis_types=(jax.sharding.AxisType.Auto,) * 2)
    sizes = dict(mesh.shape)
    roles = roles_of(sharding.tensor().activations, sizes)
    comm = Explicit(sizes=sizes, places={}, roles=roles)

    def on_device(x, head, targets, weights):
        x, head, targets, weights = (vary(a, axes) for a in (x, head, targets, weights))

        def share(x, head, weights):
            return cross_entropy(comm, x, head, targets, weights, config, rows=ROWS // data)

        loss, (dx, dhead, dweights) = jax.value_and_grad(share, (0, 1, 2))(x, head, weights)
        plain = share(x, head, weights)
        dweights = jax.lax.psum(dweights, "tensor")
        return loss[None], plain[None], dx, jax.lax.psum(dhead, "data"), dweights

    specs = (P(axes), P("tensor"), P("data"), P("data"))
    run = jax.jit(
        jax.shard_map(
            on_device,
            mesh=mesh,
            in_specs=specs,
            out_specs=(P(axes), P(axes), P(axes), P("tensor"), P("data")),
            check_vma=check_vma,
        )
    )
    args = inputs(vocab=config.vocab)
    loss, plain, dx, dhead, dweights = run(*args)
    wanted, (ox, ohead, _, oweights) = jax.value_and_grad(dense, (0, 1, 2, 3), allow_int=True)(
        *args, config
    )
    np.testing.assert_allclose(loss.sum(), wanted, rtol=1e-5)
    np.testing.assert_allclose(plain, loss, rtol=1e-6)
    np.testing.assert_allclose(dx, ox, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(dhead, ohead, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(dweights, oweights, rtol=1e-4, atol=1e-5)


def widest_logits(function, *args, vocab):
    """The most elements of an array with a dim of size `vocab`, anywhere in the jaxpr."""

    def walk(jaxpr):
        for eqn in jaxpr.eqns:
            for var in eqn.outvars:
                shape = getattr(var.aval, "shape", ())
                if len(shape) > 1 and shape[-1] == vocab:
                    yield int(np.prod(shape))
            for inner in jaxprs_in_params(eqn.params):
                yield from walk(inner)

    return max(walk(jax.make_jaxpr(function)(*args).jaxpr))


@pytest.mark.parametrize(
    ("chunk_tokens", "tokens"), [(2048, 48), (48, 48), (47, 24), (24, 24), (13, 12), (4, 4), (1, 4)]
)
def test_chunks_divide_the_rows_and_hold_at_most_chunk_tokens(chunk_tokens, tokens):
    """Down to one position of each row: chunks are cut within rows."""
    config = HeadConfig(PADDED, chunk_tokens=chunk_tokens)
    args = inputs()
    for f in (chunked, jax.grad(chunked, (0, 1))):
        assert widest_logits(lambda *a, f=f: f(*a, config), *args, vocab=PADDED) == tokens * PADDED


def test_a_head_that_does_not_say_takes_the_communicators_chunks():
    def loss(comm, config):
        return lambda *args: cross_entropy(comm, *args, config, rows=ROWS)

    comm, args = Local(chunk_tokens=12), inputs()
    own = HeadConfig(PADDED, chunk_tokens=24)
    for config, tokens in ((HeadConfig(PADDED), 12), (own, 24)):
        assert widest_logits(loss(comm, config), *args, vocab=PADDED) == tokens * PADDED


def test_memory_does_not_grow_with_batch_x_seq_x_vocab():
    """Vocabulary of 128k: four times the tokens cost their activations, not their logits."""
    vocab, embed, chunk_tokens = 131072, 16, 32
    config = HeadConfig(vocab, chunk_tokens=chunk_tokens)

    def temp(rows, seq):
        def loss(x, head, targets, weights):
            return cross_entropy(Local(), x, head, targets, weights, config, rows=rows)

        def shape(*dims, dtype=jnp.float32):
            return jax.ShapeDtypeStruct(dims, dtype)

        tokens = rows * seq
        args = (
            shape(tokens, embed),
            shape(vocab, embed),
            shape(tokens, dtype=jnp.int32),
            shape(tokens),
        )
        compiled = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(*args).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    small, large = temp(2, 64), temp(4, 128)
    logits_of_the_difference = (4 * 128 - 2 * 64) * vocab * 4
    assert small >= chunk_tokens * vocab * 4, "the analysis does not see the chunk of logits"
    assert large - small < 16 * 4 * 128 * embed * 4 < logits_of_the_difference / 100


@pytest.mark.parametrize("scale", [1.0, 20.0])
@pytest.mark.parametrize("largest", [1.0, 60.0, 70.0, 1e4, 1e30])
def test_fp16_gradients_do_not_overflow_whatever_the_weights(largest, scale):
    """Known up to the loss scale, here one that makes them as large as those of weights of 1."""
    config = HeadConfig(25, scale=scale, chunk_tokens=12)
    x, head, targets, weights = inputs(jnp.float16, vocab=25, loud=0.1)
    weights = weights.at[0].set(1.0) * largest

    def scaled(f, x, head, weights):
        return f(x, head, targets, weights, config) / (largest * scale)

    found, oracle = (
        jax.grad(partial(scaled, f), (0, 1, 2))(x, head, weights) for f in (chunked, dense)
    )
    for g, o in zip(found, oracle, strict=True):
        g, o = np.float32(g), np.float32(o)
        assert np.abs(g - o).max() < 2**-8 * np.abs(o).max()


def test_fp16_keeps_gradients_below_its_smallest_number_until_the_loss_scale_is_known():
    config = HeadConfig(PADDED)
    x, head, targets, weights = inputs(jnp.float16, loud=4.0)
    unlikely = 2.0**-20 * weights

    def scaled(f, x, head):
        return 2.0**20 * f(x, head, targets, unlikely, config)

    found, oracle = (jax.grad(partial(scaled, f), (0, 1))(x, head) for f in (chunked, dense))
    for g, o in zip(found, oracle, strict=True):
        assert np.abs(np.float32(g) - np.float32(o)).max() < 0.05 * np.abs(np.float32(o)).max()
