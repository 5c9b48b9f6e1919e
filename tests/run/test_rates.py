"""What is logged of a run's speed, learning rate and past is true of the steps it is said of."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import optax
import pytest

import jaxtrain
from jaxtrain.data import BatchRamp
from jaxtrain.run.history import History
from jaxtrain.session.rates import Rates
from jaxtrain.session.rows import AHEAD, CountedDocuments, document_lengths
from jaxtrain.step.assembly import assemble
from jaxtrain.telemetry.metrics import read_metrics

ONE = jaxtrain.mesh_from_axes(data=1)


def clock(*times: float) -> Callable[[], float]:
    ticks: Iterator[float] = iter(times)
    return lambda: next(ticks)


def test_speeds_are_means_since_the_written_line(own: jaxtrain.Experiment) -> None:
    """Steps of 1, 3, 2 and 6 s, an evaluation of 5 s behind the third and one of 7 s before the
    line of the fourth is written; batches of 2, 2, 4, 4 and 6 rows."""
    ramp = replace(own, batch=BatchRamp(start=2, end=6, increment=2, steps=2))
    times = (10.0, 11.0, 14.0, 14.0, 19.0, 21.0, 21.0, 28.0, 34.0)
    rates = Rates(assemble(ramp, ONE), clock=clock(*times))
    assert rates.of(1, 0.5) == {"tokens_per_s": None, "step_s": None, "data_s": 0.5}
    rates.written()
    assert rates.of(2, 0.75) == {"tokens_per_s": 2 * 8, "step_s": 1.0, "data_s": 0.25}
    assert rates.of(3, 1.5) == {"tokens_per_s": 6 * 8 / 4, "step_s": 2.0, "data_s": 0.5}
    with rates.paused():
        pass
    found = rates.of(4, 3.5)
    assert found == {"tokens_per_s": 10 * 8 / 6, "step_s": 2.0, "data_s": 1.0}
    with rates.paused():
        pass
    rates.written()
    assert rates.of(5, 4.5) == {"tokens_per_s": 6 * 8 / 6, "step_s": 6.0, "data_s": 1.0}


def test_rows_without_tokens_are_examples(own: jaxtrain.Experiment) -> None:
    fields = {"image": ((8, 8, 3), np.dtype(np.float32)), "rows": ((), np.dtype(np.int32))}
    rates = Rates(assemble(own, ONE, fields), clock=clock(0.0, 2.0))
    rates.of(1, 0.0)
    assert rates.of(2, 0.0) == {"examples_per_s": 4.0, "step_s": 2.0, "data_s": 0.0}


@pytest.mark.parametrize("window", [None, 3])
def test_mfu_causal_counts_pairs_within_documents(
    decoder: jaxtrain.Experiment, tmp_path: Path, window: int | None
) -> None:
    """A run's own figure against the mask of the rows it read, element by element."""
    (block,) = decoder.model.period
    block = replace(block, attention=replace(block.attention, window=window))
    model = replace(decoder.model, period=(block,))
    data = replace(decoder.data, isolate_documents=True)
    given = replace(
        decoder, model=model, data=data, batch=BatchRamp(start=8, end=16, increment=8, steps=2)
    )
    given = replace(given, logging=jaxtrain.Logging(every=2, tensorboard=False), steps=4)
    machine = replace(ONE, simulated=False)  # of fake devices no MFU is told
    jaxtrain.train(given, machine, run_dir=tmp_path, cache_dir=tmp_path, stream=io.StringIO())
    lines = {line["step"]: line for line in read_metrics(tmp_path)}
    assert sorted(lines) == [1, 2, 4] and "mfu_full" not in lines[1]
    opened = data.open("train", seed=0, cache_dir=tmp_path)
    for step, rows in ((2, range(8, 16)), (4, range(16, 48))):
        segments = opened.rows(np.array(rows))["segments"]
        q, k = np.indices((8, 8))
        seen = (q >= k) & (q - k < (window or 8))
        alike = segments[:, :, None] == segments[:, None, :]
        pairs = int(np.sum(seen & alike & (segments > 0)[:, None]))
        flops = model.flops(seq=8, sequences=len(rows))
        causal = flops.matmul + flops.attention_full * pairs / (len(rows) * 64)
        assert lines[step]["mfu_causal"] / lines[step]["mfu_full"] == pytest.approx(
            causal / (flops.matmul + flops.attention_full)
        )
        held = len(document_lengths(segments)) / len(segments)
        assert lines[step]["documents_per_row"] == pytest.approx(held)


@pytest.mark.parametrize("seed", range(3))
def test_document_lengths_are_those_of_equal_segments(seed: int) -> None:
    rng = np.random.default_rng(seed)
    segments = np.sort(rng.integers(0, 4, (6, 9)), axis=1)
    expected = [int(np.sum(row == n)) for row in segments for n in sorted({*row.tolist()} - {0})]
    assert document_lengths(segments).tolist() == expected


def test_documents_of_one_process_stand_for_those_of_all(own: jaxtrain.Experiment) -> None:
    """It reads 4 of the 8 rows, then 4 of 16; a step is asked for once, or never."""
    data = replace(own.data, isolate_documents=True).open("train", seed=0, cache_dir=Path())
    ramp, expected = BatchRamp(start=8, end=16, increment=8, steps=1), {}
    counted = CountedDocuments(data, ramp, start=0)
    for step, (rows, share) in enumerate(((range(4), 2), (range(8, 12), 4)), 1):
        segments = counted.rows(np.array(rows))["segments"]
        lengths, counts = np.unique(document_lengths(segments), return_counts=True)
        expected[step] = {int(n): share * int(c) for n, c in zip(lengths, counts, strict=True)}
    assert counted.of(2) == expected[2] and counted.of(1) == expected[1] and counted.of(1) is None
    for _ in range(3 * AHEAD):
        counted.rows(np.array([0]))
    assert len(counted._counts) <= AHEAD


@pytest.mark.parametrize("steps", [1, 9, 10, 11, 12, 40, 41, 1000])
@pytest.mark.parametrize("start", [0, 3])
def test_a_history_is_bounded_and_of_the_whole_run(steps: int, start: int) -> None:
    history = History(10)
    for step in range(start + 1, start + steps + 1):
        history.add({"step": step})
        assert len(history.lines) <= 10 and history.lines[-1]["step"] == step
    kept = [line["step"] - start for line in history.lines]
    gaps = set(np.diff(kept[:-1]).tolist())
    assert kept[0] == 1 and len(gaps) <= 1 and all(gap & (gap - 1) == 0 for gap in gaps)
    assert kept == list(range(1, steps + 1)) if steps <= 10 else len(kept) >= 5


@dataclass(frozen=True)
class Own:
    """A user's own optimizer, whose field says half of the rate that it takes."""

    injected: bool
    learning_rate: float = 0.5

    def violations(self, steps: int) -> list[str]:
        return []

    def build(self, axes: Any, *, steps: int, batch: int) -> optax.GradientTransformation:
        rate = optax.linear_schedule(2 * self.learning_rate, 0.0, 4)
        if not self.injected:
            return optax.chain(optax.identity(), optax.sgd(rate))
        return optax.chain(optax.identity(), optax.inject_hyperparams(optax.sgd)(rate))


@pytest.mark.parametrize("injected", [True, False])
def test_the_rate_of_an_optimizer_of_ones_own_is_the_one_it_took_or_none(
    injected: bool, own: jaxtrain.Experiment, opened: Any, stepped: Any
) -> None:
    session = opened(replace(own, optimizer=Own(injected)))
    for rate in (1.0, 0.75, 0.5):
        metrics = stepped(session)
        assert metrics["update_norm"] / metrics["grad_norm"] == pytest.approx(rate, rel=1e-5)
        assert metrics.get("learning_rate") == (pytest.approx(rate) if injected else None)


def test_a_run_of_an_optimizer_without_a_rate_that_only_skips_is_ended(
    own: jaxtrain.Experiment, poisoned: Any
) -> None:
    class Everywhere(poisoned):
        def open(self, split: str, **options: Any) -> Any:
            dataset = self.corpus.open(split, **options)
            clean = dataset.rows
            dataset.rows = lambda i: {**clean(i), "weights": np.full((len(i), 8), np.inf, "f4")}
            return dataset

    given = replace(own, optimizer=Own(False), data=Everywhere(own.data, 0), steps=40)
    with pytest.raises(ValueError, match=r"20 steps in a row.*were not finite \(loss "):
        jaxtrain.train(given, ONE, stream=io.StringIO())
