"""The loss of pairs against a formula in fp64 on dense logits: values, gradients, further sums."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxtrain.collectives.vary import vary
from jaxtrain.context.methods import RingAttention
from jaxtrain.losses.cross_entropy import HeadConfig, settings, token_losses
from jaxtrain.losses.preferences import DPO, SUMS, _document_sums
from jaxtrain.mesh import sharding
from jaxtrain.mesh.roles import roles_of
from jaxtrain.models.description import OF_PAIRS
from jaxtrain.nn.explicit import Explicit
from jaxtrain.nn.local import Local

ROWS, SEQ, EMBED, VOCAB = 4, 12, 6, 32
SEGMENTS = np.array(
    [
        [1, 1, 1, 2, 2, 2, 2, 3, 3, 4, 4, 0],
        [1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2],
        [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12],
        [1, 1, 2, 2, 2, 3, 3, 3, 3, 4, 0, 0],
    ]
)


def inputs(dtype=jnp.float32, seed=0):
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.normal(size=(ROWS * SEQ, EMBED)), dtype)
    head = jnp.asarray(rng.normal(size=(VOCAB, EMBED)), dtype)
    weights = (rng.uniform(size=(ROWS, SEQ)) > 0.3) * (SEGMENTS > 0)
    weights[3, 5:] = 0  # the last pair has no token to learn, and does not count
    batch = {
        "tokens": jnp.zeros((ROWS, SEQ), jnp.int32),
        "targets": jnp.asarray(rng.integers(0, VOCAB, (ROWS, SEQ)), jnp.int32),
        "weights": jnp.asarray(weights, jnp.float32),
        "segments": jnp.asarray(SEGMENTS, jnp.int32),
        "reference": jnp.asarray(rng.uniform(1, 5, (ROWS, SEQ)), jnp.float32),
    }
    return x, head, batch


def by_formula(x, head, batch, objective):
    """[loss, count, accuracy, margin, chosen, rejected] and gradients of x and head, in fp64."""
    x, head = (np.asarray(a, np.float64) for a in (x, head))
    z = x @ head.T
    p = np.exp(z - z.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    targets, tokens = np.asarray(batch["targets"]).reshape(-1), np.arange(ROWS * SEQ)
    log_p = np.log(p[tokens, targets]).reshape(ROWS, SEQ)
    gain = np.asarray(batch["weights"], np.float64) * (log_p + np.asarray(batch["reference"]))
    sums, slopes = np.zeros(6), np.zeros((ROWS, SEQ))
    beta, wrong = objective.beta, objective.label_smoothing
    for row in range(ROWS):
        for first in range(1, SEGMENTS[row].max(), 2):
            chosen, rejected = (SEGMENTS[row] == n for n in (first, first + 1))
            if not np.asarray(batch["weights"])[row][chosen | rejected].any():
                continue
            a, b = beta * gain[row][chosen].sum(), beta * gain[row][rejected].sum()
            likely = 1 / (1 + np.exp(b - a))
            loss = -(1 - wrong) * np.log(likely) - wrong * np.log(1 - likely)
            sums += [loss, 1, a > b, a - b, a, b]
            slope = beta * (likely - (1 - wrong))  # of the loss by the difference of gains
            slopes[row] += slope * np.where(chosen, 1.0, np.where(rejected, -1.0, 0.0))
    by_log_p = (slopes * np.asarray(batch["weights"])).reshape(-1, 1)
    dz = by_log_p * (np.eye(VOCAB)[targets] - p)
    return sums, dz @ head, dz.T @ x


def summed(sums):
    return jnp.stack([sums.loss, sums.count, *(sums.others[name] for name in SUMS)])


@pytest.mark.parametrize("chunk_tokens", [3, 1000])
@pytest.mark.parametrize("objective", [DPO(), DPO(0.7, label_smoothing=0.2)], ids=str)
def test_values_and_gradients_equal_the_formulas(objective, chunk_tokens):
    x, head, batch = inputs()
    config = HeadConfig(VOCAB, chunk_tokens=chunk_tokens)

    def loss(x, head):
        sums = objective.sums(Local(), x, head, batch, config)
        return sums.loss, summed(sums)

    expected, dx, dhead = by_formula(x, head, batch, objective)
    (_, sums), grads = jax.value_and_grad(loss, (0, 1), has_aux=True)(x, head)
    np.testing.assert_allclose(sums, expected, rtol=1e-5)
    np.testing.assert_allclose(grads[0], dx, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(grads[1], dhead, rtol=1e-4, atol=1e-6)
    # Without a derivative the same sums.
    np.testing.assert_array_equal(loss(x, head)[1], sums)


def test_a_model_that_is_its_reference_has_the_logarithm_of_two():
    """And prefers no answer."""
    x, head, batch = inputs()
    z = x @ head.T
    targets = batch["targets"].reshape(-1, 1)
    losses = jax.nn.logsumexp(z, -1) - jnp.take_along_axis(z, targets, 1)[:, 0]
    batch["reference"] = losses.reshape(ROWS, SEQ)
    sums = DPO().sums(Local(), x, head, batch, HeadConfig(VOCAB))
    np.testing.assert_allclose(sums.loss / sums.count, np.log(2), rtol=1e-5)
    config = HeadConfig(VOCAB)
    static = settings(Local(), config, targets[:, 0], ROWS)
    batch["reference"] = token_losses(static, x, head, targets[:, 0])[0].reshape(ROWS, SEQ)
    alike = DPO().sums(Local(), x, head, batch, config)
    assert [float(alike.others[name]) for name in SUMS] == [0.0] * 4
    assert sums.count == by_formula(x, head, batch, DPO())[0][1] > 0


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(
    "sizes", [{"tensor": 2}, {"context": 2}, {"context": 4}, {"context": 2, "tensor": 4}], ids=str
)
def test_split_over_the_vocabulary_and_rows(sizes, frozen):
    x, head, batch = inputs(seed=1)
    expected, dx, dhead = by_formula(x, head, batch, DPO())
    axes, kinds = tuple(sizes), (jax.sharding.AxisType.Auto,) * len(sizes)
    mesh = jax.make_mesh(tuple(sizes.values()), axes, axis_types=kinds)
    roles = roles_of((sharding.fsdp() | sharding.tensor()).activations, sizes)
    comm = Explicit(sizes=sizes, places={}, roles=roles, context=RingAttention(zigzag=False))
    config = HeadConfig(VOCAB, frozen=frozen, chunk_tokens=6)
    rows, vocab = (axis if axis in sizes else None for axis in ("context", "tensor"))

    def on_device(x, head, batch):
        x, head, batch = jax.tree.map(lambda a: vary(a, axes), (x, head, batch))

        def loss(x, head):
            x = comm.tokens(x.reshape(-1, EMBED))
            sums = DPO().sums(comm, x, head, batch, config)
            return sums.loss, summed(sums)

        (_, sums), (dx, dhead) = jax.value_and_grad(loss, (0, 1), has_aux=True)(x, head)
        dx = jax.lax.psum(dx, "tensor") if vocab else dx
        dhead = jax.lax.psum(dhead, "context") if rows else dhead
        return jax.lax.psum(sums, axes), dx, dhead

    cut = {name: P(None, None if name == "segments" else rows) for name in batch}
    run = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(P(None, rows), P(vocab), cut),
        out_specs=(P(), P(None, rows), P(vocab)),
    )
    sums, by_x, by_head = jax.jit(run)(x.reshape(ROWS, SEQ, EMBED), head, batch)
    np.testing.assert_allclose(sums, expected, rtol=1e-5)
    np.testing.assert_allclose(by_x.reshape(-1, EMBED), dx, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(by_head, 0 if frozen else dhead, rtol=1e-4, atol=1e-6)


def test_a_long_row_takes_no_memory_of_its_length_squared():
    """Sums over documents: 1 GB for a row of 16,384 tokens if each was compared with each."""
    seq = 1 << 14
    shape = jax.ShapeDtypeStruct((1, seq), jnp.float32)
    whole = jax.ShapeDtypeStruct((1, seq), jnp.int32)
    fields = ("weights", "reference"), ("tokens", "targets", "segments")
    batch = {
        name: kind for names, kind in zip(fields, (shape, whole), strict=True) for name in names
    }

    def loss(x, head, batch):
        return DPO().sums(Local(), x, head, batch, HeadConfig(VOCAB)).loss

    x, head = (jax.ShapeDtypeStruct((n, EMBED), jnp.float32) for n in (seq, VOCAB))
    compiled = jax.jit(jax.grad(loss, (0, 1))).lower(x, head, batch).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 64 * seq * EMBED


def test_two_runs_of_a_document_are_added():
    """As a device has them whose part of a row is in zig-zag order."""
    values = jnp.asarray(np.random.default_rng(0).normal(size=(2, 1, 8)), jnp.float32)
    documents = jnp.asarray([[0, 0, 1, 1, 0, 0, -1, 2]], jnp.int32)
    sums = _document_sums(values, documents, 4)
    by_hand = [[v[[0, 1, 4, 5]].sum(), v[2:4].sum(), v[7], 0.0] for v in np.asarray(values)[:, 0]]
    np.testing.assert_allclose(sums[:, 0], by_hand, rtol=1e-6)


def test_the_names_of_the_sums_are_the_descriptions():
    assert SUMS == OF_PAIRS


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"beta": 0.0}, "beta"),
        ({"label_smoothing": 0.5}, "exchange chosen and rejected"),
        ({"label_smoothing": -0.1}, "label_smoothing"),
    ],
)
def test_an_objective_that_is_none_is_refused(fields, says):
    with pytest.raises(ValueError, match=says):
        DPO(**fields)
