"""A chip that computes or keeps wrongly is found, and named, and nothing of it is saved."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest

import jaxtrain
from jaxtrain import Health
from jaxtrain.checkpoint import committed_steps
from jaxtrain.cluster.phases import Phases
from jaxtrain.fault_tolerance.state_faults import change_state
from jaxtrain.health import checks
from jaxtrain.health.checks import WrongNumbers


class Faulty(jaxtrain.Callback):
    """Changes the state, or the step, before a step."""

    def __init__(self, kind: str, step: int) -> None:
        self.kind, self.step = kind, step

    def before_step(self, run: jaxtrain.Run, step: int) -> None:
        if step == self.step:
            change_state(self.kind, run._session)


@pytest.fixture
def experiment(decoder: jaxtrain.Experiment) -> jaxtrain.Experiment:
    return replace(decoder, steps=12, batch=6, checkpoints=jaxtrain.SavePolicy(every=3, keep=9))


@pytest.fixture
def run(experiment: jaxtrain.Experiment, tmp_path: Path) -> Callable[..., Any]:
    def train(
        health: Health, *callbacks: Any, stream: Any = None, phases: Any = None, **axes: int
    ) -> Any:
        execution = replace(experiment.execution, health=health)
        return jaxtrain.train(
            replace(experiment, execution=execution),
            jaxtrain.mesh_from_axes(**axes),
            run_dir=tmp_path / "run",
            cache_dir=tmp_path,
            stream=stream or io.StringIO(),
            callbacks=callbacks,
            phases=phases,
        )

    return train


FOUND = {
    "the odd one of three": (dict(data=3), "device 0 of process 0, against most others", (0,)),
    "both of two": (
        dict(data=2), "device 0 of process 0 and device 1 of process 0, one of which", (0, 1),
    ),
    "with their parts split": (
        dict(data=3, fsdp=2), "device 0 of process 0, against most others", (0,),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FOUND)
def test_a_flipped_bit_is_found_at_the_next_comparison(name: str, run, tmp_path: Path) -> None:
    """And the run goes on from the save before it, to the same losses."""
    axes, said, devices = FOUND[name]
    with pytest.raises(WrongNumbers, match=said) as caught:
        run(Health(replicas=4), Faulty("flip", 6), **axes)
    assert "after step 6" in str(caught.value), "a save was due, and is not of such a state"
    assert caught.value.devices == devices
    assert caught.value.processes == (0,), "one of them is, whichever"
    assert committed_steps(tmp_path / "run" / "checkpoints") == [3]
    found = run(Health(replicas=4), **axes)
    clean = {line["step"]: line["loss"] for line in found.history}
    assert sorted(clean) == list(range(4, 13))


def test_rows_are_sent_where_something_differs_and_a_supervisor_hears_whose(
    run, monkeypatch
) -> None:
    sent: list[int] = []

    def gather(text: str) -> list[str]:
        sent.append(len(text))
        return [text]

    monkeypatch.setattr(checks, "all_gather_text", gather)
    phases = Phases()
    with pytest.raises(WrongNumbers):
        run(Health(replicas=2), Faulty("flip", 4), data=3, phases=phases)
    assert len(sent) == 4 and max(sent[:3]) < 24 < 200 < sent[3], "after steps 2, 3, 4; the rows"
    assert phases.now.wrong == (0,)


def test_it_is_found_between_saves_too(run, tmp_path: Path) -> None:
    with pytest.raises(WrongNumbers, match="after step 8"):
        run(Health(replicas=2), Faulty("flip", 8), data=3)
    assert committed_steps(tmp_path / "run" / "checkpoints") == [3, 6]


def test_a_step_that_was_computed_wrongly_differs_when_it_is_taken_again(run) -> None:
    """Where there are no copies to compare."""
    with pytest.raises(WrongNumbers, match=r"step 8 was taken twice .* different on device 0 of"):
        run(Health(replay=4), Faulty("wrong", 8), fsdp=2)


@pytest.mark.parametrize("axes", [dict(data=3), dict(fsdp=2), dict(stage=1)], ids=str)
def test_where_nothing_fails_nothing_changes(axes, run, experiment, tmp_path: Path) -> None:
    """The same losses as without, and steps taken twice count once."""
    stream = io.StringIO()
    found = run(Health(replicas=2, replay=3), stream=stream, **axes)
    plain = jaxtrain.train(
        experiment, jaxtrain.mesh_from_axes(**axes), cache_dir=tmp_path, stream=io.StringIO()
    )
    losses = [[line["loss"] for line in each.history] for each in (found, plain)]
    assert losses[0] == losses[1] and len(losses[0]) == 12
    alone = "of the state's bytes have one copy, uncompared" in stream.getvalue()
    assert alone == ("data" not in axes)


def test_a_fault_within_what_is_skipped_is_not_one_of_the_chip(run) -> None:
    """Gradients that are not finite are the same on all copies."""
    found = run(Health(replicas=1, replay=2), Faulty("nan", 6), data=2)
    assert [line["skipped"] for line in found.history] == [0] * 5 + [1] * 7


def test_compressed_sums_keep_errors_of_their_own(run, experiment) -> None:
    """Which lie on one device each, and are no copies."""
    codec = jaxtrain.compression.Compressed(jaxtrain.compression.Int8())
    execution = replace(experiment.execution, reducer=codec, small_leaf=1)
    execution = replace(execution, health=Health(replicas=2, replay=2))
    found = jaxtrain.train(
        replace(experiment, execution=execution, checkpoints=None),
        jaxtrain.mesh_from_axes(data=2),
        stream=io.StringIO(),
    )
    assert len(found.history) == 12


def test_half_a_step_is_refused() -> None:
    with pytest.raises(ValueError, match=r"replicas=0 must be .*; replay=0.5 must be a whole"):
        Health(replicas=0, replay=0.5)  # type: ignore[arg-type]
    assert jax.device_count() >= 6
