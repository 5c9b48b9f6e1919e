"""A stream of two arrays and a recurrence, of a model that is not of the package: the same run on
each mesh, as its description predicts it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from test_encoder import CUBE, LAYOUTS, held, lowered
from test_own_operation import adapters_that_go_on_elsewhere, assembled
from translator import VOCAB, Reversed, Rows, Translator, TranslatorConfig

import jaxtrain
from jaxtrain import operations as of
from jaxtrain.attention.kernels import Reference
from jaxtrain.certificate.certify import difference
from jaxtrain.certificate.layouts import Layout, experiment_on
from jaxtrain.certificate.outcome import program
from jaxtrain.certificate.shrink import shrink
from jaxtrain.experiment.fine_tuning import FineTuning, LoRA
from jaxtrain.mesh.sharding import fsdp, tensor
from jaxtrain.models import Member
from jaxtrain.models.adapters import column, row
from jaxtrain.models.build import build_model
from jaxtrain.models.description import ModelDescription
from jaxtrain.nn.module import put_together, take_apart
from jaxtrain.nn.param import normal
from jaxtrain.nn.stack import LayerLoop
from jaxtrain.planner.arithmetic import asked_flops
from jaxtrain.planner.assembled import why_not_predicted
from jaxtrain.planner.overhead import overhead
from jaxtrain.program.collectives import dot_flops
from jaxtrain.program.text import program_text

EXPERIMENT = jaxtrain.Experiment(
    TranslatorConfig(),
    Reversed(),
    jaxtrain.AdamW(3e-3, weight_decay=0.0),
    batch=16,
    steps=6,
    microbatches=2,
    sharding=fsdp() | tensor(),
)


def recurrence(w: Any, x: jax.Array, heads: int) -> jax.Array:
    """S = g S + k v', o = q S, a token at a time."""
    rows, seq, width = x.shape
    q, k, v = (
        (x @ w[name]).reshape(rows, seq, heads, -1) for name in ("receive", "remember", "recall")
    )
    g = jax.nn.sigmoid(x @ w["gate"])
    state, outs = jnp.zeros((rows, heads, width // heads, width // heads)), []
    for t in range(seq):
        state = g[:, t, :, None, None] * state + k[:, t, :, :, None] * v[:, t, :, None]
        outs.append(jnp.einsum("rhd,rhde->rhe", q[:, t], state).reshape(rows, width))
    return jnp.stack(outs, 1) @ w["give"]


def dense(p: Any, batch: Any, heads: int) -> jax.Array:
    """The equations: the sum of losses."""
    x, source = p["words"][batch["tokens"]], p["others"][batch["source"]]
    root = jnp.sqrt(jnp.mean(source**2, axis=-1, keepdims=True) + 1e-5)
    source = source / root * p["norm.scale"][None, None]
    for i in range(len(p["period.0.query"])):
        w = {k.removeprefix("period.0."): v[i] for k, v in p.items() if k.startswith("period")}
        source = source + recurrence(w, source, heads)
        q, k, v = x @ w["query"], source @ w["key"], source @ w["value"]
        q, k, v = (y.reshape(*y.shape[:2], heads, -1) for y in (q, k, v))
        scores = jnp.einsum("rqhd,rkhd->rhqk", q, k) / np.sqrt(q.shape[-1])
        o = jnp.einsum("rhqk,rkhd->rqhd", jax.nn.softmax(scores, axis=-1), v)
        x = x + o.reshape(x.shape) @ w["out"]
    logits = x @ p["words"][:VOCAB].T
    z = jax.nn.logsumexp(logits, -1)
    return jnp.sum(z - jnp.take_along_axis(logits, batch["targets"][..., None], -1)[..., 0])


@pytest.mark.parametrize("unroll", [False, True])
def test_it_computes_its_equations_and_their_gradients(unroll: bool) -> None:
    config = TranslatorConfig()
    batch = jax.tree.map(jnp.asarray, Rows(3).rows(np.arange(4)))
    module = take_apart(build_model(config, jax.random.key(1)))
    loop = LayerLoop(unroll=unroll, remat="full")

    def loss(params: Any) -> jax.Array:
        return put_together(module.static, params).loss(batch, loop=loop).loss

    with jax.default_matmul_precision("highest"):
        own, grads = jax.value_and_grad(loss)(module.params)
        expected, exact = jax.value_and_grad(dense)(module.params, batch, config.heads)
    np.testing.assert_allclose(own, expected, rtol=1e-5)
    for name, grad in grads.items():
        scale = float(jnp.abs(exact[name]).max())
        np.testing.assert_allclose(grad, exact[name], atol=1e-4 * scale, err_msg=name)
        assert scale > 0.01, name


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_is_the_same_run_and_sends_what_is_predicted(name: str) -> None:
    layout, small = LAYOUTS[name], shrink(EXPERIMENT, devices=8)
    found = difference(layout, program(small, layout)(), program(small, layout.reference())())
    assert found.passed, str(found)
    kept = held(assembled(experiment_on(small, layout), **dict(layout.axes)))
    assert kept.lines and not kept.broken, "\n".join(map(str, kept.broken))


def test_its_flops_are_those_of_the_program() -> None:
    e = experiment_on(EXPERIMENT, Layout((("tensor", 2),)))
    execution = replace(e.execution, attention=Reference())
    assembly = assembled(replace(e, execution=execution), tensor=2)
    compiled = lowered(assembly).compile(compiler_options=assembly.compiler_options or None)
    assert dot_flops(program_text(compiled)) == asked_flops(assembly)


def compiled_and_predicted_flops(model: Any, pipeline: str, remat: str) -> tuple[float, float]:
    layout = Layout((("stage", 2),), pipeline=pipeline, microbatches=4)
    e = experiment_on(replace(EXPERIMENT, model=model), layout)
    loop = LayerLoop(unroll=True, remat=remat)
    execution = replace(e.execution, loop=loop, attention=Reference())
    assembly = assembled(replace(e, execution=execution), stage=2)
    compiled = lowered(assembly).compile(compiler_options=assembly.compiler_options or None)
    work = overhead(assembly)
    assert work is not None and work.flops is not None
    return 2 * dot_flops(program_text(compiled)), sum(work.flops)


def test_its_flops_in_a_pipeline_are_those_of_the_program() -> None:
    found, expected = compiled_and_predicted_flops(TranslatorConfig(), "zero bubble", "dots")
    assert found == expected


def test_adapters_are_trained_and_go_on_elsewhere(tmp_path: Path) -> None:
    leaves = adapters_that_go_on_elsewhere(EXPERIMENT, tmp_path)
    trained = {k for k in leaves if k.endswith("_lora_a")}
    assert {"period.0.gate_lora_a", "period.0.key_lora_a"} <= trained


@dataclass(frozen=True)
class Wrong(TranslatorConfig):
    changes: Any = ()

    def describe(self) -> ModelDescription:
        return replace(super().describe(), **dict(self.changes))


X, SOURCE = Member(16, ("words",)), Member(32, ("others",))
NORM = of.Elementwise(("norm.",))
WRONG = {
    "another member": (
        {"entry": (of.Update("memory", (NORM,)),)},
        "entry: it reads 'memory', and the stream has 'x', 'source': name a member of it, or add",
    ),
    "no member": ({"entry": (NORM,)}, r"is of no member, and .* use Update\('x', \(\.\.\.,\)\)"),
    "an Update within": (
        {"entry": (of.Update("x", (of.Residual((of.Update("source", (NORM,)),)),)),)},
        "operation 0, Update, has an Update of 'source' within; write one Update after the other",
    ),
    "no stream": ({"stream": {}}, "it reads 'source', 'x', and the stream has no members"),
    "no Member": ({"stream": {"x": 16, "source": 32}}, "give a jaxtrain.models.Member for each"),
    "no dict": ({"stream": (X, SOURCE)}, "give a dict of a jaxtrain.models.Member for each name"),
    "no name": ({"stream": {0: X, "source": SOURCE}}, "stream has 0: .* for each name"),
    "no width": ({"stream": {"x": Member(0, ("words",)), "source": SOURCE}}, "width=0 must be"),
    "no tables": ({"stream": {"x": Member(16, "words"), "source": SOURCE}}, "a tuple of names"),
    "no flag": ({"stream": {"x": replace(X, leaves=1), "source": SOURCE}}, "leaves=1 must be True"),
    "no tuple of operations": (
        {"entry": (of.Update("source", NORM),)},
        r"Update has Elementwise\(.*\) in the place of a tuple of operations: write \(\.\.,\)",
    ),
    "no branches": (
        {"entry": (of.Update("source", (of.Branches(NORM),)),)},
        r"Branches has Elementwise\(.*\) as its branches; write a tuple of tuples",
    ),
    "a late Read": (
        {"entry": (of.Update("source", (NORM, of.Read("x"))),)},
        r"Read\(member='x'\) follows other operations; begin a branch with it",
    ),
    "a Read alone": ({"entry": (of.Read("x"),)}, "stands by itself; begin a branch with it"),
    "looked up in vain": (
        {"entry": (of.Update("source", (of.Read("x"), NORM)),)},
        "the tables of 'source' are looked up, and an Update replaces what they gave",
    ),
    "another lookup": ({"lookups": ("words",)}, "name the same tables in both"),
    "another width": (
        {"stream": {"x": X, "source": Member(16, ("others",))}},
        r"others is \[32, 16\], and the module has \[32, 32\]",
    ),
    "none that leaves": (
        {"stream": {k: replace(m, leaves=False) for k, m in {"x": X, "source": SOURCE}.items()}},
        "embed=16 is the width of no member of the stream that leaves the stack",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_stream_is_refused(name: str) -> None:
    changes, reason = WRONG[name]
    e = replace(EXPERIMENT, model=Wrong(changes=tuple(changes.items())))
    with pytest.raises(ValueError, match=reason):
        jaxtrain.check(e, jaxtrain.mesh_from_axes(fsdp=2))


def test_a_stream_that_enter_does_not_return_is_refused_on_stages() -> None:
    stream = {"x": X, "source": SOURCE, "third": Member(8)}
    e = replace(EXPERIMENT, model=Wrong(changes=(("stream", stream),)))
    with pytest.raises(ValueError, match=r"'third': 8\}, and enter\(\) returns \{'source': \(32, "):
        jaxtrain.compile(e, jaxtrain.mesh_from_axes(stage=2))


TUNED = {
    "all": (FineTuning(lora=LoRA(2, 4.0, targets=("*",))), True),
    "of both, by one": (FineTuning(trainable=("period.0.give",)), True),
    "of x alone": (FineTuning(lora=LoRA(2, 4.0, targets=("*.query",))), False),
    "entering with x alone": (FineTuning(trainable=("words", "period.0.*")), False),
}


@pytest.mark.parametrize("name", TUNED)
def test_what_frozen_leaves_send_is_predicted_if_all_members_have_gradients(name: str) -> None:
    tuned, predicted = TUNED[name]
    e = replace(shrink(EXPERIMENT, devices=8), fine_tuning=tuned)
    assembly = assembled(experiment_on(e, LAYOUTS["cube"]), **dict(CUBE))
    reason = why_not_predicted(assembly)
    assert (reason is None) == predicted and (predicted or "some members" in str(reason))
    if predicted:
        kept = held(assembly)
        assert kept.lines and not kept.broken, "\n".join(map(str, kept.broken))


def test_a_stream_of_another_dtype_is_refused_on_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    entered = Translator.enter

    def wide(*arguments: Any) -> Any:
        return jax.tree.map(lambda x: x.astype(jnp.float32), entered(*arguments))

    monkeypatch.setattr(Translator, "enter", wide)
    e = replace(EXPERIMENT, precision=jaxtrain.bf16)
    with pytest.raises(ValueError, match="'float32'}, and the stream is in bfloat16"):
        jaxtrain.compile(e, jaxtrain.mesh_from_axes(stage=2))


def not_predicted(model: Any, loop: LayerLoop = LayerLoop(), **axes: int) -> str | None:  # noqa: B008
    e = replace(shrink(EXPERIMENT, devices=8), model=model)
    return why_not_predicted(assembled(replace(e, execution=jaxtrain.Execution(loop=loop)), **axes))


def test_what_a_compiler_leaves_out_of_the_last_layer_is_not_predicted() -> None:
    """A decoder that reads the source before the layer changes it."""
    (block,) = TranslatorConfig().describe().period
    late = Wrong(changes=(("period", (block[::-1],)),))
    assert "the last layer computes values" in str(not_predicted(late, fsdp=2))
    assert not_predicted(TranslatorConfig(), fsdp=2) is None
    assert not_predicted(late, LayerLoop(prefetch=False), fsdp=2) is None
    assert not_predicted(late, stage=2) is None
    stream = {"x": X, "source": replace(SOURCE, leaves=True)}
    assert not_predicted(Wrong(changes=(*late.changes, ("stream", stream))), fsdp=2) is None


def test_a_member_without_a_gradient_is_not_predicted() -> None:
    stream = {"x": X, "source": SOURCE, "third": Member(8)}
    (block,) = TranslatorConfig().describe().period
    third = of.Update("x", (of.Residual((of.Branches(((), (of.Read("third"),))),)),))
    changes = (("stream", stream), ("period", ((*block, third),)))
    assert "some members of the stream have no" in str(
        not_predicted(Wrong(changes=changes), data=2)
    )


AHEAD = ("source", "source", "x")


class Ahead(nnx.Module):
    """A block before the stack that changes one member."""

    def __init__(self, width: int, member: str, key: jax.Array) -> None:
        self.member = member
        self.up = normal(key, "up", (width, width), ("embed", "mlp"), std=0.1)
        self.down = normal(key, "down", (width, width), ("mlp", "embed"), std=0.1)

    def __call__(self, stream: Any, rows: jax.Array, comm: Any, *, layer: Any) -> Any:
        (h,) = column(comm, self, ("up",), stream[self.member])
        return {**stream, self.member: stream[self.member] + row(comm, self, "down", jnp.tanh(h))}


class Prefixed(Translator):
    first_layer = len(AHEAD)

    def __init__(self, config: TranslatorConfig, kernel: Any, *, key: jax.Array) -> None:
        super().__init__(config, kernel, key=key)
        widths = {"source": config.wide, "x": config.width}
        self.prefix = nnx.List([Ahead(widths[k], k, key) for k in AHEAD])

    def enter(self, tables: Any, batch: Any, rows: Any, comm: Any, loop: Any) -> Any:
        x = super().enter(tables, batch, rows, comm, loop)
        for i, block in enumerate(self.prefix):
            x = self.run_outside(block, f"prefix.{i}.", x, rows, comm, loop, layer=i)
        return x


@dataclass(frozen=True)
class PrefixedConfig(TranslatorConfig):
    def build(self, key: jax.Array, *, kernel: Any = None) -> Prefixed:
        return Prefixed(self, kernel, key=key)

    def describe(self) -> ModelDescription:
        def ahead(member: str, n: int) -> of.Block:
            up, down = of.Weight("up", n, n), of.Weight("down", n, n)
            branch = (of.ColumnParallel((up,)), of.Elementwise(), of.RowParallel(down))
            return (of.Update(member, (of.Residual(branch),)),)

        widths = {"source": self.wide, "x": self.width}
        prefix = {f"prefix.{i}.": ahead(k, widths[k]) for i, k in enumerate(AHEAD)}
        return replace(super().describe(), prefix=prefix)


@pytest.mark.parametrize("loop", ["unrolled, remat none", "scanned, prefetch, remat full"])
def test_of_blocks_before_a_pipeline_what_later_ones_read_runs_again(loop: str) -> None:
    layout = LAYOUTS["1F1B"]._replace(loop=loop)
    e = replace(shrink(EXPERIMENT, devices=8), model=PrefixedConfig())
    kept = held(assembled(experiment_on(e, layout), **dict(layout.axes)))
    assert kept.lines and not kept.broken, "\n".join(map(str, kept.broken))


def test_the_flops_of_blocks_before_a_pipeline_are_those_of_the_program() -> None:
    found, expected = compiled_and_predicted_flops(PrefixedConfig(), "1F1B", "full")
    assert found == expected


def test_a_member_may_pass_the_stack_as_it_was_looked_up() -> None:
    stream = {"x": X, "source": SOURCE, "third": Member(16, ("words",))}
    (block,) = TranslatorConfig().describe().period
    changes = (("stream", stream), ("period", ((*block, of.Update("third", ())),)))
    jaxtrain.check(
        replace(EXPERIMENT, model=Wrong(changes=changes)), jaxtrain.mesh_from_axes(data=2)
    )
