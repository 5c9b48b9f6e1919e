"""Runs that fail: refused before anything is written, or ended with what was reached saved."""

from __future__ import annotations

import io
import os
import re
import types
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tiny import Asking

import jaxtrain
from jaxtrain.checkpoint import CheckpointManager, manager, tiers
from jaxtrain.checkpoint.policy import SaveClock
from jaxtrain.cluster.agreement import FailedTogether
from jaxtrain.cluster.phases import Phases
from jaxtrain.data import BigramChain
from jaxtrain.run import loop, saves
from jaxtrain.run.directory import RunDirectory, left_in
from jaxtrain.session import session
from jaxtrain.session.memory import memory_remedies
from jaxtrain.session.session import Session
from jaxtrain.telemetry.metrics import read_metrics


def trained(folder: Path, experiment: jaxtrain.Experiment) -> jaxtrain.Result:
    return jaxtrain.train(
        replace(experiment, steps=6, checkpoints=jaxtrain.SavePolicy(every=1000)),
        jaxtrain.mesh_from_axes(fsdp=2),
        run_dir=folder / "run",
        cache_dir=folder / "cache",
        stream=io.StringIO(),
    )


class NoHeldOut(BigramChain):
    def open(self, split: str, **options: Any) -> Any:
        if split == "held_out":
            raise ValueError("no held-out text")
        return super().open(split, **options)


class NeverOpened(BigramChain):
    def open(self, split: str, **options: Any) -> Any:
        raise AssertionError("the data was opened before the mesh was looked at")


def test_held_out_data_is_opened_before_anything_is_written(
    own: jaxtrain.Experiment, tmp_path: Path
) -> None:
    data = NoHeldOut(vocab=16, seq=8, successors=2)
    with pytest.raises(ValueError, match="no held-out text"):
        trained(tmp_path, replace(own, data=data, evaluation=jaxtrain.Evaluation(every=2)))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("where", ["compile_step", "Session._dispatch"])
def test_a_device_without_memory_is_told_with_what_takes_less(
    own: jaxtrain.Experiment, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiling for a TPU or in a step; on a GPU with the part of its memory that a program gets.
    An error of another kind is as it was."""
    spec = jaxtrain.mesh_from_axes(fsdp=2)

    def notes_of(words: str) -> list[str]:
        def fails(*args: Any, **options: Any) -> Any:
            raise jax.errors.JaxRuntimeError(words)

        monkeypatch.setattr(f"jaxtrain.session.session.{where}", fails)
        with pytest.raises(jax.errors.JaxRuntimeError) as raised:
            jaxtrain.train(own, spec, stream=io.StringIO())
        return getattr(raised.value, "__notes__", [])

    assert notes_of("INTERNAL: a link is down") == []
    (note,) = notes_of("RESOURCE_EXHAUSTED: Out of memory allocating 7 bytes")
    assert "microbatches" in note and "remat='full'" in note
    gpu = replace(spec, chip=jaxtrain.load_mesh("h100_64").chip, simulated=False)
    seen = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 7 bytes")
    seen.add_note("For simplicity, JAX has removed its internal frames from the traceback")
    with pytest.raises(jax.errors.JaxRuntimeError), memory_remedies(spec), memory_remedies(spec):
        raise seen
    assert len(seen.__notes__) == 2, "JAX's own, and ours once"
    error = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 7 bytes")
    with pytest.raises(jax.errors.JaxRuntimeError), memory_remedies(gpu):
        raise error
    assert "XLA_CLIENT_MEM_FRACTION=0.92" in error.__notes__[1]


def test_a_second_run_in_the_same_directory_is_refused(
    own: jaxtrain.Experiment, tmp_path: Path
) -> None:
    said: list[str] = []

    def ask() -> bool:
        if not said:
            with pytest.raises(ValueError, match=f"in use by process {os.getpid()}") as refused:
                trained(tmp_path, own)
            said.append(str(refused.value))
        return False

    mesh = jaxtrain.mesh_from_axes(fsdp=2)
    places = {"run_dir": tmp_path / "run", "cache_dir": tmp_path / "cache"}
    jaxtrain.train(own, mesh, steps=2, callbacks=[Asking(ask)], stream=io.StringIO(), **places)
    assert said
    jaxtrain.train(own, mesh, steps=3, stream=io.StringIO(), **places)  # let go at the end


def test_what_the_data_does_not_decide_is_refused_before_it_is_opened(
    own: jaxtrain.Experiment, tmp_path: Path
) -> None:
    data = NeverOpened(vocab=16, seq=8, successors=2)
    with pytest.raises(ValueError, match="batch=9"):
        trained(tmp_path, replace(own, data=data, batch=9))


def test_an_error_at_an_evaluation_loses_no_step(
    own: jaxtrain.Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no evaluation")

    monkeypatch.setattr("jaxtrain.session.evaluate.Evaluator.__call__", broken)
    with pytest.raises(RuntimeError, match="no evaluation"):
        trained(tmp_path, replace(own, evaluation=jaxtrain.Evaluation(every=4)))
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["4"]
    assert [line["step"] for line in read_metrics(tmp_path / "run")] == [1, 2, 3, 4]


def test_a_damaged_metrics_file_is_refused_before_anything_is_opened(
    own: jaxtrain.Experiment, tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1}\nnot json\n{"step": 3}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2"):
        trained(tmp_path, replace(own, data=NeverOpened(vocab=16, seq=8, successors=2)))
    assert not (tmp_path / "run" / "config.json").exists()


def test_a_run_that_only_skips_ends_with_an_error(own: jaxtrain.Experiment, tmp_path: Path) -> None:
    lost = replace(
        own,
        optimizer=replace(own.optimizer, learning_rate=1e38),
        steps=40,
        checkpoints=jaxtrain.SavePolicy(every=1000),
    )
    stream = io.StringIO()
    with pytest.raises(ValueError, match=r"20 steps in a row, up to step 2\d.*lower learning rate"):
        jaxtrain.train(
            lost, jaxtrain.mesh_from_axes(data=1), run_dir=tmp_path, stream=stream,
            cache_dir=tmp_path,
        )  # fmt: skip
    assert "skipped 20" in stream.getvalue()
    assert len(list((tmp_path / "checkpoints").iterdir())) == 1


@pytest.mark.parametrize("every", [1, 4])
def test_a_short_run_that_only_skips_is_not_done(
    every: int, own: jaxtrain.Experiment, tmp_path: Path
) -> None:
    """The first update is too large, and none comes after it. The same command says so again, from
    the metrics that were logged."""
    lost = replace(
        own,
        optimizer=replace(own.optimizer, learning_rate=1e38),
        steps=9,
        checkpoints=jaxtrain.SavePolicy(every=1000),
        logging=jaxtrain.Logging(every=every),
        evaluation=jaxtrain.Evaluation(every=9),
    )
    for rows in (8, 5):
        stream = io.StringIO()
        with pytest.raises(ValueError, match=rf"of [{rows}-8] steps in a row, up to step 9, were"):
            jaxtrain.train(
                lost, jaxtrain.mesh_from_axes(data=1), run_dir=tmp_path / "run", stream=stream,
                cache_dir=tmp_path,
            )  # fmt: skip
        assert "eval_loss" not in stream.getvalue()
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["9"]


def test_steps_skipped_at_the_end_of_others_end_no_run(
    own: jaxtrain.Experiment, tmp_path: Path
) -> None:
    """Two of six are few, one of two is half, and one of one is all."""
    spoilt = replace(own, data=Spoilt(), steps=6)
    mesh = jaxtrain.mesh_from_axes(data=1)
    result = jaxtrain.train(spoilt, mesh, cache_dir=tmp_path)
    assert [line["skipped"] for line in result.history] == [0, 1, 2, 2, 3, 4]
    two, three = (replace(spoilt, steps=steps) for steps in (2, 3))
    assert jaxtrain.train(two, mesh, cache_dir=tmp_path).history[-1]["skipped"] == 1
    with pytest.raises(ValueError, match="gradients of 2 steps in a row, up to step 3"):
        jaxtrain.train(three, mesh, cache_dir=tmp_path)
    saved = replace(spoilt, checkpoints=jaxtrain.SavePolicy(every=1000))
    for _ in range(2):
        paused = jaxtrain.train(saved, mesh, run_dir=tmp_path / "run", steps=3, cache_dir=tmp_path)
        assert paused.history[-1]["skipped"] == 2, "more steps may follow"
    nothing = replace(own, data=Spoilt(first=1), steps=1)
    with pytest.raises(ValueError, match="gradients of the only step, up to step 1"):
        jaxtrain.train(nothing, mesh, cache_dir=tmp_path)


def made_again(run: Path) -> None:
    """As by a save that is in flight, which may be there first."""
    run.rename(run.with_name("away"))
    (run / "checkpoints").mkdir(parents=True, exist_ok=True)


REMOVED = {
    "the directory": (
        lambda run: run.rename(run.with_name("away")),
        "run directory .*run was removed below",
    ),
    "the directory, made again": (made_again, "run directory .*run was removed below"),
    "config.json": (lambda run: (run / "config.json").unlink(), "config.json or the lock of"),
}


@pytest.mark.parametrize("what", REMOVED)
@pytest.mark.parametrize("saves", [1000, 2])
def test_what_is_removed_below_a_run_is_told_and_written_again(
    what: str, saves: int, own: jaxtrain.Experiment, tmp_path: Path
) -> None:
    """At the next save. The run goes on to the bit, and nobody else gets into its directory."""
    remove, said = REMOVED[what]
    given = replace(own, steps=8, checkpoints=jaxtrain.SavePolicy(every=saves))
    run, mesh, stream, asked = tmp_path / "run", jaxtrain.mesh_from_axes(data=1), io.StringIO(), []

    def train(run: Path = run, **options: Any) -> jaxtrain.Result:
        return jaxtrain.train(given, mesh, run_dir=run, cache_dir=tmp_path, **options)

    def ask() -> bool:
        asked.append(None)
        if len(asked) == 3:
            remove(run)
        if len(asked) == 5 and saves == 2:
            with pytest.raises(ValueError, match=f"in use by process {os.getpid()}"):
                train()
        return len(asked) == 5

    assert train(stream=stream, callbacks=[Asking(ask)]).saved == 5
    assert len(re.findall(f"NOTE {said}", stream.getvalue())) == 1
    assert left_in(run)[1].endswith("the same command goes on")
    rest = train(stream=io.StringIO())
    whole = train(tmp_path / "whole", stream=io.StringIO())
    assert [line["loss"] for line in rest.history] == [line["loss"] for line in whole.history[5:]]
    logged = {line["step"]: line["loss"] for line in read_metrics(run)}
    assert logged.keys() >= {5, 6, 7, 8}
    assert logged.items() <= {line["step"]: line["loss"] for line in whole.history}.items()


def replaced_by_a_file(run: Path) -> None:
    run.rename(run.with_name("away"))
    run.touch()


@pytest.mark.parametrize("tier", ["durable", "local"])
def test_a_directory_that_cannot_be_written_again_is_tried_once_an_interval(
    tier: str, own: jaxtrain.Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that goes on by a minute a step: a save is due every three."""
    minutes: list[None] = []
    for module in (manager, tiers):
        clock = partial(SaveClock, clock=lambda: 60 * len(minutes))
        monkeypatch.setattr(module, "SaveClock", clock)
    monkeypatch.setattr(CheckpointManager, "poll", CheckpointManager.wait)
    policy, stream = jaxtrain.SavePolicy(every=jaxtrain.checkpoint.Minutes(3)), io.StringIO()
    if tier == "local":
        local = jaxtrain.checkpoint.LocalTier(policy.every, str(tmp_path / "memory"))
        policy = jaxtrain.SavePolicy(every=1000, local=local)

    def ask() -> bool:
        minutes.append(None)
        if len(minutes) == 5:
            replaced_by_a_file(tmp_path / "run")
        return False

    with pytest.raises(ValueError, match="cannot be written"):
        jaxtrain.train(
            replace(own, steps=14, checkpoints=policy), jaxtrain.mesh_from_axes(data=1),
            run_dir=tmp_path / "run", cache_dir=tmp_path, stream=stream, callbacks=[Asking(ask)],
        )  # fmt: skip
    assert re.findall(r"NOT SAVED step (\d+)", stream.getvalue()) == ["6", "9", "12"]


def test_a_log_that_cannot_be_closed_hides_no_error(
    own: jaxtrain.Experiment, tmp_path: Path
) -> None:
    """The thread that writes events has not told everything before it is closed."""
    stream, run, asked = io.StringIO(), tmp_path / "run", []

    def ask() -> bool:
        asked.append(None)
        if len(asked) == 1:
            replaced_by_a_file(run)
        return False

    logging = jaxtrain.Logging(every=1, tensorboard=True)
    policy = jaxtrain.SavePolicy(every=1000)
    with pytest.raises(ValueError, match="cannot be written"):
        jaxtrain.train(
            replace(own, steps=3, checkpoints=policy, logging=logging),
            jaxtrain.mesh_from_axes(data=1), run_dir=run, cache_dir=tmp_path, stream=stream,
            callbacks=[Asking(ask)],
        )  # fmt: skip
    assert re.search("NOT LOGGED the last steps: .*events", stream.getvalue())


@pytest.mark.parametrize("fails", [0, 1])
def test_all_processes_hear_that_one_cannot_write_the_directory_again(
    fails: int, own: jaxtrain.Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None saves then, for saves wait for all. Here is process 0; what 1 says is made up."""
    asked: list[None] = []
    met: list[int] = []

    def refuse(directory: RunDirectory) -> None:
        if fails == 0 and len(asked) == 4:
            raise ValueError("no room")

    def shared(act: Callable[[], str]) -> str:
        met.append(len(asked))
        if fails == 1 and len(asked) == 4:
            raise FailedTogether("process 1: no room")
        return act()

    monkeypatch.setattr(RunDirectory, "restore_missing", refuse)
    monkeypatch.setattr(saves, "from_first", shared)
    monkeypatch.setattr(CheckpointManager, "poll", CheckpointManager.wait)
    stream = io.StringIO()
    policy = jaxtrain.SavePolicy(every=2)
    jaxtrain.train(
        replace(own, steps=8, checkpoints=policy), jaxtrain.mesh_from_axes(data=1),
        run_dir=tmp_path / "run", cache_dir=tmp_path, stream=stream,
        callbacks=[Asking(lambda: asked.append(None))],
    )  # fmt: skip
    said = re.findall(r"NOT SAVED step (\d): (.*); the run goes on", stream.getvalue())
    assert said == [("4", ["no room", "process 1: no room"][fails])]
    assert met == [2, 4, 6, 8], "before each save"


def test_at_the_least_loss_scale_too(own: jaxtrain.Experiment, tmp_path: Path) -> None:
    """Ten steps that lower it, which are not counted, and twenty that cannot."""
    scaling = jaxtrain.optim.LossScale(initial=2.0**10, minimum=1.0)
    lost = replace(
        own,
        optimizer=replace(own.optimizer, learning_rate=1e38),
        precision=jaxtrain.optim.Precision(loss_scale=scaling),
        steps=60,
    )
    said = r"20 steps in a row, up to step 3[1-3], were not finite, at the least loss scale"
    with pytest.raises(ValueError, match=said):
        jaxtrain.train(lost, jaxtrain.mesh_from_axes(data=1), cache_dir=tmp_path)


def test_a_run_that_ends_while_its_loss_scale_is_searched_says_that_it_has_learnt_nothing(
    own: jaxtrain.Experiment, tmp_path: Path
) -> None:
    """More steps may find one; a run that has taken an update says nothing."""
    scaled = jaxtrain.optim.Precision(loss_scale=jaxtrain.optim.LossScale())
    searching = replace(own, data=Spoilt(first=1), precision=scaled)
    told = []
    for steps in (2, 3):
        stream = io.StringIO()
        jaxtrain.train(
            searching, jaxtrain.mesh_from_axes(data=1), steps=steps, cache_dir=tmp_path,
            stream=stream,
        )  # fmt: skip
        told.append("nothing was learnt; take more steps" in stream.getvalue())
    assert told == [True, False]


@dataclass(frozen=True)
class Spoilt:
    """A bigram chain in which two of three steps of 8 rows have an infinite weight. first: which of
    the three comes first."""

    vocab: int = 16
    seq: int = 8
    first: int = 0
    isolate_documents: bool = False

    def open(self, split: str, *, seed: int, cache_dir: Path) -> Any:
        dataset = BigramChain(self.vocab, self.seq).open(split, seed=seed, cache_dir=cache_dir)
        clean = dataset.rows

        def rows(indices: Any) -> Any:
            batch = clean(indices)
            batch["weights"][(np.asarray(indices) // 8 + self.first) % 3 > 0] = np.inf
            return batch

        dataset.rows = rows
        return dataset


def test_skipped_steps_with_others_between_end_no_run(
    own: jaxtrain.Experiment, tmp_path: Path
) -> None:
    spoilt = replace(own, data=Spoilt(), steps=33)
    result = jaxtrain.train(spoilt, jaxtrain.mesh_from_axes(data=1), cache_dir=tmp_path)
    assert result.history[-1]["skipped"] == 22


class Failing(jaxtrain.Callback):
    """Raises after step 4."""

    def after_step(self, run: jaxtrain.Run, step: int) -> None:
        if step == 4:
            raise OSError("of a callback")


class FailingAtTheEnd(jaxtrain.Callback):
    """Raises when the run is over."""

    def end(self, run: jaxtrain.Run) -> None:
        raise OSError("of a callback")


@dataclass(frozen=True)
class Torn:
    """A bigram chain whose rows of step 5 cannot be read."""

    vocab: int = 16
    seq: int = 8
    isolate_documents: bool = False

    def open(self, split: str, *, seed: int, cache_dir: Path) -> Any:
        dataset = BigramChain(self.vocab, self.seq).open(split, seed=seed, cache_dir=cache_dir)
        whole = dataset.rows

        def rows(indices: Any) -> Any:
            if np.max(indices) >= 32:
                raise OSError("of the data")
            return whole(indices)

        dataset.rows = rows
        return dataset


CALLBACKS = {"callback": [Failing()], "end": [FailingAtTheEnd()]}


@pytest.mark.parametrize("phase", ["callback", "end", "load", "step"])
def test_an_error_is_told_with_the_phase_that_it_was_raised_in(
    own: jaxtrain.Experiment, phase: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the run has saved since, which is the phase it leaves in."""
    phases, dispatch = Phases(), Session._dispatch

    def fails(session: Session, batch: Any) -> Any:
        if phase == "step" and phases.now.step == 4:
            raise OSError("of a step")
        return dispatch(session, batch)

    monkeypatch.setattr(Session, "_dispatch", fails)
    data = Torn() if phase == "load" else own.data
    experiment = replace(own, steps=4 if phase == "end" else 9, data=data)
    with pytest.raises(OSError, match=r"of (a|the) "):
        jaxtrain.train(
            replace(experiment, checkpoints=jaxtrain.SavePolicy(every=100)),
            jaxtrain.mesh_from_axes(fsdp=2),
            run_dir=tmp_path / "run",
            cache_dir=tmp_path / "cache",
            stream=io.StringIO(),
            callbacks=CALLBACKS.get(phase, []),
            phases=phases,
        )
    assert phases.now.failed_in == {"end": "callback"}.get(phase, phase)
    assert (phases.now.phase, phases.now.step) == ("finish", 4)
    # The first two steps are not like others; one whose callback failed was not measured.
    assert len(phases._steps) == {"callback": 1}.get(phase, 2)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").glob("4")] == ["4"]


def test_a_start_that_another_run_overtook_while_it_compiled_is_refused(
    own: jaxtrain.Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would write over that run's metrics, from a state that is not the newest."""
    opened = loop.open_session
    places = {"run_dir": tmp_path / "run", "cache_dir": tmp_path, "stream": io.StringIO()}
    mesh, own = jaxtrain.mesh_from_axes(data=1), replace(own, checkpoints=jaxtrain.SavePolicy())

    def overtaken(*given: Any, **named: Any) -> Session:
        monkeypatch.setattr(loop, "open_session", opened)
        session = opened(*given, **named)
        jaxtrain.train(own, mesh, steps=3, **places)
        return session

    monkeypatch.setattr(loop, "open_session", overtaken)
    with pytest.raises(ValueError, match="was used by another run while this one compiled"):
        jaxtrain.train(own, mesh, steps=5, **places)
    assert [line["step"] for line in read_metrics(tmp_path / "run")] == [1, 2, 3]
    result = jaxtrain.train(own, mesh, steps=5, **places)
    assert (result.steps, result.session.start) == (5, 3)


@pytest.mark.parametrize(
    ("every", "newest"), [(2, "the newest save is 2"), (100, "nothing is saved")]
)
@pytest.mark.parametrize("processes", [1, 2])
def test_who_cannot_save_says_what_is_saved(
    own: jaxtrain.Experiment,
    tmp_path: Path,
    every: int,
    newest: str,
    processes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One of several, since a save needs all; and one whose last step failed on the devices."""
    several = types.SimpleNamespace(
        process_count=lambda: processes, block_until_ready=jax.block_until_ready
    )
    monkeypatch.setattr("jaxtrain.run.saves.jax", several)
    monkeypatch.setattr(Session, "alive", lambda _: False)
    monkeypatch.setattr(CheckpointManager, "poll", CheckpointManager.wait)
    stream, experiment = io.StringIO(), replace(own, steps=9)
    with pytest.raises(OSError, match="of a callback"):
        jaxtrain.train(
            replace(experiment, checkpoints=jaxtrain.SavePolicy(every=every)),
            jaxtrain.mesh_from_axes(data=1),
            run_dir=tmp_path / "run",
            cache_dir=tmp_path,
            stream=stream,
            callbacks=[Failing()],
        )
    word = (
        "failed on one process of several; " if processes == 2 else "failed: the last step failed; "
    )
    assert stream.getvalue().splitlines()[-1][9:] == f"{word}{newest}"


def test_a_second_failure_on_the_way_out_is_a_note_on_the_first(
    own: jaxtrain.Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(directory: Path) -> None:
        raise OSError(28, "No space left on device", str(directory))

    monkeypatch.setattr("jaxtrain.checkpoint.manager.make_and_remove", full)
    for callbacks, raised in ([Failing()], "of a callback"), ([], "could not be saved"):
        with pytest.raises((OSError, ValueError), match=raised) as error:
            jaxtrain.train(
                replace(own, steps=4, checkpoints=jaxtrain.SavePolicy(every=100)),
                jaxtrain.mesh_from_axes(fsdp=2),
                run_dir=tmp_path / raised,
                cache_dir=tmp_path / "cache",
                stream=io.StringIO(),
                callbacks=callbacks,
            )
        notes = [note for note in getattr(error.value, "__notes__", ()) if "No space" in note]
        assert len(notes) == len(callbacks), "the same failure again is none"


@pytest.mark.parametrize("failing", range(3))
def test_a_directory_that_one_process_may_not_have_is_refused_on_all(
    failing: int, own: jaxtrain.Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one of the others hears of it, before its first step: as the run begins, when the space
    for checkpoints is looked at, and when it opens the directory."""
    shared: list[None] = []

    def another_fails(act: Callable[[], Any]) -> Any:
        shared.append(None)
        if len(shared) > failing:
            raise ValueError("process 0: run directory run is in use by process 7")
        return act()

    for module in (loop, session):
        monkeypatch.setattr(module, "share_failure", another_fails)
    mesh, stream = jaxtrain.mesh_from_axes(fsdp=2), io.StringIO()
    with pytest.raises(ValueError, match="process 0: run directory run is in use by process 7"):
        experiment = replace(own, checkpoints=jaxtrain.SavePolicy(every=100))
        jaxtrain.train(
            experiment, mesh, run_dir=tmp_path / "run", cache_dir=tmp_path, stream=stream
        )
    assert "parameters on" not in stream.getvalue()
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_an_ill_listing_does_not_replace_why_a_run_ends() -> None:
    def ill() -> int:
        raise OSError(5, "Input/output error")

    saving = types.SimpleNamespace(manager=types.SimpleNamespace(latest=ill))
    told = saves.Saves._newest(types.SimpleNamespace(saving=saving))  # type: ignore[arg-type]
    assert told == "what is saved cannot be seen: [Errno 5] Input/output error"
