"""An encoder that is not of the package: explicit mode, pipelines, contract, certificate, LoRA."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from encoder import Cloze, Encoder, EncoderConfig, Layer, Rows
from process_group import bare_environment

import jaxtrain
from jaxtrain import operations as of
from jaxtrain.attention.kernels import Reference
from jaxtrain.certificate import certify as certificate
from jaxtrain.certificate.certify import difference
from jaxtrain.certificate.layouts import Layout, experiment_on, layouts
from jaxtrain.certificate.outcome import program
from jaxtrain.certificate.shrink import shrink
from jaxtrain.experiment.fine_tuning import FineTuning, LoRA
from jaxtrain.mesh.sharding import fsdp, tensor
from jaxtrain.models.build import abstract_model, build_model
from jaxtrain.models.layered import stacked_blocks
from jaxtrain.nn.module import take_apart
from jaxtrain.nn.stack import LayerLoop
from jaxtrain.planner.arithmetic import asked_flops
from jaxtrain.program.collectives import dot_flops
from jaxtrain.program.text import program_text
from jaxtrain.step.assembly import assemble
from jaxtrain.step.batches import fields_of

TESTS = Path(__file__).parents[1]
sys.path.append(str(TESTS / "planner"))
from programs import held, lowered  # noqa: E402

EXPERIMENT = jaxtrain.Experiment(
    EncoderConfig(),
    Cloze(),
    jaxtrain.AdamW(3e-3, weight_decay=0.0),
    batch=16,
    steps=6,
    microbatches=2,
    sharding=fsdp() | tensor(),
)
CUBE = (("data", 2), ("fsdp", 2), ("tensor", 2))
STAGED = (("fsdp", 2), ("stage", 2), ("tensor", 2))
FULL, DOTS = "scanned, prefetch, remat full", "scanned, remat dots_and_attention"
LAYOUTS = {
    "cube": Layout(CUBE),
    "1F1B": Layout(STAGED, pipeline="1F1B", microbatches=4, loop=FULL),
    "zero bubble": Layout(
        (("data", 2), ("stage", 2), ("tensor", 2)),
        pipeline="zero bubble, 2 chunks, residuals",
        microbatches=4,
        loop=DOTS,
    ),
}


def norm(x: np.ndarray, scale: np.ndarray, bias: np.ndarray) -> np.ndarray:
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * scale + bias


def dense(p: dict[str, np.ndarray], batch: dict[str, np.ndarray], heads: int) -> tuple[float, ...]:
    """The equations in NumPy: loss and count of what was masked, and how much of it was found."""
    x = p["words"][batch["noised"]] + p["places"][None]
    x = norm(x, p["norm.scale"], p["norm.bias"])
    for i in range(len(p["period.0.query"])):
        w = {k.removeprefix("period.0."): v[i] for k, v in p.items() if k.startswith("period")}
        rows, seq, width = x.shape
        q, k, v = (
            (x @ w[n]).reshape(rows, seq, heads, -1).swapaxes(1, 2)
            for n in ("query", "key", "value")
        )
        scores = q @ k.swapaxes(-1, -2) / np.sqrt(width // heads)
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        o = (scores / scores.sum(-1, keepdims=True)) @ v
        o = o.swapaxes(1, 2).reshape(rows, seq, width)
        x = norm(x + o @ w["out"], w["first_norm.scale"], w["first_norm.bias"])
        h = np.asarray(jax.nn.gelu(x @ w["up"]))
        x = norm(x + h @ w["down"], w["last_norm.scale"], w["last_norm.bias"])
    z = x @ p["words"][:60].T
    z = z - z.max(-1, keepdims=True)
    lost = (
        np.log(np.exp(z).sum(-1)) - np.take_along_axis(z, batch["original"][..., None], -1)[..., 0]
    )
    found = z.argmax(-1) == batch["original"]
    return tuple(float((v * batch["hidden"]).sum()) for v in (lost, np.ones_like(lost), found))


def test_it_computes_its_equations() -> None:
    config = EncoderConfig()
    batch = Rows(Cloze(), 3).rows(np.arange(64))
    batch["hidden"] = np.where(batch["hidden"] > 0, 1.0, 0.25).astype(np.float32)
    module: Any = build_model(config, jax.random.key(1))
    with jax.default_matmul_precision("highest"):
        sums = module.loss(
            jax.tree.map(jnp.asarray, batch), loop=LayerLoop(unroll=False, remat="full")
        )

    params = {k: np.asarray(v, np.float64) for k, v in take_apart(module).params.items()}
    lost, count, found = dense(params, batch, config.heads)
    assert float(sums.loss) == pytest.approx(lost, rel=1e-5)
    assert float(sums.count) == count and float(sums.others["accuracy"]) == found > 0


@pytest.mark.parametrize(
    "name",
    ["cube", *(pytest.param(k, marks=pytest.mark.exhaustive) for k in ("1F1B", "zero bubble"))],
)
def test_a_layout_is_the_same_run_and_sends_what_is_predicted(name: str) -> None:
    layout, small = LAYOUTS[name], shrink(EXPERIMENT, devices=8)
    assert small.model == EXPERIMENT.model
    found = difference(layout, program(small, layout)(), program(small, layout.reference())())
    assert found.passed, str(found)
    e = experiment_on(small, layout)
    fields = fields_of(e.data.open("train", seed=0, cache_dir=Path()), e.data)
    kept = held(assemble(e, jaxtrain.mesh_from_axes(**dict(layout.axes)), fields))
    assert kept.lines and not kept.broken, "\n".join(map(str, kept.broken))


class Attends(Layer):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        del self.up, self.down, self.last_norm

    def __call__(self, x: jax.Array, places: jax.Array, comm: Any, *, layer: Any) -> jax.Array:
        return self.first_norm(x + self.attend(x, places, comm))


class Multiplies(Layer):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        del self.query, self.key, self.value, self.out, self.first_norm

    def __call__(self, x: jax.Array, places: jax.Array, comm: Any, *, layer: Any) -> jax.Array:
        return self.last_norm(x + self.multiply(x, comm))


class ApartConfig(EncoderConfig):
    """Its two branches are blocks of their own."""

    def build(self, key: jax.Array, *, kernel: Any = None) -> Encoder:
        encoder = Encoder(self, kernel, key=key)
        makes = [partial(Attends, self, kernel), partial(Multiplies, self, kernel)]
        encoder.period = stacked_blocks(key, makes, self.layers)
        return encoder

    def describe(self) -> Any:
        said = super().describe()
        (block,) = said.period
        return replace(said, period=(block[:2], block[2:]))


@pytest.mark.parametrize("remat", ["attention", pytest.param("dots", marks=pytest.mark.slow)])
def test_unlike_blocks_of_a_period_send_what_is_predicted(remat: str) -> None:
    """One policy is over both: what the first keeps is made though the second keeps nothing."""
    e = experiment_on(shrink(EXPERIMENT, devices=8), LAYOUTS["1F1B"])
    loop = LayerLoop(unroll=True, remat=remat)
    e = replace(e, model=ApartConfig(layers=2), execution=replace(e.execution, loop=loop))
    fields = fields_of(e.data.open("train", seed=0, cache_dir=Path()), e.data)
    kept = held(assemble(e, jaxtrain.mesh_from_axes(stage=2, tensor=2), fields))
    assert kept.lines and not kept.broken, "\n".join(map(str, kept.broken))


@pytest.mark.exhaustive
def test_the_certificate(monkeypatch: pytest.MonkeyPatch) -> None:
    every = layouts(8, "quick", context=False)
    monkeypatch.setattr(certificate, "layouts", lambda devices, which, **_: every)
    differences = [difference for difference, _ in certificate.certify(EXPERIMENT, devices=8)]
    failed = [str(difference) for difference in differences if not difference.passed]
    assert len(differences) == len(every[0]) == every[1] and not failed, "\n".join(failed)


def test_it_trains_and_is_kept_and_goes_on_elsewhere(tmp_path: Path) -> None:
    """The loss of an untrained model is that of guessing; accuracy stands beside it."""

    def run(directory: Path, steps: int, **axes: int) -> jaxtrain.Result:
        saved = replace(
            EXPERIMENT,
            checkpoints=jaxtrain.SavePolicy(every=1000),
            evaluation=jaxtrain.Evaluation(every=100, batches=1, final_batches=1),
        )
        return jaxtrain.train(
            saved, jaxtrain.mesh_from_axes(**axes), run_dir=directory, steps=steps,
            cache_dir=tmp_path, stream=io.StringIO(),
        )  # fmt: skip

    first = run(tmp_path / "run", 3, data=2, fsdp=2, tensor=2)
    rest = run(tmp_path / "run", 6, fsdp=2, stage=2)
    alone = run(tmp_path / "alone", 6, data=1)
    lines = first.history + rest.history
    for key in ("loss", "accuracy"):
        expected = [line[key] for line in alone.history]
        np.testing.assert_allclose([line[key] for line in lines], expected, rtol=1e-5, atol=1e-7)
    losses = [line["loss"] for line in lines]
    assert abs(losses[0] - np.log(60)) < 0.2 and losses[-1] < losses[0] - 0.2
    assert rest.evaluation.keys() >= {"eval_loss", "eval_accuracy"}
    for key, value in alone.evaluation.items():
        assert rest.evaluation[key] == pytest.approx(value, rel=1e-5)


@pytest.mark.exhaustive
def test_all_four_axes_at_once(tmp_path: Path) -> None:
    """On sixteen devices, in a process of their own."""
    script = """
import json, sys
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 16)
import jaxtrain
from test_encoder import EXPERIMENT
found = {}
for name, axes in {"one": {"data": 1}, "all": dict(data=2, fsdp=2, stage=2, tensor=2)}.items():
    mesh = jaxtrain.mesh_from_axes(**axes)
    run = jaxtrain.train(EXPERIMENT, mesh, stream=sys.stderr, cache_dir=sys.argv[1])
    found[name] = [line["loss"] for line in run.history], run.session.assembly.mode
print(json.dumps(found))
"""
    ran = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        capture_output=True, text=True, check=False, cwd=tmp_path,
        env=bare_environment(tmp_path, TESTS, TESTS / "models"),
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    np.testing.assert_allclose(found["all"][0], found["one"][0], rtol=1e-5)
    assert found["all"][1] == "explicit"


def test_adapters_alone_are_trained_beside_its_matrices(tmp_path: Path) -> None:
    tuned = replace(EXPERIMENT, fine_tuning=FineTuning(lora=LoRA(2, 4.0, targets=("*",))))
    mesh = jaxtrain.mesh_from_axes(fsdp=2, stage=2, tensor=2)
    run = jaxtrain.train(tuned, mesh, stream=io.StringIO(), cache_dir=tmp_path)
    assert run.session is not None
    assembly, params = run.session.assembly, run.session.state.params
    weights = ("query", "key", "value", "out", "up", "down")
    adapters = {f"period.0.{w}_lora_{side}" for w in weights for side in "ab"}
    assert params.keys() - assembly.frozen == adapters
    assert all(np.asarray(params[name]).any() for name in adapters)
    first = abstract_model(EXPERIMENT.model).params
    assert params["period.0.query_lora_a"].shape == (4, 64, 2) and first.keys() < params.keys()
    assert run.history[-1]["loss"] < run.history[0]["loss"]


def test_the_flops_of_a_step_are_those_of_its_description() -> None:
    e = experiment_on(shrink(EXPERIMENT, devices=8), Layout((("tensor", 2),)))
    e = replace(e, execution=replace(e.execution, attention=Reference()))
    fields = fields_of(e.data.open("train", seed=0, cache_dir=Path()), e.data)
    assembly = assemble(e, jaxtrain.mesh_from_axes(tensor=2), fields)
    compiled = lowered(assembly).compile(compiler_options=assembly.compiler_options or None)
    assert dot_flops(program_text(compiled)) == asked_flops(assembly)


class Liar(EncoderConfig):
    def describe(self) -> Any:
        said = super().describe()
        return replace(said, periods=3, tables=("words", "nowhere"))


class Saying(EncoderConfig):
    """One that says something else of itself."""

    other: ClassVar[dict[str, Any]] = {}

    def describe(self) -> Any:
        return replace(super().describe(), **self.other)


WORDS, HEAD = "words", of.Head("words", 60, 64, 32)
BARE = of.Residual((of.Elementwise(),))
SAID: dict[str, tuple[dict[str, Any], str]] = {
    "a metric's name": ({"sums": ("grad_norm",)}, "'grad_norm' would hide the metric"),
    "a metric's name, held out": ({"sums": ("eval_loss",)}, "'eval_loss' would hide the metric"),
    "an ability": ({"can": frozenset({"fly"})}, r"can=\['fly'\]; the abilities are adapters"),
    "another head": ({"head": replace(HEAD, leaf="word")}, "word is no parameter.*mean 'words'"),
    "another width": ({"embed": 32}, r"words is \[64, 32\], and the module has \[64, 64\]"),
    "more rows": ({"head": replace(HEAD, vocab=99)}, "vocab=99 of a table of padded=64"),
    "a name of nothing": ({"entry": (of.Bias(("place",)),)}, "place names no.*mean 'places'"),
    "no fields": ({"fields": {}}, r"fields=\{\}; name the fields of a batch"),
    "no operation": ({"period": (("up",),)}, "'up' is no jaxtrain.operations.Operation"),
    "no tuple": ({"period": (BARE,)}, "the block at period.0. is Residual.*a tuple of operations"),
}


@pytest.mark.parametrize("name", SAID)
def test_what_a_description_says_wrongly_is_refused(name: str) -> None:
    other, told = SAID[name]
    kind = type("Kind", (Saying,), {"other": other})
    with pytest.raises(ValueError, match=told):
        jaxtrain.check(replace(EXPERIMENT, model=kind()), jaxtrain.mesh_from_axes(fsdp=2))


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "what enter reads": (
        {"entry": (of.Elementwise(("norm.",)),)},
        r"enter\(\) reads places, which",
    ),
    "sums": ({"sums": ("right",)}, r"sums=\('right',\), and the loss returned \('accuracy',\)"),
}


@pytest.mark.parametrize(
    ("name", "axes"),
    [("what enter reads", {"stage": 2}), ("sums", {"stage": 2}), ("sums", {"data": 1})],
)
def test_what_its_methods_do_otherwise_is_refused(
    name: str, axes: dict[str, int], tmp_path: Path
) -> None:
    """On stages a parameter that is read on the other side would get no gradient."""
    other, told = WRONG[name]
    kind = type("Kind", (Saying,), {"other": other})
    e = replace(EXPERIMENT, model=kind(), steps=1)

    def train() -> jaxtrain.Result:
        mesh = jaxtrain.mesh_from_axes(**axes)
        return jaxtrain.train(e, mesh, stream=io.StringIO(), cache_dir=tmp_path)

    with pytest.raises(ValueError, match=told):
        train()


def test_what_it_says_is_held_against_its_parameters() -> None:
    with pytest.raises(ValueError) as caught:
        jaxtrain.check(replace(EXPERIMENT, model=Liar()), jaxtrain.mesh_from_axes(fsdp=2))
    told = str(caught.value)
    assert "periods=3, and the module's stack has 4; say periods=4" in told
    assert "nowhere names no parameter" in told
