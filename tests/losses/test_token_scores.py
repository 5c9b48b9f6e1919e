"""The loss of each token, and whether its target is the likeliest, as derivatives of one sum."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.losses import HeadConfig
from jaxtrain.losses.token_scores import MARKS, TokenScores
from jaxtrain.nn.local import Local

ROWS, SEQ, EMBED, VOCAB, PADDED = 3, 8, 4, 11, 16


def inputs() -> tuple[jax.Array, jax.Array, dict[str, Any]]:
    random = np.random.default_rng(0)
    x, head = random.normal(size=(ROWS * SEQ, EMBED)), random.normal(size=(PADDED, EMBED))
    batch = {
        "tokens": np.zeros((ROWS, SEQ), np.int32),
        "targets": random.integers(VOCAB, size=(ROWS, SEQ), dtype=np.int32),
        "weights": random.uniform(size=(ROWS, SEQ)).astype(np.float32),
        MARKS: random.uniform(size=(ROWS, SEQ)).astype(np.float32),
    }
    # The padded ids have the greatest products, and never count.
    head[VOCAB:] = 100.0
    batch["targets"][0] = np.argmax(x[:SEQ] @ head[:VOCAB].T, axis=1)
    return jnp.float32(x), jnp.float32(head), jax.tree.map(jnp.asarray, batch)


@pytest.mark.parametrize("chunk_tokens", [2, 5, 1000])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_a_token_s_numbers_are_those_of_dense_logits(chunk_tokens: int, softcap: Any) -> None:
    """In fp64, of the real ids."""
    x, head, batch = inputs()
    config = HeadConfig(VOCAB, scale=0.7, softcap=softcap, chunk_tokens=chunk_tokens)

    def total(fields: dict[str, jax.Array], x: jax.Array, head: jax.Array) -> Any:
        sums = TokenScores().sums(Local(), x, head, {**batch, **fields}, config)
        return sums.loss, sums.count

    fields = {name: batch[name] for name in ("weights", MARKS)}
    run = jax.value_and_grad(total, (0, 1, 2), has_aux=True)
    (value, count), (of_fields, dx, dhead) = jax.jit(run)(fields, x, head)
    z = 0.7 * np.asarray(x, np.float64) @ np.asarray(head[:VOCAB], np.float64).T
    z = z if softcap is None else softcap * np.tanh(z / softcap)
    targets = np.asarray(batch["targets"]).reshape(-1)
    losses = np.log(np.exp(z).sum(1)) - z[np.arange(len(z)), targets]
    likeliest = np.argmax(z, axis=1) == targets
    assert likeliest[:SEQ].all() and not likeliest.all()
    np.testing.assert_allclose(of_fields["weights"].reshape(-1), losses, rtol=1e-5)
    np.testing.assert_array_equal(of_fields[MARKS].reshape(-1), likeliest)
    weights, marks = (np.asarray(fields[name], np.float64).reshape(-1) for name in fields)
    np.testing.assert_allclose(value, weights @ losses + marks @ likeliest, rtol=1e-5)
    np.testing.assert_allclose(count, weights.sum(), rtol=1e-6)
    assert not dx.any() and not dhead.any()


def test_of_equal_ids_each_is_likeliest() -> None:
    x, head, batch = inputs()
    config = HeadConfig(VOCAB)
    marked = {**batch, "weights": 0 * batch["weights"], MARKS: 1 + 0 * batch[MARKS]}
    sums = TokenScores().sums(Local(), 0 * x, head, marked, config)
    assert float(sums.loss) == ROWS * SEQ
