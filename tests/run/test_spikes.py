"""A loss that jumps: the run goes back to a save from before it, and on with other batches."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import jax
import numpy as np
import pytest

import jaxtrain
from jaxtrain import Health, LossSpikes
from jaxtrain.checkpoint import committed_steps
from jaxtrain.checkpoint.storage import whole_manifest
from jaxtrain.cluster.phases import LOST
from jaxtrain.cluster.requests import Requests
from jaxtrain.data import BatchRamp, rows_of_step
from jaxtrain.data.batch_size import row_numbers
from jaxtrain.fault_tolerance.state_faults import change_state
from jaxtrain.health.checks import WrongNumbers
from jaxtrain.run.hooks import Profiling
from jaxtrain.run.readings import SKIPPED_AT_MOST, Readings
from jaxtrain.run.rollback import Rollbacks, good_step
from jaxtrain.run.saving import Saving
from jaxtrain.run.watch import LossWatch
from jaxtrain.session.skips import Skips, skips_from
from jaxtrain.telemetry.metrics import read_metrics
from jaxtrain.telemetry.profiler import Steps

POLICY = LossSpikes(above=6, least=0.05, window=8, patience=2, back=2, skip_more=1, most=2)


def told_by_numpy(losses: list[float], policy: LossSpikes) -> tuple[int, int] | None:
    """(first high step, step at which it was a spike), by the rule as it is written down."""
    good: list[float] = []
    row: list[int] = []
    for step, loss in enumerate(losses, 1):
        if not np.isfinite(loss):
            continue
        last = np.array(good[-policy.window :])
        high = False
        if len(last) == policy.window:
            middle = np.median(last)
            scale = 1.4826 * np.median(np.abs(last - middle))
            high = bool(loss > middle + max(policy.above * scale, policy.least))
        row = [*row, step] if high else []
        good += [] if high else [loss]
        if len(row) == policy.patience:
            return row[0], step
    return None


def by_watch(losses: list[float], policy: LossSpikes, *, stops: bool = False):
    """The same of `LossWatch`; `stops`: saved and read back between any two losses."""
    watch = LossWatch(policy)
    for step, loss in enumerate(losses, 1):
        watch.add(step, loss)
        if stops:
            watch = LossWatch(policy, json.loads(json.dumps(watch.saved())))
    return None if watch.seen is None else (watch.since, watch.seen)


FLAT = [2.0 + 0.01 * (n % 3) for n in range(20)]
JUMPS = {
    "two in a row": [*FLAT, 9.0, 9.0, 2.0],
    "one alone": [*FLAT, 9.0, 2.0, 9.0, 2.0],
    "before the window is full": [2.0] * 6 + [9.0] * 2 + [2.0] * 9,
    "once it is": [2.0] * 8 + [9.0] * 3,
    "not a number in between": [*FLAT, 9.0, float("nan"), 9.0, float("inf")],
    "within the least rise": [*[2.0] * 10, 2.05, 2.05, 2.0500001, 2.06, 2.07],
    "of a scale of its own": [2.0, 3.0, 2.5, 2.0, 3.0, 2.1, 2.9, 2.5, 6.0, 6.0, 7.0, 8.0],
    "a loss that falls": [*(8 * 0.9**n for n in range(20)), 5.0, 5.0],
    "and down again": [*FLAT, 9.0, 9.0, 2.0, 2.0],
}


@pytest.mark.parametrize("name", JUMPS)
def test_a_spike_is_what_the_rule_says(name: str) -> None:
    losses = JUMPS[name]
    wanted = told_by_numpy(losses, POLICY)
    assert by_watch(losses, POLICY) == by_watch(losses, POLICY, stops=True) == wanted
    assert (wanted is None) == (name in ("one alone", "before the window is full"))


def test_what_was_left_as_it_is_does_not_count() -> None:
    watch = LossWatch(POLICY)
    for step, loss in enumerate([*FLAT, 9.0, 9.0], 1):
        watch.add(step, loss)
    watch.begin_again()
    for step, loss in enumerate([*FLAT, 9.0, 9.0], 30):
        assert watch.seen is None
        watch.add(step, loss)
    assert (watch.since, watch.seen) == (50, 51)


def test_a_patience_that_is_lowered_counts_what_was_high_before() -> None:
    watch = LossWatch(replace(POLICY, patience=4))
    for step, loss in enumerate([*FLAT, 9.0, 9.0], 1):
        watch.add(step, loss)
    watch = LossWatch(POLICY, watch.saved())
    watch.add(23, 9.0)
    assert (watch.since, watch.seen) == (21, 23)


@pytest.mark.parametrize("seed", range(6))
def test_and_of_losses_drawn(seed: int) -> None:
    rng = np.random.default_rng(seed)
    losses = [float(x) for x in 3 + rng.standard_t(1.5, 400) * 0.1]
    policy = LossSpikes(above=rng.uniform(1, 6), window=9 + seed % 2, patience=1 + seed % 3)
    assert by_watch(losses, policy, stops=True) == told_by_numpy(losses, policy)


def test_batches_are_those_that_are_left() -> None:
    """Against a list of batches from which the skipped ones are struck out."""
    left, skips, ran = list(range(400)), Skips(configured=((3, 2),)), 0
    del left[3:5]

    def same(start: int) -> None:
        assert [skips.batch(n) for n in range(start, 60)] == left[start:60]

    same(0)
    for step, seen, more in ((10, 14, 3), (10, 12, 0), (25, 30, 1), (20, 31, 2)):
        last = left[seen - 1]
        skips = skips.back_to(step, seen, more)
        after = last + 1 + more
        left = left[:step] + list(range(after, after + 400))
        same(step)
        ran = step
        by_hand = Skips(configured=skips.pairs)
        assert skips.pairs == tuple(sorted(dict(skips.pairs).items()))
        assert [by_hand.batch(n) for n in range(60)] == [skips.batch(n) for n in range(60)]
    stored = json.loads(json.dumps(skips.before(ran + 1)))
    again = skips_from(ran + 1, skips.configured, stored)
    assert [again.batch(n) for n in range(60)] == [skips.batch(n) for n in range(60)]
    assert skips.before(ran) == [each for each in skips.before(99) if each[0] < ran]


def test_no_row_is_taken_twice_while_a_batch_grows() -> None:
    ramp = BatchRamp(start=2, end=6, increment=2, steps=3)
    rows = row_numbers(ramp, Skips(configured=((2, 3),)).batch)
    taken = [rows(step) for step in range(9)]
    assert [len(each) for each in taken] == [ramp.batch(step) for step in range(9)]
    flat = np.concatenate(taken)
    assert len(set(flat)) == len(flat)
    assert not set(flat) & {int(n) for step in (2, 3, 4) for n in rows_of_step(ramp, step)}


SAVED = {
    "old enough": ([5, 10, 15], 20, 3, 15),
    "just too new": ([5, 10, 15], 18, 3, 10),
    "just old enough": ([5, 10, 15], 19, 3, 15),
    "none is as old": ([12, 15], 16, 9, 12),
    "after the spike": ([15, 20], 15, 0, None),
    "just before it": ([15, 20], 16, 0, 15),
}


@pytest.mark.parametrize("name", SAVED)
def test_the_save_that_is_gone_back_to(name: str) -> None:
    saved, begins, back, wanted = SAVED[name]
    assert good_step(saved, begins, back) == wanted


class Killed(jaxtrain.Callback):
    """Ends the run before a step is taken for the `n`th time, with nothing saved."""

    def __init__(self, step: int, n: int = 1) -> None:
        self.step, self.left = step, n

    def before_step(self, run: jaxtrain.Run, step: int) -> None:
        self.left -= step == self.step
        if not self.left:
            raise WrongNumbers("killed", (), ())


class Stops(jaxtrain.Callback):
    """Asks for a stop after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def after_step(self, run: jaxtrain.Run, step: int) -> None:
        if step == self.step:
            run.stop()


class Bad(jaxtrain.Callback):
    """Before a step takes one of these batches, its parameters are turned around. once: of a chip,
    and not of the data."""

    def __init__(self, *batches: int, once: bool = False) -> None:
        self.batches, self.once, self.events = set(batches), once, list[tuple[str, int]]()

    def before_step(self, run: jaxtrain.Run, step: int) -> None:
        session = run._session
        batch = session.loader.skips.batch(step - 1)
        if batch in self.batches:
            self.batches -= {batch} if self.once else set()
            change_state("spike", session)

    def metrics(self, run: jaxtrain.Run, step: int, values: Any) -> None:
        self.events.append(("metrics", step))

    def after_rollback(self, run: jaxtrain.Run, step: int) -> None:
        assert run.steps == step == int(run.state.step)
        self.events.append(("after_rollback", step))


@pytest.fixture
def train(decoder: jaxtrain.Experiment, tmp_path: Path) -> Callable[..., Any]:
    def run(
        name: str,
        *callbacks: Any,
        spikes: LossSpikes | None = POLICY,
        skip: Any = (),
        replay: int | None = None,
        replicas: int | None = None,
        axes: dict[str, int] | None = None,
        **changed: Any,
    ) -> tuple[Any, str]:
        health = Health(replicas=replicas, replay=replay, spikes=spikes, skip_batches=skip)
        steps = changed.pop("stop_at", None)
        own = {"checkpoints": jaxtrain.SavePolicy(every=5, keep=4), **changed}
        execution = replace(decoder.execution, health=health)
        experiment = replace(decoder, steps=32, execution=execution, **own)
        mesh = jaxtrain.mesh_from_axes(**(axes or {"data": 1}))
        stream = io.StringIO()
        found = jaxtrain.train(
            experiment, mesh, run_dir=tmp_path / name, cache_dir=tmp_path, stream=stream,
            callbacks=callbacks, steps=steps,
        )  # fmt: skip
        return found, stream.getvalue()

    return run


def on_disk(run: Any) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in read_metrics(run.run_dir)}


def whole(run: Any) -> tuple[Any, ...]:
    """What a run has come to, to the bit."""
    leaves = jax.tree.leaves(jax.device_get(run.session.state))
    saved = committed_steps(run.run_dir / "checkpoints")
    return on_disk(run), [leaf.tobytes() for leaf in map(np.asarray, leaves)], saved


KEPT: dict[Any, tuple[Any, ...]] = {}


@pytest.fixture
def told(train) -> tuple[Any, ...]:
    """What a run comes to that was told what `Bad(22)` has others do."""
    if not KEPT:
        run, said = train("told", Bad(22), skip=((20, 5),))
        assert "SPIKE" not in said, "it does not take the batch"
        KEPT["told"] = whole(run)
    return KEPT["told"]


def test_it_comes_to_what_a_run_does_that_was_told(train, told, monkeypatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(Requests, "due", lambda self, step: asked.append(step) or frozenset())
    bad = Bad(22)
    run, said = train("run", bad)
    assert asked == sorted(set(asked)), "what is agreed on for a step to come comes"
    monkeypatch.undo()
    assert run.session.phases.spent()[LOST] > 0 and run.session.guard.step == 32
    assert "jumped at step 23, and was still up at 24: back to step 20, and on without" in said
    assert said.count("SPIKE") == said.count("Health(skip_batches=((20, 5),)) has it") == 1
    assert whole(run) == told
    assert [line["step"] for line in run.history] == list(range(1, 33))
    assert [line["loss"] for line in run.history] == list(on_disk(run).values())
    metrics = [("metrics", step) for step in range(1, 33)]
    at = [*metrics[:24], ("after_rollback", 20), *metrics[20:]]
    assert bad.events == at


@pytest.mark.slow
def test_on_several_devices_too(train) -> None:
    axes = dict(data=2, fsdp=2)
    run, said = train("run", Bad(22), replay=7, axes=axes)
    other, _ = train("told", spikes=None, skip=((20, 5),), axes=axes)
    assert said.count("SPIKE") == 2 and whole(run) == whole(other)


STOPPED = {
    "while its loss is high": dict(killed=(25, 1), high=True),
    "before the next save": dict(killed=(23, 2)),
    "after it": dict(killed=(28, 1)),
    "while its loss is high, and after it": dict(killed=(25, 1), again=(28, 1)),
    "and saved with a high loss": dict(stop_at=23),
    "and saved with two": dict(stops=24),
}


FAST = "while its loss is high, and after it"
NAMES = [n if n == FAST else pytest.param(n, marks=pytest.mark.slow) for n in STOPPED]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.sampled(3)
def test_a_run_that_is_stopped_goes_on_to_the_same(name: str, train, told) -> None:
    """Whatever of the spike it has seen, and whether it has gone back."""
    how = STOPPED[name]
    for key in ("killed", "again"):
        if key in how:
            with pytest.raises(WrongNumbers):
                train("run", Bad(22), Killed(*how[key]))
    if "stops" in how:
        stopped, _ = train("run", Bad(22), Stops(how["stops"]))
        assert stopped.saved == 24 and not stopped.session.loader.skips.detected
    if "stop_at" in how:
        train("run", Bad(22), stop_at=how["stop_at"])
    run, _ = train("run", Bad(22))
    assert whole(run)[:2] == told[:2]


def test_what_was_taken_twice_is_known_to_the_next_start(train, told) -> None:
    once, often = replace(POLICY, most=1), jaxtrain.SavePolicy(every=2, keep=4)
    with pytest.raises(WrongNumbers):
        train("run", Bad(22), Killed(24, 2), replay=7, spikes=once, checkpoints=often)
    run, said = train("run", Bad(22), replay=7, spikes=once, checkpoints=often)
    assert run.session.start == 22 and "once more" not in said
    assert "Health(skip_batches=((20, 5),)) has it" in said and whole(run)[:2] == told[:2]


@pytest.mark.slow
def test_on_another_mesh_the_same_batches_come(train) -> None:
    with pytest.raises(WrongNumbers):
        train("run", Bad(22), Killed(28))
    run, _ = train("run", axes=dict(fsdp=2), stop_at=30)
    told, _ = train("told", spikes=None, skip=((20, 5),), stop_at=30)
    assert run.session.start == 25
    np.testing.assert_allclose([*on_disk(run).values()], [*on_disk(told).values()], rtol=1e-4)


def test_so_many_are_acted_on(train) -> None:
    run, said = train("run", Bad(12, 27), spikes=replace(POLICY, most=1))
    assert said.count("back to step") == 1 and "back to step 10, and on without" in said
    assert "1 were acted on, and the run goes on" in said and max(on_disk(run).values()) > 20


@pytest.mark.slow
def test_the_local_tier_forgets_what_was_left(train, tmp_path: Path, told) -> None:
    local = jaxtrain.checkpoint.LocalTier(every=1, directory=str(tmp_path / "local"))
    policy = jaxtrain.SavePolicy(every=5, keep=4, local=local)
    with pytest.raises(WrongNumbers):
        train("run", Bad(22), Killed(21, 2), checkpoints=policy)
    run, said = train("run", Bad(22), checkpoints=policy)
    assert run.session.start == 20 and "SPIKE" in said and whole(run)[:2] == told[:2]


@pytest.mark.slow
def test_copies_are_compared_again(train) -> None:
    class Flips(jaxtrain.Callback):
        left = 2

        def after_step(self, run: jaxtrain.Run, step: int) -> None:
            self.left -= step == 24
            if step == 24 and not self.left:
                change_state("flip", run._session)

    late = jaxtrain.SavePolicy(every=20)
    with pytest.raises(WrongNumbers, match="differ after step 24"):
        train("run", Bad(22), Flips(), replicas=8, axes=dict(data=3), checkpoints=late, batch=6)


@pytest.mark.slow
def test_also_by_a_start_that_did_not_see_the_first(train) -> None:
    policy = replace(POLICY, most=1)
    train("run", Bad(12), spikes=policy, stop_at=20)
    _, said = train("run", Bad(27), spikes=policy)
    assert "1 were acted on, and the run goes on" in said and "back to" not in said


def test_another_spike_on_the_way_is_one_of_its_own(train) -> None:
    """From further back, since the save before it is too new; what was skipped stays so."""
    run, said = train("run", Bad(22, 25), replay=7, stop_at=26)
    assert said.count("once more") == 2 and said.count("without the next") == 2
    assert run.session.loader.skips.detected == ((15, 13),)
    assert [run.session.loader.skips.batch(step) for step in (14, 15)] == [14, 28]


def test_what_was_evaluated_or_skipped_before_is_not_what_is_now(train, tmp_path: Path) -> None:
    """A second spike goes back to the same step, and what both skip is told as one."""
    evaluation = jaxtrain.Evaluation(every=11, batches=1)
    often = jaxtrain.SavePolicy(every=2, keep=4)
    asked = dict(evaluation=evaluation, checkpoints=often, stop_at=24)
    run, said = train("run", Bad(22, 27), skip=((30, 2),), **asked)
    assert said.count("back to step 20") == 2
    assert "without the next 5 batches, as Health(skip_batches=((20, 5), (30, 2)))" in said
    assert "without the next 10 batches, as Health(skip_batches=((20, 10), (30, 2)))" in said
    assert run.session.loader.skips.detected == ((20, 10),)
    saved = whole_manifest(tmp_path / "run" / "checkpoints", 22).metadata
    assert saved["metrics"] == {}, "step 22 is evaluated after it is saved, each time"


def test_losses_from_before_a_rollback_are_not_compared(train, monkeypatch) -> None:
    looks, asked = Saving.whole_steps, list[int]()

    def fails(self: Saving) -> list[int]:
        asked.append(1)
        return looks(self) if len(asked) < 4 else [25]

    monkeypatch.setattr(Saving, "whole_steps", fails)
    _, said = train("run", Bad(22, 26), replay=7, stop_at=25)
    assert said.count("once more") == 2 and "no save is from before it" in said
    assert "NOTE step" not in said


def readings_of(session: SimpleNamespace) -> tuple[Readings, Callable[[int, int], None]]:
    """Readings, and a function that gives them a step's metrics: (step, skipped so far)."""
    quiet = SimpleNamespace(of=lambda *_: {}, metrics=dict)
    readings = Readings(cast(Any, session), cast(Any, quiet), cast(Any, quiet), lambda *_: None)

    def give(step: int, skipped: int) -> None:
        readings.take(step, {"loss": 1.0, "weight": 8.0, "skipped": skipped})
        readings.flush()

    return readings, give


@pytest.fixture
def unscaled() -> SimpleNamespace:
    """A session at its beginning, without a loss scale."""
    return SimpleNamespace(
        start=0,
        state=SimpleNamespace(skipped=0),
        loader=SimpleNamespace(wait_s=0.0),
        experiment=SimpleNamespace(precision=SimpleNamespace(loss_scale=None)),
    )


def test_skipped_steps_are_counted_from_where_the_run_is_again(unscaled) -> None:
    readings, give = readings_of(unscaled)
    for step in range(1, SKIPPED_AT_MOST):
        give(step, step)
    readings.go_back(0)
    for step in range(1, SKIPPED_AT_MOST):
        give(step, step)
        readings.refuse_skipping()
    readings.go_back(0)
    give(1, 0)
    for step in range(2, SKIPPED_AT_MOST + 1):
        give(step, step - 1)
        readings.refuse_skipping()
    give(SKIPPED_AT_MOST + 1, SKIPPED_AT_MOST)
    with pytest.raises(ValueError, match="20 steps in a row"):
        readings.refuse_skipping()


def test_steps_that_come_again_are_not_in_a_row_with_those_before(unscaled) -> None:
    readings, give = readings_of(unscaled)
    for step in range(1, 6):
        give(step, 0)
    readings.go_back(0)
    for step in range(1, SKIPPED_AT_MOST + 1):
        give(step, step)
    with pytest.raises(ValueError, match="20 steps in a row"):
        readings.refuse_skipping()


def test_steps_skipped_before_a_stop_count_if_no_other_was_taken(unscaled) -> None:
    unscaled.start, unscaled.state.skipped = 5, 5
    readings, give = readings_of(unscaled)
    for step in range(6, 10):
        give(step, step)
    with pytest.raises(ValueError, match="9 steps in a row, up to step 9"):
        readings.refuse_skipping(ends=True)
    unscaled.state.skipped = 4
    readings, give = readings_of(unscaled)
    for step in range(6, 10):
        give(step, step - 1)
    readings.refuse_skipping(ends=True)


def test_a_constant_loss_scale_is_not_searched(unscaled) -> None:
    unscaled.experiment.precision.loss_scale = jaxtrain.optim.LossScale(initial=4.0, factor=1)
    unscaled.start = unscaled.state.skipped = 9
    readings, _ = readings_of(unscaled)
    readings.read_again([{"step": 9, "loss": 1.0, "skipped": 9, "loss_scale": 4.0}])
    with pytest.raises(ValueError, match="9 steps in a row"):
        readings.refuse_skipping(ends=True)


def test_a_file_that_lacks_steps_says_nothing_of_a_loss_scale_between(unscaled) -> None:
    """They may have lowered it; those that are logged at its least count."""
    unscaled.experiment.precision.loss_scale = jaxtrain.optim.LossScale(initial=4.0)
    unscaled.start = unscaled.state.skipped = 22
    readings, _ = readings_of(unscaled)
    scales = {1: 2.0, 10: 1.0, 20: 1.0, 22: 1.0}
    readings.read_again(
        {"step": step, "loss": 1.0, "skipped": step, "loss_scale": scale}
        for step, scale in scales.items()
    )
    readings.refuse_skipping(ends=True)


def test_a_long_run_may_end_with_fewer_skipped_steps_than_end_it(unscaled) -> None:
    readings, give = readings_of(unscaled)
    for step in range(1, 3 * SKIPPED_AT_MOST):
        give(step, max(0, step - 2 * SKIPPED_AT_MOST))
    readings.refuse_skipping(ends=True)
    give(3 * SKIPPED_AT_MOST, SKIPPED_AT_MOST)
    with pytest.raises(ValueError, match="20 steps in a row"):
        readings.refuse_skipping(ends=True)


@pytest.mark.parametrize(
    ("logged", "in_a_row"),
    [([], 0), ([(4, 0), (8, 2), (9, 3)], 0), ([(1, 0), (5, 4), (9, 8)], 8), ([(9, 9)], 9)],
)
def test_steps_that_are_not_logged_were_skipped_where_all_of_them_were(
    logged, in_a_row, unscaled
) -> None:
    """A file that begins later, or lacks steps, tells how many were skipped till then."""
    unscaled.start, unscaled.state.skipped = 9, logged[-1][1] if logged else 0
    readings, _ = readings_of(unscaled)
    readings.read_again({"step": step, "loss": 1.0, "skipped": n} for step, n in logged)
    if not in_a_row:
        readings.refuse_skipping(ends=True)
        return
    with pytest.raises(ValueError, match=f"gradients of {in_a_row} steps in a row, up to step 9"):
        readings.refuse_skipping(ends=True)


def test_a_trace_ends_where_the_run_goes_back(tmp_path: Path, monkeypatch) -> None:
    events: list[str] = []
    for name in ("start_trace", "stop_trace"):
        monkeypatch.setattr(jax.profiler, name, lambda *_, name=name: events.append(name))
    profiling, run = Profiling(Steps(20, 30), tmp_path), cast(Any, SimpleNamespace(state=()))
    profiling.before_step(run, 24)
    profiling.after_step(run, 24)
    profiling.after_rollback(run, 20)
    assert events == ["start_trace", "stop_trace"]
    profiling.before_step(run, 21)
    profiling.end(run)
    assert events == ["start_trace", "stop_trace"] * 2


@pytest.mark.slow
def test_what_comes_again_when_it_is_taken_again_is_skipped(train, told) -> None:
    run, said = train("run", Bad(22), replay=7)
    assert said.index("to take steps 21 to 24 once more") < said.index("without the next 5")
    assert "is no longer" not in said and said.count("SPIKE") == 2
    assert whole(run) == told


def test_what_does_not_is_no_fault_of_the_data(train) -> None:
    run, said = train("run", Bad(22, once=True), replay=7)
    assert "NOTE step 23 was taken again, and its loss is 1." in said and said.count("SPIKE") == 1
    assert said.count("NOTE step") == 1
    clean, quiet = train("clean", spikes=None)
    assert whole(run) == whole(clean) and "SPIKE" not in quiet


@pytest.mark.slow
def test_before_the_first_save_it_begins_again(train) -> None:
    late = jaxtrain.SavePolicy(every=30)
    run, said = train("run", Bad(22), checkpoints=late)
    told, _ = train("told", spikes=None, skip=((0, 25),), checkpoints=late)
    assert "back to step 0" in said and whole(run) == whole(told)


def test_a_high_loss_is_not_saved(train) -> None:
    """And the save that a spike needs is not pushed out."""
    kept = jaxtrain.SavePolicy(every=1, keep=3)
    _, said = train("run", Bad(22), checkpoints=kept, stop_at=25)
    assert "step 23 is not saved: its loss is high" in said and "back to step 20" in said
    assert "NOT SAVED" not in said, "those of the steps that come again were removed"


@pytest.mark.slow
def test_where_no_save_is_from_before_it_the_run_goes_on(train, monkeypatch) -> None:
    monkeypatch.setattr(Saving, "whole_steps", lambda self: [25])
    _, said = train("run", Bad(22), stop_at=30)
    assert "still up at 24: no save is from before it, and the run goes on" in said


def damage(saves: Path, *steps: int) -> None:
    for pack in (pack for step in steps for pack in (saves / str(step)).rglob("*.pack")):
        data = pack.read_bytes()
        pack.unlink()  # it may be another save's too
        pack.write_bytes(bytes([data[0] ^ 1]) + data[1:])


DAMAGED = {"the older ones": (19, 20), "all": (19, 20, 21, 22)}


@pytest.mark.parametrize("name", DAMAGED)
def test_nothing_is_lost_where_older_saves_are_damaged(
    name: str, train, tmp_path: Path, monkeypatch
) -> None:
    restored, saves = Rollbacks._restored, tmp_path / "run" / "checkpoints"

    def after_damage(self: Rollbacks, step: int, spike: Any) -> Any:
        damage(saves, *DAMAGED[name])
        before = jax.device_get(self._session.state)
        found = restored(self, step, spike)
        if found is None:
            assert committed_steps(saves) == [19, 20, 21, 22]
            now = jax.device_get(self._session.state)
            assert jax.tree.all(jax.tree.map(np.array_equal, before, now))
        return found

    monkeypatch.setattr(Rollbacks, "_restored", after_damage)
    often = jaxtrain.SavePolicy(every=1, keep=4)
    run, said = train("run", Bad(22), checkpoints=often, stop_at=25)
    assert list(on_disk(run)) == list(range(1, 26)) and run.saved == 25
    if name == "all":
        assert said.count("DAMAGED") == 4 and "back to step" not in said
        assert "no save from before it is whole, and the run goes on" in said
    else:
        assert said.count("DAMAGED") == 2 and "back to step 21, and on without" in said


@pytest.mark.slow
def test_a_save_that_is_damaged_is_passed_over(train, tmp_path: Path, monkeypatch) -> None:
    looks = Saving.whole_steps

    def damages(self: Saving) -> list[int]:
        found = looks(self)
        damage(tmp_path / "run" / "checkpoints", 20)
        return found

    monkeypatch.setattr(Saving, "whole_steps", damages)
    run, said = train("run", Bad(22))
    told, _ = train("told", spikes=None, skip=((15, 10),))
    assert "DAMAGED" in said and "back to step 15" in said and whole(run)[:2] == whole(told)[:2]


@pytest.mark.slow
def test_a_stop_that_is_asked_for_does_not_wait_for_the_steps_to_come_again(train) -> None:
    run, _ = train("run", Bad(22), Stops(25))
    assert run.stopped and run.saved == 21


def test_the_spike_of_the_last_step_is_seen(train) -> None:
    run, said = train("run", Bad(30))
    assert "jumped at step 31, and was still up at 32: back to step 25" in said
    assert len(on_disk(run)) == 32 and max(on_disk(run).values()) < 20


REFUSED = {
    "no directory": (None, {}, "execution.health.spikes: .* give a run_dir, or spikes=None"),
    "no saves": ("run", dict(checkpoints=None), r"give checkpoints=SavePolicy\(\.\.\.\)"),
    "too few": (
        "run",
        dict(checkpoints=jaxtrain.SavePolicy(every=1, keep=2)),
        "of which 2 are kept, 1 apart, and none need be 2 steps old; use keep=3, or a smaller back",
    ),
    "one": ("run", dict(checkpoints=jaxtrain.SavePolicy(keep=1)), "use keep=2"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_run_that_could_not_go_back_is_refused(name: str, decoder, tmp_path: Path) -> None:
    run, changed, said = REFUSED[name]
    execution = replace(decoder.execution, health=Health(spikes=POLICY))
    given = {"checkpoints": jaxtrain.SavePolicy(every=1, keep=5), "execution": execution, **changed}
    with pytest.raises(ValueError, match=said):
        jaxtrain.train(
            replace(decoder, **given),
            jaxtrain.mesh_from_axes(data=1),
            run_dir=run and tmp_path / run,
        )
    assert not list(tmp_path.iterdir())


def test_what_a_run_has_passed_cannot_be_skipped(train, tmp_path: Path) -> None:
    """Also one from before there was anything to skip, which goes on as ever."""
    train("run", spikes=None, stop_at=10)
    config = tmp_path / "run" / "config.json"
    old = json.loads(config.read_text())
    for name in ("spikes", "skip_batches"):
        del old["experiment"]["execution"]["health"][name]
    config.write_text(json.dumps(old))
    said = r"skip_batches has \(5, 2\), and the run has come to step 10 without it: skip after 10"
    with pytest.raises(ValueError, match=said):
        train("run", spikes=None, skip=((5, 2),))
    run, _ = train("run", skip=((10, 2),), stop_at=12)
    assert run.session.start == 10 and run.session.loader.skips.before(12) == [(10, 2)]


BAD = {
    r"LossSpikes: 3 problems\n.*above=0 must.*\n.*window=1 must.*\n.*most=0 must": lambda: (
        LossSpikes(above=0, window=1, most=0)
    ),
    r"spikes=3 is a int; use a jaxtrain\.LossSpikes or None": lambda: Health(spikes=3),
    r"skip_batches=\(\(5, 0\),\) must be pairs": lambda: Health(skip_batches=((5, 0),)),
    "ascending": lambda: Health(skip_batches=((5, 1), (3, 1))),
    r"\(\(5, 1\), \(5, 1\)\) must be": lambda: Health(skip_batches=((5, 1), (5, 1))),
    "for example": lambda: Health(skip_batches=(5, 1)),
}


@pytest.mark.parametrize("said", BAD)
def test_bad_fields_are_refused(said: str) -> None:
    with pytest.raises(ValueError, match=said):
        BAD[said]()
