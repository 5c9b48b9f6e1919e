"""What a save says of its evaluation, by which `Best` compares it with others."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from jaxtrain import Evaluation
from jaxtrain.checkpoint.policy import EVALUATED_BATCHES
from jaxtrain.run.saves.saves import Saves

WHOLE, LOSS = 6, {"eval_loss": 1.5}


def rated(evaluation: Evaluation | None, step: int, evaluated_at: int | None) -> dict[str, float]:
    saves = object.__new__(Saves)
    saves.session = SimpleNamespace(  # type: ignore[assignment]
        experiment=SimpleNamespace(evaluation=evaluation)
    )
    saves.run = SimpleNamespace(whole=WHOLE)  # type: ignore[assignment]
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
