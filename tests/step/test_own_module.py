"""A user's own nnx.Module with BatchNorm and Dropout trains like a built-in model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxtrain
from jaxtrain.data import BigramChain
from jaxtrain.nn.module import build, put_together, take_apart
from jaxtrain.step.assembly import assemble
from jaxtrain.step.own_module import own_loss

VOCAB, EMBED, SEQ, ROWS, MOMENTUM = 16, 8, 8, 16, 0.5
EXAMPLE = Path(__file__).parents[2] / "experiments" / "own_module.py"


class Net(nnx.Module):
    """Embedding, BatchNorm, a hidden layer with Dropout, a head: each token by itself."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        init = nnx.initializers.normal(0.5)
        axes = {"table": ("vocab", "embed"), "up": ("embed", "mlp"), "down": ("mlp", "embed")}
        named = {name: nnx.with_partitioning(init, names) for name, names in axes.items()}
        self.table = nnx.Embed(VOCAB, EMBED, embedding_init=named["table"], rngs=rngs)
        self.norm = nnx.BatchNorm(EMBED, momentum=MOMENTUM, rngs=rngs)
        self.up = nnx.Linear(EMBED, 16, kernel_init=named["up"], rngs=rngs)
        self.dropout = nnx.Dropout(0.25, rngs=rngs)
        self.down = nnx.Linear(16, VOCAB, kernel_init=named["down"], rngs=rngs)

    def loss(self, batch: dict[str, jax.Array], *, key: Any) -> tuple[jax.Array, jax.Array]:
        x = self.norm(self.table(batch["tokens"]))
        scores = jax.nn.log_softmax(self.down(self.dropout(jax.nn.relu(self.up(x)))))
        chosen = jnp.take_along_axis(scores, batch["targets"][..., None], -1)[..., 0]
        return -jnp.sum(chosen * batch["weights"]), jnp.sum(batch["weights"])


def net(rngs: nnx.Rngs) -> Net:
    return Net(rngs)


def experiment(**changes: Any) -> jaxtrain.Experiment:
    return replace(
        jaxtrain.Experiment(
            model=net,
            data=BigramChain(vocab=VOCAB, seq=SEQ),
            optimizer=jaxtrain.AdamW(1e-2),
            steps=20,
            batch=ROWS,
            microbatches=2,
            evaluation=None,
            checkpoints=None,
            logging=jaxtrain.Logging(every=1, tensorboard=False),
        ),
        **changes,
    )


def run(given: jaxtrain.Experiment, steps: int, cache: Path, **axes: int) -> jaxtrain.Result:
    return jaxtrain.train(
        given, jaxtrain.mesh_from_axes(**axes), steps=steps, cache_dir=cache, run_dir=None
    )


def unplaced(make: Callable[[nnx.Rngs], nnx.Module]) -> Any:
    """The module by itself; flax would want a mesh for its annotations."""
    return build(lambda key: make(nnx.Rngs(key)), jax.random.key(0))


def rest_of(result: jaxtrain.Result) -> dict[str, np.ndarray]:
    """The state that is not parameters, keys as their data."""
    assert result.session is not None
    return {name: as_numbers(leaf) for name, leaf in result.session.state.model_state.items()}


def as_numbers(leaf: jax.Array) -> np.ndarray:
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> jaxtrain.Result:
    """Five steps on one device."""
    return run(experiment(), 5, tmp_path_factory.mktemp("cache"), data=1)


@pytest.mark.parametrize(
    "axes", [{"data": 8}, {"fsdp": 8}, {"data": 2, "fsdp": 2, "tensor": 2}], ids=str
)
def test_every_mesh_gives_the_run_of_one_device(
    axes: dict[str, int], alone: jaxtrain.Result, tmp_path: Path
) -> None:
    found = run(experiment(), 5, tmp_path, **axes)
    losses = [[step["loss"] for step in r.history] for r in (found, alone)]
    np.testing.assert_allclose(*losses, rtol=1e-5)
    expected = rest_of(alone)
    assert {"norm.mean", "norm.var", "dropout.rngs.count"} <= set(expected)
    for name, value in rest_of(found).items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-5, atol=1e-7, err_msg=name)
    assert rest_of(found)["dropout.rngs.count"] == 10, "one draw in each of 5 x 2 microbatches"


@pytest.mark.parametrize("microbatches", [1, 2])
def test_statistics_are_of_the_global_microbatch(microbatches: int, opened: Any) -> None:
    session = opened(experiment(microbatches=microbatches), data=8)
    table = np.asarray(session.state.params["table.embedding"], np.float64)
    batch = session.loader.next()[1]
    mean, var = np.zeros(EMBED), np.ones(EMBED)
    for tokens in np.asarray(batch["tokens"]):
        x = table[tokens].reshape(-1, EMBED)
        mean = MOMENTUM * mean + (1 - MOMENTUM) * x.mean(0)
        var = MOMENTUM * var + (1 - MOMENTUM) * x.var(0)
    session.step(batch)
    np.testing.assert_allclose(session.state.model_state["norm.mean"], mean, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(session.state.model_state["norm.var"], var, rtol=1e-5)


def test_resumed_is_equal_to_the_bit(tmp_path: Path) -> None:
    given = experiment(checkpoints=jaxtrain.SavePolicy(every=3))
    mesh = jaxtrain.mesh_from_axes(data=8)

    def steps(count: int, run_dir: str) -> jaxtrain.Result:
        place = tmp_path / run_dir
        return jaxtrain.train(given, mesh, steps=count, run_dir=place, cache_dir=tmp_path)

    whole, _, resumed = steps(6, "whole"), steps(3, "parts"), steps(6, "parts")
    assert [s["step"] for s in resumed.history] == [4, 5, 6]
    assert [s["loss"] for s in resumed.history] == [s["loss"] for s in whole.history[3:]]
    for name, value in rest_of(resumed).items():
        np.testing.assert_array_equal(value, rest_of(whole)[name], err_msg=name)


def test_held_out_loss_is_that_of_the_module_after_eval(tmp_path: Path) -> None:
    """Against the plain module: running averages, nothing dropped, no state moved."""
    given = experiment(evaluation=jaxtrain.Evaluation(every=3, final_batches=1))
    result = run(given, 3, tmp_path, data=8)
    state = result.session.state
    assert rest_of(result)["dropout.rngs.count"] == 6, "evaluation draws no key"

    plain = unplaced(net)
    split = take_apart(plain)
    plain = put_together(split.static, {**state.params, **state.model_state})
    rows = given.data.open("held_out", seed=given.seed, cache_dir=tmp_path).rows(np.arange(ROWS))
    for mode, is_same in ((plain.eval, True), (plain.train, False)):
        mode()
        total, count = plain.loss(rows, key=None)
        same = result.evaluation["eval_loss"] == pytest.approx(float(total / count), rel=1e-5)
        assert same == is_same, f"after {mode.__name__}()"


def test_a_skipped_step_leaves_averages_and_keys_as_they_were(
    opened: Any, stepped: Any, poisoned: Any
) -> None:
    data = poisoned(BigramChain(vocab=VOCAB, seq=SEQ), row=ROWS)
    session = opened(experiment(data=data), data=8)
    rests = []
    for _ in range(3):
        metrics = stepped(session)
        rests.append({name: as_numbers(leaf) for name, leaf in session.state.model_state.items()})
    first, skipped, third = rests
    assert metrics["skipped"] == 1
    for name in first:
        np.testing.assert_array_equal(first[name], skipped[name], err_msg=name)
    assert np.abs(third["norm.mean"] - skipped["norm.mean"]).max() > 0
    assert third["dropout.rngs.count"] == skipped["dropout.rngs.count"] + 2


class OneMatrix(nnx.Module):
    """A matrix [embed, mlp] whose axis names are written as `spelling` does."""

    def __init__(self, spelling: Callable[[jax.Array], nnx.Param]) -> None:
        self.matrix = spelling(jnp.ones((8, 8)))

    def loss(self, batch: Any, *, key: Any) -> tuple[jax.Array, jax.Array]:
        return jnp.sum(self.matrix[...]) * 0.0 + 1.0, jnp.float32(1.0)


AXES = ("embed", "mlp")


def ours(x: jax.Array) -> nnx.Param:
    return nnx.Param(x, axes=AXES)


def flax_out_sharding(x: jax.Array) -> nnx.Param:
    return nnx.Param(x, out_sharding=AXES)


def flax_sharding_names(x: jax.Array) -> nnx.Param:
    with pytest.warns(DeprecationWarning):
        return nnx.Param(x, sharding_names=AXES)


def flax_partitioning(x: jax.Array) -> nnx.Param:
    return nnx.Param(nnx.with_partitioning(lambda: x, AXES)())


def flax_metadata(x: jax.Array) -> nnx.Param:
    return nnx.Param(nnx.with_metadata(lambda: x, axes=AXES)())


@pytest.mark.parametrize(
    "spelling",
    [ours, flax_out_sharding, flax_sharding_names, flax_partitioning, flax_metadata],
    ids=lambda f: f.__name__,
)
def test_axis_names_are_read_in_every_spelling(spelling: Callable[..., nnx.Param]) -> None:
    given = experiment(model=lambda rngs: OneMatrix(spelling))
    leaf = assemble(given, jaxtrain.mesh_from_axes(fsdp=4, tensor=2)).places["matrix"]
    assert leaf.axes == AXES
    assert leaf.params == (("fsdp",), ("tensor",))


def test_a_parameter_without_names_is_whole_on_every_device() -> None:
    given = experiment(model=lambda rngs: OneMatrix(nnx.Param))
    leaf = assemble(given, jaxtrain.mesh_from_axes(fsdp=4, tensor=2)).places["matrix"]
    assert leaf.params == leaf.optimizer == ((), ())


def misspelt(rngs: nnx.Rngs) -> OneMatrix:
    return OneMatrix(lambda x: nnx.Param(x, out_sharding=("embde", "mlp")))


class Answers(OneMatrix):
    """A module whose loss gives `answer(self)`."""

    def __init__(self, answer: Callable[[Any], Any]) -> None:
        super().__init__(ours)
        self.mean, self.answer = nnx.BatchStat(jnp.zeros(3)), answer

    def loss(self, batch: Any, *, key: Any) -> Any:
        return self.answer(self)


def answers(answer: Callable[[Any], Any]) -> Callable[[nnx.Rngs], Answers]:
    return lambda rngs: Answers(answer)


def widens(model: Any) -> tuple[float, float]:
    model.mean = nnx.BatchStat(jnp.zeros((2, 3)))
    return 0.0, 1.0


def sows(model: Any) -> tuple[float, float]:
    model.extra = nnx.BatchStat(jnp.zeros(3))
    return 0.0, 1.0


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "explicit mode": (
        {"execution": jaxtrain.Execution(mode="explicit")},
        r"describe themselves.*states none; use mode='gspmd'",
    ),
    "sample": (
        {"evaluation": jaxtrain.Evaluation(sample=jaxtrain.Sample("a"))},
        "evaluation.sample acts on models that describe themselves",
    ),
    "layer loop": (
        {"execution": jaxtrain.Execution(loop=jaxtrain.LayerLoop())},
        "execution.loop acts on models that describe themselves",
    ),
    "misspelt axis": ({"model": misspelt}, "'embde' is unknown; did you mean 'embed'"),
    "mean loss": ({"model": answers(lambda m: jnp.ones(()))}, r"return \(sum, count\)"),
    "loss per row": ({"model": answers(lambda m: (jnp.ones(4), 4))}, r"shapes \(4,\) and \(\)"),
    "state widened": ({"model": answers(widens)}, "state mean was float32.3. and is float32.2, 3."),
    "state appears": ({"model": answers(sows)}, "state extra appears in loss"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_run_is_refused_with_a_remedy(name: str) -> None:
    changes, message = REFUSED[name]
    changes = {"data": jaxtrain.TextData(seq=SEQ), **changes}
    with pytest.raises(ValueError, match=message):
        jaxtrain.check(experiment(**changes), jaxtrain.mesh_from_axes(fsdp=8))


TABLE = {"wide": 2.0}


def or_else(batch: Any) -> Any:
    try:
        return batch["lengths"]
    except KeyError:
        return batch["tokens"]


READS: dict[str, tuple[Callable[[Any], Any], type[Exception] | None, str]] = {
    "a field": (lambda b: b["lengths"], ValueError, "Reads.loss reads 'lengths', and .* has tok"),
    "within jit": (lambda b: jax.jit(lambda c: c["lengths"])(b), ValueError, "reads 'lengths'"),
    "a table": (lambda b: TABLE["scale"] * b["tokens"], KeyError, "^'scale'"),
    "a default, then a table": (lambda b: or_else(b) * TABLE["scale"], KeyError, "^'scale'"),
    "a default": (or_else, None, ""),
    "axes by name": (
        lambda b: jax.vmap(lambda c: c["tokens"], in_axes=({"tokens": 0},))(b),
        None,
        "",
    ),
}


class Reads(OneMatrix):
    def __init__(self, read: Callable[[Any], Any]) -> None:
        super().__init__(ours)
        self.read = read

    def loss(self, batch: Any, *, key: Any) -> Any:
        return jnp.sum(self.read(batch)), 1


@pytest.mark.parametrize("name", READS)
def test_a_missing_field_is_told_from_a_key_of_ones_own(name: str) -> None:
    read, kind, told = READS[name]
    split = take_apart(Reads(read))
    loss = jax.jit(own_loss(split.static, compute=jnp.float32))
    arguments = (split.params, split.model_state, {"tokens": jnp.ones(3)}, None)
    if kind is None:
        assert float(loss(*arguments)[0].loss) == 3.0
        return
    with pytest.raises(kind, match=told) as caught:
        loss(*arguments)
    assert type(caught.value) is kind


def test_parameters_are_used_in_the_compute_dtype_and_state_is_kept_in_its_own() -> None:
    def answer(model: Any) -> tuple[Any, Any]:
        model.mean.set_value(model.mean[...] + 1)
        assert model.matrix[...].dtype == jnp.bfloat16
        return jnp.sum(model.matrix[...] ** 2), 3

    split = take_apart(Answers(answer))
    loss = own_loss(split.static, compute=jnp.bfloat16)
    (total, (sums, after)), grads = jax.value_and_grad(
        lambda params: (lambda s, r: (s.loss, (s, r)))(*loss(params, split.model_state, {}, None)),
        has_aux=True,
    )(split.params)
    count = sums.count
    assert (total.dtype, count.dtype, grads["matrix"].dtype) == (jnp.float32,) * 3
    assert (float(total), float(count)) == (64.0, 3.0)
    np.testing.assert_array_equal(grads["matrix"], 2.0)
    np.testing.assert_array_equal(after["mean"], np.ones(3, np.float32))


def test_the_example_is_causal_on_held_out_data_and_learns(tmp_path: Path) -> None:
    given = jaxtrain.load_experiment(EXAMPLE)
    small = replace(given.model, vocab=VOCAB, embed=8, layers=2, width=3)
    given = replace(experiment(), model=small, microbatches=1, optimizer=jaxtrain.AdamW(3e-2))
    result = run(given, 20, tmp_path, fsdp=8)
    assert result.loss < 0.85 * result.history[0]["loss"]

    model = unplaced(small.build)
    model.eval()
    tokens = jnp.arange(SEQ)[None] % VOCAB
    for at in range(SEQ):
        weights = (jnp.arange(SEQ) == at).astype(jnp.float32)[None]
        batch = {"tokens": tokens, "targets": tokens, "weights": weights}
        later = {**batch, "tokens": jnp.where(jnp.arange(SEQ) > at, 5, tokens)}
        own = {**batch, "tokens": jnp.where(jnp.arange(SEQ) == at, tokens + 1, tokens)}
        loss, changed, moved = (model.loss(b, key=None)[0] for b in (batch, later, own))
        assert loss == changed, f"position {at} sees what follows"
        assert loss != moved, f"position {at} does not see its own token"
