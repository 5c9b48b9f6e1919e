"""Batches without a token to learn from: they have no loss, which is not a loss of 0."""

from __future__ import annotations

import io
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from tiny import BATCH, Table

import jaxtrain
from jaxtrain import Health, LossSpikes
from jaxtrain.checkpoint import committed_steps
from jaxtrain.checkpoint.policy import Best, Keep
from jaxtrain.telemetry.metrics import read_metrics


@dataclass(frozen=True)
class Unlearnt:
    """A corpus in which some batches have no weight. every: of the training batches one in so many
    has weights, the first among them; 0 for none. since: held-out batches from this one on have.
    name: of the field of weights."""

    corpus: Any
    every: int = 1
    since: int = 0
    name: str = "weights"

    def open(self, split: str, *, seed: int, cache_dir: Path) -> Any:
        dataset = self.corpus.open(split, seed=seed, cache_dir=cache_dir)
        read = dataset.rows

        def rows(numbers: np.ndarray) -> dict[str, np.ndarray]:
            batch = read(numbers)
            at = numbers // BATCH
            trained = at % self.every == 0 if self.every else at < 0
            learnt = trained if split == "train" else at >= self.since
            weights = batch.pop("weights") * learnt[:, None]
            return {**batch, self.name: weights.astype(np.float32)}

        dataset.rows = rows
        return dataset


def train(experiment: jaxtrain.Experiment, folder: Path) -> tuple[jaxtrain.Result, str]:
    stream = io.StringIO()
    mesh = jaxtrain.mesh_from_axes(data=2)
    result = jaxtrain.train(
        experiment, mesh, run_dir=folder / "run", cache_dir=folder, stream=stream
    )
    return result, stream.getvalue()


def test_a_step_without_a_learnt_token_has_no_loss_and_is_no_spike(
    own: jaxtrain.Experiment, tmp_path: Path
) -> None:
    """Of two batches of three nothing is learnt. As losses of 0 they would make a spike of each
    other one, and be the last that the run says."""
    spikes = LossSpikes(above=50.0, least=0.5, window=4, patience=1, back=1, skip_more=0)
    experiment = replace(
        own,
        steps=18,
        data=Unlearnt(own.data, every=3),
        optimizer=jaxtrain.SGD(1e-3, momentum=0.0, weight_decay=0.0),
        checkpoints=jaxtrain.SavePolicy(every=2, keep=9),
        execution=jaxtrain.Execution(health=Health(spikes=spikes)),
    )
    result, text = train(experiment, tmp_path)
    losses = [line["loss"] for line in result.history]
    assert [loss is not None for loss in losses] == [step % 3 == 0 for step in range(18)]
    assert all(2 < loss < 4 for loss in losses if loss is not None)
    assert "SPIKE" not in text and committed_steps(tmp_path / "run" / "checkpoints")[-1] == 18
    assert result.loss == losses[15]
    lines = read_metrics(tmp_path / "run")
    assert [line["loss"] for line in lines] == losses and "loss_nonfinite" not in lines[1]
    assert "step 17/18 no token learnt from" in text and "step 16/18 loss 2." in text


@pytest.mark.parametrize("every", [0, 4])
def test_a_run_that_learns_nothing_says_so(
    own: jaxtrain.Experiment, tmp_path: Path, every: int
) -> None:
    """At its end, and again where all its steps were done before."""
    policy = jaxtrain.SavePolicy(every=5)
    experiment = replace(own, steps=5, data=Unlearnt(own.data, every), checkpoints=policy)
    for _ in range(2):
        _, text = train(experiment, tmp_path)
        assert text.count("NOTE no token of any batch had a weight above 0") == (not every)


def test_an_evaluation_without_a_learnt_token_is_refused_before_the_first_step(
    own: jaxtrain.Experiment, decoder: jaxtrain.Experiment, tmp_path: Path
) -> None:
    """Unless one of the rows that it reads has a weight."""
    for experiment in own, decoder:
        evaluation = jaxtrain.Evaluation(every=4, batches=2, final_batches=3)
        for first, problem in (1, ""), (2, "16 held-out rows"), (99, "16 held-out rows"):
            data = Unlearnt(own.data, since=first)
            tried = replace(experiment, steps=1, data=data, evaluation=evaluation)
            if problem:
                with pytest.raises(ValueError, match=f"no token of the {problem}.*evaluation=None"):
                    train(tried, tmp_path / "refused")
                assert not (tmp_path / "refused" / "run" / "metrics.jsonl").exists()
            elif experiment is own:
                result, _ = train(tried, tmp_path)
                assert math.isfinite(result.evaluation["eval_loss"])


class Masked(Table):
    """Weighs tokens by a field of another name, of which nobody knows before it is run."""

    def loss(self, batch: dict[str, jax.Array], *, key: Any) -> tuple[jax.Array, jax.Array]:
        return super().loss({**batch, "weights": batch["mask"]}, key=key)


def masked(rngs: nnx.Rngs) -> Masked:
    return Masked(rngs)


def test_an_evaluation_of_nothing_is_not_the_best(own: jaxtrain.Experiment, tmp_path: Path) -> None:
    experiment = replace(
        own,
        model=masked,
        steps=4,
        data=Unlearnt(own.data, since=99, name="mask"),
        evaluation=jaxtrain.Evaluation(every=1, batches=1, final_batches=1),
        checkpoints=jaxtrain.SavePolicy(every=4, keep=Keep(latest=1, best=Best("eval_loss"))),
    )
    result, text = train(experiment, tmp_path)
    assert result.evaluation == {} and all("eval_loss" not in line for line in result.history)
    assert text.count("NOTE no token of the held-out rows has a weight above 0") == 4
    assert committed_steps(tmp_path / "run" / "checkpoints") == [4]
