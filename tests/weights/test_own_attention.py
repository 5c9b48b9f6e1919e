"""An attention kernel of a user's own is used where it means the same, and refused elsewhere."""

from __future__ import annotations

import io
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

import jaxtrain
from jaxtrain.attention import Blockwise, Reference
from jaxtrain.context import Ulysses
from jaxtrain.experiment.resolve import resolve
from jaxtrain.validation.own_attention import own_attention_violations
from jaxtrain.weights.export import export
from jaxtrain.weights.generate import generate, generate_text


def louder(q: Any, k: Any, v: Any, *masks: Any) -> Any:
    """Attention in which a head is the louder the later it comes."""
    o, lse = Reference()(q, k, v, *masks)
    return o * jnp.arange(1, o.shape[2] + 1, dtype=o.dtype)[:, None], lse


def halved(q: Any, k: Any, v: Any, *masks: Any) -> Any:
    o, lse = Reference()(q, k, v, *masks)
    return o / 2, lse


halved.heads_alike = True  # type: ignore[attr-defined]


def exact(q: Any, k: Any, v: Any, *masks: Any) -> Any:
    return Reference()(q, k, v, *masks)


exact.standard = True  # type: ignore[attr-defined]


def using(experiment: jaxtrain.Experiment, kernel: Any) -> jaxtrain.Experiment:
    return replace(experiment, execution=jaxtrain.Execution(attention=kernel))


def violations_on(experiment: jaxtrain.Experiment, **sizes: int) -> list[str]:
    resolved, unbuildable = resolve(experiment, jaxtrain.mesh_from_axes(data=1), sizes)
    assert not unbuildable
    return own_attention_violations(resolved)


SAYS = {
    "heads": "tensor=2 gives each device some of the heads",
    "rows": "context=2 gives each device a part of a row",
    "traded": "context=2 gives each device some of the heads",
}


@pytest.mark.parametrize(
    ("kernel", "heads", "rows"),
    [
        (louder, False, False),
        (halved, True, False),
        (exact, True, True),
        (Blockwise(), True, True),
        (None, True, True),
    ],
)
def test_a_kernel_that_does_not_say_so_gets_no_part_of_heads_or_rows(
    kernel: Any, heads: bool, rows: bool, decoder: jaxtrain.Experiment
) -> None:
    """And no text is continued in its place."""
    sharding = jaxtrain.fsdp() | jaxtrain.tensor()
    experiment = replace(using(decoder, kernel), sharding=sharding)
    for sizes, taken, says in (
        ({"data": 2, "fsdp": 2}, True, ""),
        ({"tensor": 2}, heads, SAYS["heads"]),
        ({"context": 2}, rows, SAYS["rows"]),
    ):
        violations = violations_on(experiment, **sizes)
        assert len(violations) == (not taken) and all(says in each for each in violations)
    traded = replace(
        experiment, execution=jaxtrain.Execution(None, attention=kernel, context=Ulysses())
    )
    violations = violations_on(traded, context=2)
    assert len(violations) == (not heads) and all(SAYS["traded"] in each for each in violations)
    # Those before the stack have their heads split over the stages.
    (block,) = experiment.model.period
    before = replace(experiment, model=replace(experiment.model, layers=3, prefix=(block,)))
    for tried, taken in (experiment, True), (before, heads):
        violations = violations_on(tried, stage=2)
        assert len(violations) == (not taken), violations
        assert all("stage=2 gives each device some of the heads" in each for each in violations)
    sampled = replace(decoder, evaluation=jaxtrain.Evaluation(sample=jaxtrain.Sample("a")))
    problems = violations_on(using(sampled, kernel))
    assert bool(problems) == (not rows)
    assert all(f"{kernel.__name__}.standard = True" in each for each in problems)


def test_a_kernel_alike_for_all_heads_sees_whole_rows_where_heads_are_traded(
    decoder: jaxtrain.Experiment, tmp_path: Path
) -> None:
    losses = []
    for axes, context in (({"data": 1}, None), ({"context": 2}, Ulysses())):
        execution = jaxtrain.Execution(attention=halved, context=context)
        tried = replace(decoder, execution=execution, steps=2)
        mesh = jaxtrain.mesh_from_axes(**axes)
        losses.append([line["loss"] for line in jaxtrain.train(tried, mesh).history])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_it_is_refused_before_anything_is_compiled(decoder: jaxtrain.Experiment) -> None:
    """In either mode, and not where a mesh leaves heads whole."""
    for mode in "explicit", "gspmd":
        execution = jaxtrain.Execution(attention=louder, mode=mode)
        tried = replace(decoder, execution=execution, sharding=jaxtrain.fsdp() | jaxtrain.tensor())
        jaxtrain.check(tried, jaxtrain.mesh_from_axes(fsdp=2))
        with pytest.raises(ValueError, match="use tensor=1, say that it does the same to every"):
            jaxtrain.check(tried, jaxtrain.mesh_from_axes(tensor=2))


def test_what_a_run_was_trained_with_is_kept_or_refused(
    decoder: jaxtrain.Experiment, tmp_path: Path
) -> None:
    """`generate` and `export` compute standard attention, and a run goes on with its own kernel."""
    mesh, trust = jaxtrain.mesh_from_axes(data=1), ("test_own_attention",)
    saved = replace(decoder, steps=1, checkpoints=jaxtrain.SavePolicy(every=1))

    def train(kernel: Any, name: str) -> jaxtrain.Result:
        return jaxtrain.train(
            using(saved, kernel), mesh, run_dir=tmp_path / name, stream=io.StringIO()
        )

    result = train(halved, "own")
    train(exact, "standard")
    says = "halved, a kernel of your own.*which is another model, unless halved.standard = True"
    assert result.session is not None
    with pytest.raises(ValueError, match=r"continues text by.*halved\.standard = True"):
        generate(result.session, "a")
    for trusted, reason in (
        ((), "not looked at: .*trust"),
        (trust, "does not say that it is"),
    ):
        with pytest.raises(ValueError, match=f"{says}.*{reason}"):
            generate_text(tmp_path / "own", "a", trust=trusted)
        with pytest.raises(ValueError, match=f"{says}.*{reason}"):
            export(tmp_path / "own", tmp_path / "folder", trust=trusted)
    assert not (tmp_path / "folder").exists()
    with pytest.raises(
        ValueError, match=r"exact, a kernel of your own.*--trust test_own_attention"
    ):
        export(tmp_path / "standard", tmp_path / "folder")
    export(tmp_path / "standard", tmp_path / "folder", trust=trust)
    assert (tmp_path / "folder" / "config.json").exists()
    for kernel in None, exact, Blockwise():
        with pytest.raises(ValueError, match=r"another experiment.*execution\.attention"):
            train(kernel, "own")
    with pytest.raises(ValueError, match=r"another experiment.*execution\.attention"):
        train(halved, "standard")
    assert train(halved, "own").steps == 1
    for kernel, name, taken in (
        (None, "own", False),
        (exact, "own", False),
        (halved, "own", True),
        (halved, "standard", False),
        (exact, "standard", True),
    ):
        start = jaxtrain.FromRun(str(tmp_path / name))
        tuned = replace(using(saved, kernel), fine_tuning=jaxtrain.FineTuning(start=start))
        with nullcontext() if taken else pytest.raises(ValueError, match="use the same"):
            jaxtrain.check(tuned, mesh)
