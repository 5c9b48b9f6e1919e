"""Runs with functions of scores: the same on every mesh, with the contract kept; stored, generated
from, branched and refused."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from score_functions import Fading
from test_encoder import held

import jaxtrain
from jaxtrain.attention import Cudnn, Rope, Triton
from jaxtrain.certificate.certify import difference
from jaxtrain.certificate.layouts import Layout, experiment_on
from jaxtrain.certificate.outcome import program
from jaxtrain.certificate.shrink import shrink
from jaxtrain.experiment import Experiment
from jaxtrain.experiment.fine_tuning import FineTuning
from jaxtrain.mesh.axes import keeps_dtype
from jaxtrain.mesh.mesh import load_mesh, mesh_from_axes
from jaxtrain.operations.block import attentions
from jaxtrain.optim.leaves import matrices
from jaxtrain.scores import Alibi, RelativeBias, ScoreFunction
from jaxtrain.step.assembly import assemble, try_assemble

ROOT = Path(__file__).parents[2]
EXPERIMENT = ROOT / "experiments" / "stdlib_lm.py"


def small(scores: ScoreFunction | None, **attention: Any) -> Experiment:
    """The certificate's experiment without rotary embeddings, so that scores alone know places."""
    experiment = shrink(jaxtrain.load_experiment(EXPERIMENT), devices=8)
    (block,) = experiment.model.period
    attention = {"kv_heads": 4, "rope": None, "scores": scores, **attention}
    block = replace(block, attention=replace(block.attention, **attention))
    return replace(experiment, model=replace(experiment.model, period=(block,)))


SPLIT = (("fsdp", 2), ("context", 2), ("tensor", 2))
LAYOUTS = [
    (Alibi(), Layout(SPLIT, context="heads")),
    (Alibi(), Layout((("data", 2), ("fsdp", 2), ("tensor", 2)), "gspmd")),
    (Fading(), Layout(SPLIT, loop="scanned, prefetch, remat full")),
    (RelativeBias(8, 12), Layout((("fsdp", 2), ("stage", 2), ("tensor", 2)), microbatches=4,
     pipeline="zero bubble", periods=4, loop="scanned, remat dots_and_attention")),
    (RelativeBias(8, 12), Layout((("data", 2), ("fsdp", 2), ("tensor", 2)), "gspmd")),
    (Fading(), Layout((("stage", 2), ("context", 4)), pipeline="GPipe, residuals", periods=4,
     context="two levels", microbatches=4)),
    (RelativeBias(8, 12), Layout((("context", 8),), precision="bf16")),
    (Alibi(), Layout((("fsdp", 8),), "explicit, recursive", optimizer="SGD, averages",
     dropout=0.1)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("scores", "layout"),
    [*LAYOUTS[:4], *(pytest.param(*case, marks=pytest.mark.slow) for case in LAYOUTS[4:])],
    ids=str,
)
def test_a_run_is_that_of_one_device_and_sends_what_is_predicted(
    scores: ScoreFunction, layout: Layout, fresh_programs: None
) -> None:
    experiment = small(scores)
    result = difference(
        layout, program(experiment, layout)(), program(experiment, layout.reference())()
    )
    assert result.passed, result
    if "explicit" in layout.mode:
        assembly = assemble(experiment_on(experiment, layout), mesh_from_axes(**dict(layout.axes)))
        assert not (contract := held(assembly)).broken, contract.broken


def test_what_heads_learn_is_saved_goes_on_elsewhere_and_is_not_exported(tmp_path: Path) -> None:
    """With a function of a user's own, whose class config.json names."""
    experiment = replace(
        small(Fading()), steps=4, evaluation=None, checkpoints=jaxtrain.SavePolicy(every=2)
    )
    run = tmp_path / "run"
    whole = jaxtrain.train(experiment, jaxtrain.mesh_from_axes(fsdp=2), run_dir=tmp_path / "whole")
    jaxtrain.train(experiment, jaxtrain.mesh_from_axes(fsdp=2, tensor=2), run_dir=run, steps=2)
    rest = jaxtrain.train(experiment, jaxtrain.mesh_from_axes(context=4), run_dir=run)
    assert rest.loss == pytest.approx(whole.loss, rel=1e-6)
    model = jaxtrain.load(run, trust="score_functions")
    values = np.asarray(model.period[0].attention.score_values[...])
    assert values.shape == (experiment.model.layers, 8)
    assert np.abs(values - Fading().of_heads(8)).max() > 1e-4
    tokens = jnp.arange(24)[None]
    other = jaxtrain.load(tmp_path / "whole", trust="score_functions").logits(tokens)
    assert np.allclose(model.logits(tokens), other, atol=1e-4)
    with pytest.raises(ValueError, match=r"block\.attention\.scores.*Fading"):
        jaxtrain.export(run, tmp_path / "folder", trust="score_functions")


def test_what_heads_learn_is_no_matrix_and_used_in_fp32() -> None:
    assembly = assemble(small(RelativeBias()), mesh_from_axes(data=2))
    name = "period.0.attention.score_values"
    assert not matrices(assembly.split.axes[name])
    assert keeps_dtype(name, 2) and not keeps_dtype("period.0.attention.query", 2)
    (call,) = (c for block in assembly.described.layers[:1] for c in attentions(block))
    assert call.scores == RelativeBias() and call.learned == ("attention.score_values",)


@dataclass(frozen=True)
class Twofold(ScoreFunction):
    def __call__(
        self, score: jax.Array, head: jax.Array, query: jax.Array, key: jax.Array
    ) -> jax.Array:
        return jnp.stack([score, score])


@dataclass(frozen=True)
class Listing(ScoreFunction):
    bounds: Any = ()


class Bare(ScoreFunction):
    def __call__(
        self, score: jax.Array, head: jax.Array, query: jax.Array, key: jax.Array
    ) -> jax.Array:
        return score


@dataclass(frozen=True)
class Unwritten(ScoreFunction):
    trained: ClassVar[bool] = True


@dataclass(frozen=True)
class Branching(ScoreFunction):
    def __call__(
        self, score: jax.Array, head: jax.Array, query: jax.Array, key: jax.Array
    ) -> jax.Array:
        return score if query - key > 8 else score - 1


@dataclass(frozen=True)
class Counting(ScoreFunction):
    def __call__(
        self, score: jax.Array, head: jax.Array, query: jax.Array, key: jax.Array
    ) -> jax.Array:
        return query - key


@dataclass(frozen=True)
class Raising(Counting):
    def of_heads(self, heads: int) -> np.ndarray:
        return np.zeros(heads // 0)


REFUSED = {
    "whole numbers": (Counting(), r"returns int32\[\] of a score"),
    "no values": (Raising(), r"of_heads\(8\) raises ZeroDivisionError"),
    "two scores": (Twofold(), r"returns float32\[2\] of a score, .*return a floating scalar"),
    "no call": (Listing(), r"NotImplementedError: define __call__\(self, score, head, query, key"),
    "a list": (Listing([1]), "period: a block has a field of unhashable type: 'list'; use numbers"),
    "no dataclass": (Bare(), r"put @dataclass\(frozen=True\) above class Bare, so that a run"),
    "nothing to learn": (Unwritten(), r"trained=True and no of_heads\(heads\); return from it"),
    "an if": (Branching(), r"TracerBoolConversionError.*jnp\.where in the place of if"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_function_that_attention_cannot_call_is_refused(name: str) -> None:
    scores, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        assemble(small(scores), mesh_from_axes(data=2))


def test_a_check_takes_no_device() -> None:
    """`launch` checks a run before it starts the processes that the devices are for."""
    source = f"""
from dataclasses import replace
import jax, jaxtrain
from jax._src import xla_bridge
from jaxtrain.scores import RelativeBias
from jaxtrain.step.assembly import assemble
e = jaxtrain.load_experiment({str(EXPERIMENT)!r})
(block,) = e.model.period
attention = replace(block.attention, scores=RelativeBias())
model = replace(e.model, period=(replace(block, attention=attention),))
assemble(replace(e, model=model), jaxtrain.mesh_from_axes(fsdp=8))
assert not xla_bridge.backends_are_initialized()
"""
    subprocess.run([sys.executable, "-c", source], check=True)


def test_a_kernel_of_ones_own_gets_no_function() -> None:
    def own(*inputs: Any) -> Any:
        raise AssertionError("not called")

    own.standard = True  # type: ignore[attr-defined]
    experiment = small(Alibi())
    experiment = replace(experiment, execution=replace(experiment.execution, attention=own))
    with pytest.raises(ValueError, match=r"AttentionConfig\.scores is computed by those of"):
        assemble(experiment, mesh_from_axes(data=2))


NAMED = {
    "function": (Cudnn(), dict(scores=Alibi()), "a function of scores, Alibi(), is not supported"),
    "softcap": (Cudnn(), dict(softcap=5.0), "softcap=5.0 is not supported"),
    "window": (Triton(), dict(window=8), "window=8 is not supported"),
}


@pytest.mark.parametrize("name", NAMED)
def test_a_kernel_that_cannot_is_refused_before_anything_is_compiled(
    name: str, tmp_path: Path
) -> None:
    """Where a row is cut, `Blockwise` has the tiles that it cannot."""
    kernel, attention, reason = NAMED[name]
    experiment = small(**{"scores": None, "head_dim": 64, "rope": Rope(), **attention})
    experiment = replace(experiment, precision=jaxtrain.bf16)
    assert try_assemble(experiment, gpus(tmp_path, "data"))[1] == []
    experiment = replace(experiment, execution=replace(experiment.execution, attention=kernel))
    assert try_assemble(experiment, gpus(tmp_path, "data"))[1] == [
        f"execution.attention={kernel!r}: {reason}; use attention=None, the platform's own"
    ]
    assert try_assemble(experiment, gpus(tmp_path, "context"))[1] == []


def gpus(folder: Path, axis: str) -> jaxtrain.mesh.MeshSpec:
    file = folder / f"{axis}.toml"
    file.write_text(f'chip = "h100_sxm"\ndevices = 2\ndevices_per_host = 2\n[axes]\n{axis} = 2\n')
    return load_mesh(file)


@pytest.mark.parametrize(
    "layout",
    [
        Layout((("context", 2),)),
        pytest.param(
            Layout((("context", 2),), loop="scanned, prefetch, remat full"), marks=pytest.mark.slow
        ),
        pytest.param(
            Layout((("stage", 2), ("context", 2)), pipeline="1F1B", microbatches=4),
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_the_contract_is_kept_where_only_heads_learn(layout: Layout) -> None:
    """Their gradients read the keys of other devices, which get none back in the first layer."""
    trained = replace(small(Fading()), fine_tuning=FineTuning(trainable=("*.score_values",)))
    assembly = assemble(experiment_on(trained, layout), mesh_from_axes(**dict(layout.axes)))
    assert not (contract := held(assembly)).broken, contract.broken
