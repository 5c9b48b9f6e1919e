"""Activations by name, and the gradient of a batch."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxtrain
from jaxtrain.data import BigramChain
from jaxtrain.inspection import capture, gradients
from jaxtrain.moe import Balance
from jaxtrain.optim.schedule import Constant
from tests.tiny import SEQ, VOCAB, table

ATTENTION = jaxtrain.AttentionConfig(heads=2, head_dim=4)
DENSE = jaxtrain.BlockConfig(ATTENTION, jaxtrain.MlpConfig(hidden=16))
EXPERTS = jaxtrain.BlockConfig(ATTENTION, jaxtrain.MoeConfig(hidden=8, experts=4))
DATA = BigramChain(vocab=VOCAB, seq=SEQ, successors=2)


def config(**more) -> jaxtrain.DecoderConfig:
    fields = dict(vocab=VOCAB, embed=8, layers=5, period=(DENSE, EXPERTS), prefix=(DENSE,))
    return jaxtrain.DecoderConfig(**fields | dict(vocab_multiple=1) | more)


@pytest.fixture(scope="module")
def model():
    """Five layers: one before the stack, and two periods of two blocks."""
    return config(embedding_scale=2.0).build(jax.random.key(0))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    experiment = jaxtrain.Experiment(
        model=config(layers=4, period=(DENSE,), prefix=()),
        data=DATA,
        optimizer=jaxtrain.AdamW(3e-2),
        steps=1,
        batch=8,
        ema_decay=0.9,
        evaluation=None,
        execution=jaxtrain.Execution(pipeline=jaxtrain.Pipeline("interleaved", chunks=2)),
        logging=jaxtrain.Logging(tensorboard=False),
    )
    path = tmp_path_factory.mktemp("capture") / "run"
    jaxtrain.train(experiment, "cpu_1", run_dir=path, stream=io.StringIO())
    return path


TOKENS = jnp.asarray(np.arange(14).reshape(2, 7) % VOCAB)


def test_activations_add_up_to_the_logits(model) -> None:
    """Each layer adds its attention's output, and then its feed-forward's."""
    found = capture(model, TOKENS, "*")
    np.testing.assert_array_equal(found["embedding"], 2.0 * model.embedding[...][TOKENS])
    x = found["embedding"]
    for layer in range(5):
        name = f"layers.{layer}"
        x = x + found[f"{name}.attention"] + found[f"{name}.mlp"]
        np.testing.assert_allclose(x, found[name], atol=1e-5)
        normed = np.sqrt(np.mean(np.square(found[f"{name}.attention_norm"]), -1))
        np.testing.assert_allclose(normed, 1.0, atol=1e-2)
    logits = np.asarray(found["norm"]) @ np.asarray(model.head[...]).T
    np.testing.assert_allclose(logits, model.logits(TOKENS), atol=1e-5)
    order = list(found)
    assert order[0] == "embedding" and order[-1] == "norm"
    assert order.index("layers.0.mlp") < order.index("layers.0") < order.index("layers.1.mlp")
    assert all(value.shape[:2] == (2, 7) for value in found.values())


def test_only_what_is_named(model) -> None:
    found = capture(model, TOKENS, ("layers.?", "norm"))
    assert list(found) == [*(f"layers.{n}" for n in range(5)), "norm"]
    jitted = jax.jit(lambda model, tokens: capture(model, tokens, "layers.4"))(model, TOKENS)
    np.testing.assert_allclose(jitted["layers.4"], found["layers.4"], atol=1e-6)
    products = str(jax.make_jaxpr(lambda tokens: capture(model, tokens, "norm"))(TOKENS))
    assert "dot_general" in products and "precision=None" not in products
    rounded = capture(model, TOKENS, "norm", dtype=jnp.bfloat16)["norm"]
    assert 0 < np.abs(np.asarray(rounded, np.float32) - found["norm"]).max() < 0.2
    alone = capture(model, TOKENS[:1, 3:], "layers.4")["layers.4"]
    packed = capture(
        model,
        TOKENS[:1],
        "layers.4",
        segments=jnp.asarray([[1, 1, 1, 2, 2, 2, 2]]),
        positions=jnp.asarray([[0, 1, 2, 0, 1, 2, 3]]),
    )["layers.4"]
    np.testing.assert_allclose(packed[:, 3:], alone, atol=1e-5)
    with pytest.raises(ValueError, match=r"'layer\.0' names no activation; there are embedding, "):
        capture(model, TOKENS, "layer.0")
    with pytest.raises(ValueError, match=r"give ids \[rows, seq\]"):
        capture(model, TOKENS[0])
    with pytest.raises(ValueError, match="a Table is no decoder"):
        capture(table(nnx.Rngs(0)), TOKENS)


@pytest.mark.parametrize(
    ("axes", "microbatches"),
    [({"data": 1}, 1), ({"fsdp": 2, "tensor": 2}, 2), ({"stage": 2}, 2)],
    ids=["one device", "fsdp, tensor", "interleaved"],
)
def test_a_gradient_is_that_of_the_logits(run: Path, axes, microbatches: int) -> None:
    rows = DATA.open("train", seed=0, cache_dir=Path()).rows(np.arange(8))
    rows["weights"] = np.where(np.arange(SEQ) % 3 == 0, 0.0, 1.0 + np.zeros((8, 1))).astype("f4")
    mesh = jaxtrain.mesh_from_axes(**axes)
    found = gradients(run, rows, mesh=mesh, microbatches=microbatches)
    model = jaxtrain.load(run, averaged=False)

    def loss(model) -> jax.Array:
        z = jax.nn.log_softmax(model.logits(jnp.asarray(rows["tokens"])))
        chosen = jnp.take_along_axis(z, jnp.asarray(rows["targets"])[..., None], -1)[..., 0]
        return -jnp.sum(chosen * rows["weights"]) / jnp.sum(rows["weights"])

    expected = {
        ".".join(map(str, path)): variable.get_value()
        for path, variable in nnx.to_flat_state(nnx.grad(loss)(model))
    }
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, atol=1e-5, err_msg=name)
    assert found["period.0.mlp.up"].shape[0] == 4


def test_a_step_of_plain_descent_is_the_gradient_of_its_batch(tmp_path: Path) -> None:
    """With what balances experts, which is no part of the loss."""
    balance = Balance(loss_weight=0.5, z_loss_weight=0.1)
    experts = replace(EXPERTS, mlp=replace(EXPERTS.mlp, balance=balance))
    experiment = jaxtrain.Experiment(
        model=config(layers=1, period=(experts,), prefix=()),
        data=DATA,
        optimizer=jaxtrain.SGD(Constant(0.5), momentum=0.0, weight_decay=0.0),
        steps=2,
        batch=8,
        clip_norm=None,
        evaluation=None,
        checkpoints=jaxtrain.SavePolicy(every=1),
        logging=jaxtrain.Logging(tensorboard=False),
    )
    run = tmp_path / "run"
    jaxtrain.train(experiment, "cpu_1", run_dir=run, stream=io.StringIO())
    rows = DATA.open("train", seed=0, cache_dir=Path()).rows(np.arange(8, 16))
    found = gradients(f"{run}@1", rows)
    steps = [jaxtrain.load(f"{run}@{step}") for step in (1, 2)]
    before, after = (dict(nnx.to_flat_state(nnx.state(model))) for model in steps)
    assert len(before) == len(found) > 5
    for path, leaf in before.items():
        name, moved = ".".join(map(str, path)), leaf.get_value() - after[path].get_value()
        np.testing.assert_allclose(moved / 0.5, found[name], atol=1e-5, err_msg=name)


def test_rows_of_no_batch_are_refused(run: Path) -> None:
    rows = DATA.open("train", seed=0, cache_dir=Path()).rows(np.arange(3))
    with pytest.raises(ValueError, match="batch"):
        gradients(run, rows, microbatches=2)
    rows["tokens"][1, 2] = VOCAB
    with pytest.raises(ValueError, match=r"model\.vocab=16"):
        gradients(run, rows)
