"""What a save says of its evaluation, by which `Best` compares it with others; and where a run is
after it went back to one."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from jaxtrain import Evaluation
from jaxtrain.checkpoint.policy import EVALUATED_BATCHES
from jaxtrain.cluster.phases import Phases
from jaxtrain.fault_tolerance.ledger import entry_of, sum_up
from jaxtrain.run.saves import Saves

WHOLE, LOSS = 6, {"eval_loss": 1.5}


def rated(evaluation: Evaluation | None, step: int, evaluated_at: int | None) -> dict[str, float]:
    saves = object.__new__(Saves)
    saves.session = SimpleNamespace(  # type: ignore[assignment]
        experiment=SimpleNamespace(evaluation=evaluation)
    )
    saves.run = SimpleNamespace(planned_last=WHOLE)  # type: ignore[assignment]
    saves.result = SimpleNamespace(evaluation=LOSS)  # type: ignore[assignment]
    saves.evaluated_at = evaluated_at
    return saves._evaluation_at(step)


@pytest.mark.parametrize("batches", [1, 8, None])
@pytest.mark.parametrize("final_batches", [1, 8, None])
def test_no_two_rated_saves_are_over_unlike_evaluations(
    batches: int | None, final_batches: int | None
) -> None:
    """That after the last step is over `final_batches`: it has no values where those are others."""
    evaluation = Evaluation(every=2, batches=batches, final_batches=final_batches)
    values = {**LOSS, EVALUATED_BATCHES: batches or 0}
    assert rated(evaluation, 4, 4) == values
    assert rated(evaluation, WHOLE, WHOLE) == (values if batches == final_batches else {})


def test_without_an_evaluation_of_its_own_step_a_save_has_no_values() -> None:
    assert rated(Evaluation(every=2), 3, 2) == {}
    assert rated(Evaluation(every=2), 3, None) == {}
    assert rated(None, 3, None) == {}
    assert LOSS == {"eval_loss": 1.5}, "the result of the run is its own"


def test_steps_before_a_spike_are_lost_to_the_ledger_once_and_the_start_keeps_its_first() -> None:
    """Ten steps of a second from 20 on, back to 26, and four more; then a start from 28 on."""
    now = [0.0]
    phases, saves = Phases(lambda: now[0]), Saves(*(MagicMock() for _ in range(12)))
    saves.session.phases = phases  # type: ignore[misc]
    saves.uninterrupted.side_effect = lambda act: act()  # type: ignore[attr-defined]
    saves.rollbacks.go_back.return_value = 26  # type: ignore[union-attr]
    saves.evaluated_at = 25

    def steps(last: int) -> None:
        while phases.now.step < last:
            now[0] += 1
            phases.advance(phases.now.step + 1)

    phases.begin_at(20)
    phases.enter("step")
    steps(30)
    assert saves.go_back() == 26 == saves.result.steps
    assert saves.evaluated_at is None
    assert (phases.now.step, phases.now.first) == (26, 20)
    steps(30)
    first = entry_of(phases.now, now[0], began=0.0, ended=now[0])
    assert (first.first, first.done, first.seconds["step"]) == (20, 30, 10.0)
    later = first._replace(first=28, done=30, seconds={"step": 2.0})
    assert dict(sum_up([first, later]).seconds) == {"step": 10.0, "lost": 4.0 + 2.0}
