"""An operation that is not of the package: gated linear attention (Yang et al. 2024), with a state
along the sequence. It says what it reads and computes, and all else follows."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from encoder import MATRIX, Encoder, EncoderConfig, Layer
from test_encoder import CUBE, EXPERIMENT, LAYOUTS, held, lowered

import jaxtrain
from jaxtrain import operations as of
from jaxtrain.certificate.certify import difference
from jaxtrain.certificate.layouts import Layout, experiment_on
from jaxtrain.certificate.outcome import program
from jaxtrain.certificate.shrink import shrink
from jaxtrain.experiment.fine_tuning import FineTuning, LoRA
from jaxtrain.models.adapters import column, row
from jaxtrain.models.description import ModelDescription
from jaxtrain.models.layered import stacked_blocks
from jaxtrain.nn.local import Local
from jaxtrain.nn.param import normal
from jaxtrain.nn.stack import LayerLoop
from jaxtrain.operations.block import chain
from jaxtrain.planner.arithmetic import asked_flops
from jaxtrain.planner.overhead import overhead
from jaxtrain.program.collectives import dot_flops
from jaxtrain.program.text import program_text
from jaxtrain.step.assembly import Assembly, assemble
from jaxtrain.step.batches import fields_of


@dataclass(frozen=True)
class LinearAttention(of.Operation):
    """Its derivative reads its input, and the first of two products of [seq, seq] in each head."""

    heads: int
    head_dim: int
    seq: int

    def nodes(self, entry: int, number: int, *, narrow: bool = False) -> list[of.Node]:
        flops, read = 2 * self.seq * self.heads * self.head_dim, (entry, number)
        return [
            of.Node(inputs=(entry,), input_reads=read, token_flops=2 * flops, inner_flops=flops)
        ]

    def unsplit(
        self, table: Mapping[str, tuple[str, ...]], sizes: Mapping[str, int], prefix: str = ""
    ) -> list[str]:
        n = math.prod(sizes[axis] for axis in table.get("heads", ()))
        return [f"{prefix}{self.heads} states do not split over {n}"] if self.heads % n else []


class Recurrent(Layer):
    def __init__(self, config: EncoderConfig, kernel: Any, key: jax.Array) -> None:
        super().__init__(config, kernel, key)
        shape = (config.width, config.heads)
        self.gate = normal(key, "gate", shape, ("embed", "heads"), **MATRIX)

    def attend(self, x: jax.Array, places: jax.Array, comm: Any) -> jax.Array:
        *qkv, gate = column(comm, self, ("query", "key", "value", "gate"), x)
        shape = (*places.shape, -1, x.shape[-1] // self.heads)
        q, k, v = (y.reshape(shape) for y in qkv)
        decay = jnp.cumsum(jax.nn.log_sigmoid(gate.reshape(*places.shape, -1)), axis=1)
        earlier = jnp.tril(jnp.ones((places.shape[1],) * 2, bool))[..., None]
        weights = jnp.exp(jnp.where(earlier, decay[:, :, None] - decay[:, None], -jnp.inf))
        o = jnp.einsum("rqkh,rkhd->rqhd", jnp.einsum("rqhd,rkhd->rqkh", q, k) * weights, v)
        return row(comm, self, "out", o.reshape(-1, o.shape[-2] * o.shape[-1]))


class RecurrentConfig(EncoderConfig):
    def build(self, key: jax.Array, *, kernel: Any = None) -> Encoder:
        encoder = Encoder(self, kernel, key=key)
        encoder.period = stacked_blocks(key, [partial(Recurrent, self, kernel)], self.layers)
        return encoder

    def describe(self) -> ModelDescription:
        described = super().describe()
        ((attention, *rest),) = described.period
        into, _, out = attention.branch
        gate = of.Weight("gate", self.width, self.heads)
        own = LinearAttention(self.heads, self.width // self.heads, self.positions)
        branch = (of.ColumnParallel((*into.weights, gate)), own, out)
        return replace(described, period=((of.Residual(branch), *rest),))


OWN = replace(EXPERIMENT, model=RecurrentConfig())


def assembled(e: jaxtrain.Experiment, **axes: int) -> Assembly:
    fields = fields_of(e.data.open("train", seed=0, cache_dir=Path()), e.data)
    return assemble(e, jaxtrain.mesh_from_axes(**axes), fields)


def test_it_is_the_recurrence() -> None:
    """S = g S + k v', o = q S, a token at a time."""
    layer = Recurrent(RecurrentConfig(width=16, heads=2), None, jax.random.key(3))
    x = np.random.default_rng(0).normal(size=(2, 5, 16))
    p = {k: np.asarray(getattr(layer, k)[...], np.float64) for k in ("query", "key", "value")}
    q, k, v = ((x @ p[name]).reshape(2, 5, 2, 8) for name in ("query", "key", "value"))
    gate = 1 / (1 + np.exp(-x @ np.asarray(layer.gate[...], np.float64)))
    state, outs = np.zeros((2, 2, 8, 8)), []
    for t in range(5):
        state = gate[:, t, :, None, None] * state + k[:, t, :, :, None] * v[:, t, :, None]
        outs.append(np.einsum("rhd,rhde->rhe", q[:, t], state).reshape(2, 16))
    expected = np.stack(outs, 1) @ np.asarray(layer.out[...], np.float64)
    with jax.default_matmul_precision("highest"):
        o = layer.attend(jnp.asarray(x.reshape(10, 16)), jnp.zeros((2, 5), int), Local(jnp.float32))
    np.testing.assert_allclose(o.reshape(2, 5, 16), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "name",
    ["1F1B", *(pytest.param(k, marks=pytest.mark.exhaustive) for k in ("cube", "zero bubble"))],
)
def test_a_layout_is_the_same_run_and_sends_what_is_predicted(name: str) -> None:
    layout, small = LAYOUTS[name], shrink(OWN, devices=8)
    found = difference(layout, program(small, layout)(), program(small, layout.reference())())
    assert found.passed, str(found)
    kept = held(assembled(experiment_on(small, layout), **dict(layout.axes)))
    assert kept.lines and not kept.broken, "\n".join(map(str, kept.broken))


def test_its_flops_are_those_of_the_program() -> None:
    assembly = assembled(experiment_on(shrink(OWN, devices=8), Layout((("tensor", 2),))), tensor=2)
    compiled = lowered(assembly).compile(compiler_options=assembly.compiler_options or None)
    assert dot_flops(program_text(compiled)) == asked_flops(assembly)


def test_its_flops_in_a_pipeline_are_those_of_the_program() -> None:
    """W has the inputs of products: B computes the first product again, and not the output."""
    layout = Layout((("stage", 2),), pipeline="zero bubble", microbatches=4)
    e = experiment_on(shrink(OWN, devices=8), layout)
    loop = LayerLoop(unroll=True, remat="dots")
    assembly = assembled(replace(e, execution=replace(e.execution, loop=loop)), stage=2)
    compiled = lowered(assembly).compile(compiler_options=assembly.compiler_options or None)
    work = overhead(assembly)
    assert work is not None and work.flops is not None
    assert 2 * dot_flops(program_text(compiled)) == sum(work.flops)


def test_its_flops_are_among_the_models() -> None:
    model = RecurrentConfig(layers=3)
    of_layer = sum(node.flops(5, 16) for node in chain(model.describe().period))
    flops = model.describe().flops(seq=16, sequences=5)
    assert flops.matmul == 3 * of_layer + 2 * 5 * 16 * model.width * model.vocab
    products = 2 * 64 * (4 * 64 + 8 + 2 * 2 * 64)
    assert of_layer == 5 * 16 * (products + 2 * 2 * 16 * 64) and flops.attention_full == 0


def test_it_refuses_a_split() -> None:
    e = replace(OWN, model=RecurrentConfig(heads=2))
    with pytest.raises(ValueError, match="2 states do not split over 4"):
        jaxtrain.check(e, jaxtrain.mesh_from_axes(tensor=4))


@dataclass(frozen=True)
class Saying(RecurrentConfig):
    """One that leaves out a leaf of its block."""

    left_out: str = ""

    def describe(self) -> ModelDescription:
        described = super().describe()
        ((attention, first, rest, last),) = described.period
        if self.left_out == "first_norm.":
            return replace(described, period=((attention, rest, last),))
        into, own, out = attention.branch
        weights = tuple(w for w in into.weights if w.leaf != self.left_out)
        branch = (of.ColumnParallel(weights), own, out)
        return replace(described, period=((of.Residual(branch), first, rest, last),))


@pytest.mark.parametrize("leaf", ["gate", "query", "first_norm."])
def test_a_parameter_that_no_operation_names_is_refused(leaf: str) -> None:
    e = replace(OWN, model=Saying(left_out=leaf))
    with pytest.raises(ValueError, match=f"no operation names the parameter period.0.{leaf}"):
        jaxtrain.check(e, jaxtrain.mesh_from_axes(fsdp=2))


def adapters_that_go_on_elsewhere(e: jaxtrain.Experiment, tmp_path: Path) -> set[str]:
    """Trains adapters of all matrices, on one mesh and then on another, as on one device. Returns
    the names of the leaves."""
    tuned = replace(
        e,
        fine_tuning=FineTuning(lora=LoRA(2, 4.0, targets=("*",))),
        checkpoints=jaxtrain.SavePolicy(every=1000),
    )

    def run(directory: str, steps: int, **axes: int) -> jaxtrain.Result:
        mesh, where = jaxtrain.mesh_from_axes(**axes), tmp_path / directory
        return jaxtrain.train(
            tuned, mesh, run_dir=where, steps=steps, stream=io.StringIO(), cache_dir=tmp_path
        )

    first = run("moved", 3, **dict(CUBE))
    moved, alone = run("moved", 6, fsdp=2, stage=2), run("alone", 6, data=1)
    losses = [line["loss"] for line in (*first.history, *moved.history)]
    np.testing.assert_allclose(losses, [line["loss"] for line in alone.history], rtol=1e-5)
    assert moved.session is not None
    return {*moved.session.state.params}


@pytest.mark.slow
def test_adapters_are_trained_and_go_on_elsewhere(tmp_path: Path) -> None:
    leaves = adapters_that_go_on_elsewhere(OWN, tmp_path)
    assert {k for k in leaves if "gate_lora" in k} == {
        "period.0.gate_lora_a",
        "period.0.gate_lora_b",
    }
