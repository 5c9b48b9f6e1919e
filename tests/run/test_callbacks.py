"""Callbacks: when each is called, what it sees, what it may ask for, and that a run is the same
with and without them."""

from __future__ import annotations

import gc
import io
import json
import re
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event

import jaxtrain
from jaxtrain.checkpoint import CheckpointError
from jaxtrain.cluster.phases import Now, Phases
from jaxtrain.experiment import config_of
from jaxtrain.experiment.stored import refuse_unreadable, stored_field
from jaxtrain.run.hooks import CrowdedRows, GarbageCollection, GuardMessages, Hooks
from jaxtrain.run.saving import Saving
from jaxtrain.telemetry.profiler import Profiler

EVENTS = ("begin", "before_step", "after_step", "metrics", "after_evaluation", "after_save", "end")
SPEEDS = {"tokens_per_s", "step_s", "data_s", "time"}
Train = Callable[..., tuple[jaxtrain.Result, str]]


class Recorder(jaxtrain.Callback):
    """Every call, as (event, step, how many steps the run said were done)."""

    def __init__(self, calls: list[tuple[str, Any, int]] | None = None, name: str = "") -> None:
        self.calls: list[tuple[str, Any, int]] = [] if calls is None else calls
        self.values: dict[tuple[str, int], dict[str, Any]] = {}
        for event in EVENTS:
            setattr(self, event, self.recording(event, name))

    def recording(self, event: str, name: str) -> Callable[..., None]:
        def called(run: jaxtrain.Run, *of: Any) -> None:
            self.calls.append((name + event, of[0] if of else None, run.steps))
            if len(of) > 1:
                self.values[event, of[0]] = dict(of[1])

        return called


class Doing(jaxtrain.Callback):
    """`act(run)` at one event, of one step where it has a step."""

    def __init__(self, event: str, step: int | None, act: Callable[[jaxtrain.Run], Any]) -> None:
        def called(run: jaxtrain.Run, *of: Any) -> None:
            if not of or of[0] == step:
                act(run)

        setattr(self, event, called)


def fail(run: jaxtrain.Run) -> None:
    raise RuntimeError("of the user's own")


@pytest.fixture
def train(own: jaxtrain.Experiment, tmp_path: Path) -> Train:
    """A run of 6 steps, evaluated and saved every second; and what it told."""
    often = jaxtrain.Evaluation(every=2, batches=1, final_batches=1)
    policy = jaxtrain.SavePolicy(every=2, keep=10)
    given = replace(own, steps=6, evaluation=often, checkpoints=policy)

    def run(
        *callbacks: Any, name: str | None = "run", steps: int | None = None, **changes: Any
    ) -> tuple[jaxtrain.Result, str]:
        stream = io.StringIO()
        result = jaxtrain.train(
            replace(given, **changes), jaxtrain.mesh_from_axes(data=1), steps=steps, stream=stream,
            run_dir=None if name is None else tmp_path / name, cache_dir=tmp_path,
            callbacks=callbacks,
        )  # fmt: skip
        return result, stream.getvalue()

    return run


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def saved(folder: Path) -> list[int]:
    return sorted(int(path.name) for path in (folder / "checkpoints").iterdir())


def state_of(result: jaxtrain.Result) -> list[bytes]:
    assert result.session is not None
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(result.session.state)]


# When each is called.

ORDER = [
    ("begin", None, 0),
    ("before_step", 1, 0),
    ("after_step", 1, 1),
    ("before_step", 2, 1),
    ("after_step", 2, 2),
    ("metrics", 1, 2),
    ("metrics", 2, 2),
    ("after_save", 2, 2),
    ("after_evaluation", 2, 2),
    ("before_step", 3, 2),
    ("after_step", 3, 3),
    ("metrics", 3, 3),
    ("after_save", 3, 3),
    ("after_evaluation", 3, 3),
    ("end", None, 3),
]


def test_the_order_of_calls(train: Train) -> None:
    """The metrics of a step come when the next was dispatched, or a save or an evaluation waits
    anyway."""
    recorder = Recorder()
    train(recorder, steps=3)
    assert recorder.calls == ORDER


def test_saves_that_are_rated_come_after_the_evaluation(train: Train) -> None:
    recorder = Recorder()
    keep = jaxtrain.checkpoint.Keep(latest=1, best=jaxtrain.checkpoint.Best("eval_loss"))
    train(recorder, steps=2, checkpoints=jaxtrain.SavePolicy(every=1, keep=keep))
    at = [(event, step) for event, step, _ in recorder.calls if event not in EVENTS[:3]]
    assert at == [
        *(("metrics", 1), ("after_save", 1), ("metrics", 2)),
        *(("after_evaluation", 2), ("after_save", 2), ("end", None)),
    ]


def test_those_of_the_experiment_come_before_those_of_the_call(train: Train) -> None:
    calls: list[Any] = []
    first, second = Recorder(calls, "first "), Recorder(calls, "second ")
    third = Recorder(calls, "third ")
    logging = jaxtrain.Logging(tensorboard=False, callbacks=(lambda: first,))
    train(second, lambda: third, name=None, steps=1, logging=logging)
    alone = calls[::3]
    assert calls == [
        (event.replace("first", word), *rest)
        for event, *rest in alone
        for word in ("first", "second", "third")
    ]
    assert alone[0][0] == "first begin"


# What it sees.


def test_the_metrics_are_those_of_the_run(train: Train, tmp_path: Path) -> None:
    recorder = Recorder()
    result, _ = train(recorder, logging=jaxtrain.Logging(every=100, tensorboard=False))
    seen = [{"step": step, **recorder.values["metrics", step]} for step in range(1, 7)]
    found = recorder.values["after_evaluation", 6]
    held_out = [recorder.values.get(("after_evaluation", line["step"]), {}) for line in seen]
    assert [line | held for line, held in zip(seen, held_out, strict=True)] == result.history
    assert held_out[-1] == found
    assert all(
        type(value) in (float, type(None)) for line in seen for value in [*line.values()][1:]
    )
    assert found == result.evaluation and lines(tmp_path / "run")[-1].items() >= found.items()


def test_the_run_can_be_read_and_not_set(train: Train, tmp_path: Path) -> None:
    found: dict[str, Any] = {}

    def look(run: jaxtrain.Run) -> None:
        names = ("experiment", "run_dir", "start", "steps", "last", "first_process")
        found.update({name: getattr(run, name) for name in names})
        found["state"] = int(run.state.step)
        found["evaluates"] = [step for step in range(1, 7) if run.evaluates(step)]
        run.tell("a line of its own")
        for name in names:
            with pytest.raises(AttributeError):
                setattr(run, name, 3)

    train(steps=2)
    result, said = train(Doing("after_step", 4, look), steps=5)
    assert found == {
        "experiment": result.experiment,
        "run_dir": tmp_path / "run",
        **{"start": 2, "steps": 4, "last": 5, "first_process": True, "state": 4},
        "evaluates": [2, 4, 5, 6],
    }
    told = [line[9:] for line in said.splitlines()]  # without the time of day
    assert told.index("a line of its own") < told.index(next(t for t in told if "step 4 eval" in t))


def test_callbacks_that_only_look_change_nothing(train: Train, tmp_path: Path) -> None:
    """Neither the state, nor what is told, nor the files."""
    logging = jaxtrain.Logging(every=4)
    quiet, said = train(name="quiet", logging=logging)
    watched, told = train(Recorder(), name="watched", logging=logging)
    assert state_of(watched) == state_of(quiet)
    words = [[line.split(" tok/s")[0][9:] for line in text.splitlines()] for text in (said, told)]
    own = ("held the run up", "compiled in")
    words = [[line for line in each if not any(o in line for o in own)] for each in words]
    assert words[0] == words[1]
    # Line by line: the first, every fourth, the evaluated, the last.
    assert [line.split(" loss")[0] for line in words[0] if " loss" in line] == [
        *("step 1/6", "step 4/6", "step 6/6"),
    ]
    assert [line["step"] for line in lines(tmp_path / "quiet")] == [1, 2, 4, 6]
    files = [
        [{k: v for k, v in line.items() if k not in SPEEDS} for line in lines(tmp_path / name)]
        for name in ("quiet", "watched")
    ]
    assert files[0] == files[1]
    assert [scalars(tmp_path / name) for name in ("quiet", "watched")] == [
        {
            (line["step"], k, np.float32(v))
            for line in each
            for k, v in line.items()
            if k not in ("step", "time")
        }
        for each in files
    ]


def test_a_trace_is_of_the_steps_counted_from_0(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device has done that many of them before, and one more after."""
    around: list[tuple[int, int]] = []
    for name in ("before", "after"):
        seen = lambda _, step, state: around.append((step, int(state.step)))  # noqa: E731
        monkeypatch.setattr(Profiler, name, seen)
    train(steps=2)
    assert around == [(0, 0), (0, 1), (1, 1), (1, 2)]


def test_the_guard_of_compressed_sums_is_told_once(
    decoder: jaxtrain.Experiment, tmp_path: Path
) -> None:
    """Each step is sampled; of the first it is known when the third is dispatched."""
    guard = jaxtrain.compression.Guard(every=1, max_error=0.01)
    reducer = jaxtrain.compression.Compressed(jaxtrain.compression.TopK(0.01), guard=guard)
    execution = jaxtrain.Execution(reducer=reducer, small_leaf=0)
    recorder, stream = Recorder(), io.StringIO()
    result = jaxtrain.train(
        replace(decoder, execution=execution, steps=2), jaxtrain.mesh_from_axes(data=2),
        cache_dir=tmp_path, stream=stream, callbacks=[recorder],
    )  # fmt: skip
    first = result.history[0]
    assert [line["guard_tripped"] for line in result.history] == [0, 0]
    found = f"error {first['reducer_error']:.3g}, cosine {first['reducer_cosine']:.3g}"
    told = [
        f"step 1 compressed sums are beyond the guard's bounds ({found}): sums are exact from "
        "step 3 on"
    ]
    lines = [line[9:] for line in stream.getvalue().splitlines()]
    assert [line for line in lines if "compressed sums" in line] == told

    class Telling:
        said: list[str] = []  # noqa: RUF012
        tell = said.append

    for tripped in (-1, 0):  # of one that a run knew of before it was resumed nothing is told
        GuardMessages(tripped).metrics(Telling, 1, first)  # type: ignore[arg-type]
        assert Telling.said == told


def scalars(folder: Path) -> set[tuple[int, str, np.float32]]:
    """What TensorBoard shows, the speeds left out: records of length, crc, data, crc."""
    found = set()
    for path in (folder / "events").iterdir():
        data, at = path.read_bytes(), 0
        while at < len(data):
            length = int.from_bytes(data[at : at + 8], "little")
            event = Event.FromString(data[at + 12 : at + 12 + length])
            found |= {(event.step, v.tag, np.float32(v.simple_value)) for v in event.summary.value}
            at += length + 16
    return {each for each in found if each[1] not in SPEEDS}


# What it asks for.

STOPS = {"begin": 1, "before_step": 3, "after_step": 3, "metrics": 4, "after_evaluation": 4}


@pytest.mark.parametrize("event", [*STOPS, "after_save"])
def test_a_run_that_is_asked_to_stop_goes_on_to_the_bit(
    event: str, train: Train, tmp_path: Path
) -> None:
    """After the step it is at, with that step saved; metrics of step 3 come while 4 is on its
    way."""
    at = 4 if event in ("after_evaluation", "after_save") else 3
    stops = STOPS.get(event, 4)
    recorder, evaluates = Recorder(), []
    look = Doing("end", None, lambda run: evaluates.append(run.evaluates(run.last)))
    part, _ = train(Doing(event, at, jaxtrain.Run.stop), recorder, look)
    assert evaluates == [stops == 4], "the step it was stopped at is not evaluated for that"
    assert part.stopped and part.steps == part.saved == stops == saved(tmp_path / "run")[-1]
    assert recorder.calls[-1] == ("end", None, stops)
    saves = [step for event, step, _ in recorder.calls if event == "after_save"]
    assert saves == saved(tmp_path / "run"), "each once"
    assert [line["step"] for line in lines(tmp_path / "run")][-1] == stops
    rest, said = train()
    assert f"resuming at step {stops}" in said and not rest.stopped
    whole, _ = train(name="whole")
    assert state_of(rest) == state_of(whole)
    assert [line["loss"] for line in rest.history] == [
        line["loss"] for line in whole.history[stops:]
    ]


@pytest.mark.parametrize("event", ["before_step", "after_evaluation"])
def test_a_save_that_is_asked_for(event: str, train: Train, tmp_path: Path) -> None:
    """At the end of the step; the run goes on, and its state is of that step."""
    recorder, policy = Recorder(), jaxtrain.SavePolicy(every=100, keep=9)
    step = 3 if event == "before_step" else 4
    result, _ = train(Doing(event, step, jaxtrain.Run.save), recorder, checkpoints=policy)
    assert not result.stopped and result.steps == 6
    assert saved(tmp_path / "run") == [step, 6]
    assert [s for e, s, _ in recorder.calls if e == "after_save"] == [step, 6]
    assert state_of(result) == state_of(train(name="whole")[0])


def test_asks_of_the_last_step_and_of_a_run_in_memory(train: Train) -> None:
    recorder = Recorder()
    asks = [Doing("after_step", 6, jaxtrain.Run.stop), Doing("after_step", 6, jaxtrain.Run.save)]
    assert not train(*asks, recorder)[0].stopped
    assert [s for e, s, _ in recorder.calls if e == "after_save"] == [2, 4, 6]
    stopped, _ = train(
        Doing("before_step", 1, jaxtrain.Run.save), Doing("metrics", 2, jaxtrain.Run.stop),
        recorder, name=None,
    )  # fmt: skip
    assert stopped.stopped and stopped.steps == 2 and stopped.saved is None


def test_a_save_that_fails_is_not_told_as_one(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = Saving._save

    def failing(saving: Saving, step: int, *of: Any, **options: Any) -> None:
        if step == 2:
            raise CheckpointError("no room", step=2, directory=Path("run"), remedy="make room")
        save(saving, step, *of, **options)

    monkeypatch.setattr(Saving, "_save", failing)
    recorder = Recorder()
    _, said = train(recorder)
    assert "NOT SAVED" in said and "no room" in said
    assert [s for e, s, _ in recorder.calls if e == "after_save"] == [4, 6]


def test_the_example_of_the_documentation_stops(train: Train) -> None:
    """Of a model that learns nothing: the first evaluation is the best, three follow it."""
    page = (Path(__file__).parents[2] / "docs" / "extending.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?jaxtrain\.Callback.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(example, "extending.md", "exec"), names)
    optimizer = jaxtrain.SGD(1e-30, momentum=0.0, weight_decay=0.0)
    result, said = train(names["Patience"](), name=None, optimizer=optimizer,
        evaluation=jaxtrain.Evaluation(every=1, batches=1))  # fmt: skip
    assert result.stopped and result.steps == 4 and "step 4 no better than" in said


# What it raises.

RAISED = {"begin": 0, "before_step": 2, "after_step": 3, "metrics": 4, "after_evaluation": 4}


@pytest.mark.parametrize("event", [*RAISED, "after_save"])
def test_what_a_callback_raises_ends_the_run_with_its_state_saved(
    event: str, train: Train, tmp_path: Path
) -> None:
    """Nobody but the run's own is told of anything more than the end."""
    at = 4 if event in ("after_evaluation", "after_save") else 3
    reached = RAISED.get(event, 4)
    recorder = Recorder()
    with pytest.raises(RuntimeError, match="of the user's own"):
        train(recorder, Doing(event, at, fail))
    assert saved(tmp_path / "run")[-1] == reached
    assert recorder.calls[-1][:2] == ("end", None) and recorder.calls[-2][0] == event
    logged = lines(tmp_path / "run")
    assert [line["step"] for line in logged] == list(range(1, reached + 1)), "each once"
    rest, _ = train()
    assert state_of(rest) == state_of(train(name="whole")[0])


def test_the_end_is_told_to_all_and_hides_no_error(train: Train) -> None:
    recorder = Recorder()
    with pytest.raises(RuntimeError, match="of the user's own"):
        train(Doing("end", None, fail), recorder, steps=2)
    assert recorder.calls[-1] == ("end", None, 2)

    def interrupt(run: jaxtrain.Run) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        train(Doing("end", None, fail), Doing("after_step", 4, interrupt), recorder)
    assert caught.value.__notes__ == [
        'a callback failed at the end too: RuntimeError("of the user\'s own")'
    ]
    assert recorder.calls[-2:] == [("before_step", 4, 3), ("end", None, 4)]


# Where it stands.


@dataclass(frozen=True)
class StopAt(jaxtrain.Callback):
    step: int

    def after_step(self, run: jaxtrain.Run, step: int) -> None:
        if step == self.step:
            run.stop()


class Counting(jaxtrain.Callback):
    """Has a state of its own, which each start begins anew."""

    made: list[Counting] = []  # noqa: RUF012

    def __init__(self) -> None:
        self.steps = 0
        self.made.append(self)

    def after_step(self, run: jaxtrain.Run, step: int) -> None:
        self.steps += 1


def test_an_experiment_holds_callbacks_and_a_resumed_run_may_hold_others(
    train: Train, tmp_path: Path
) -> None:
    Counting.made.clear()
    logging = jaxtrain.Logging(tensorboard=False, callbacks=(StopAt(3), Counting))
    part, _ = train(logging=logging)
    assert part.stopped and part.steps == 3
    config = json.loads((tmp_path / "run" / "config.json").read_text())["experiment"]
    assert config["logging"]["callbacks"] == [
        {"class": f"{__name__}:StopAt", "step": 3},
        f"{__name__}:Counting",
    ]
    assert train(logging=replace(logging, callbacks=(Counting,)))[0].steps == 6
    assert [each.steps for each in Counting.made] == [3, 3]
    found = stored_field(tmp_path / "run", "logging", trust=__name__)
    assert found == replace(logging, callbacks=(Counting,))


def test_a_strangers_config_imports_no_callback(
    own: jaxtrain.Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "strangers.py").write_text("raise AssertionError('imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    config = config_of(own)
    config["logging"]["callbacks"] = ["strangers:Callback", {"class": "strangers:Other", "at": 3}]
    refuse_unreadable({"experiment": config})
    (tmp_path / "config.json").write_text(json.dumps({"experiment": config}))
    with pytest.raises(ValueError, match=r'"strangers"') as told:
        stored_field(tmp_path, "logging")
    for i in range(2):
        assert f"logging.callbacks[{i}]" in str(told.value)
    assert stored_field(tmp_path, "steps") == own.steps and "strangers" not in sys.modules


@pytest.mark.parametrize("wrong", [3, None, "Counting", StopAt, object(), lambda run: None])
def test_what_is_no_callback_is_refused_where_it_stands(wrong: Any, train: Train) -> None:
    said = r"callbacks\[1\]=.* is no callback; use a value whose class inherits from"
    with pytest.raises(ValueError, match=said):
        jaxtrain.Logging(callbacks=(StopAt(3), wrong))
    with pytest.raises(ValueError, match=said):
        train(StopAt(3), wrong)


def test_what_makes_no_callback_is_refused_before_anything_is_written(
    train: Train, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"gave 3; use a value whose class inherits from jaxtrain"):
        train(lambda: 3)
    assert not (tmp_path / "run").exists()


class Ends(jaxtrain.Callback):
    def on_step_end(self, run: Any, step: int) -> None: ...


class Misspelt(jaxtrain.Callback):
    def after_stp(self, run: Any, step: int) -> None: ...


class Fewer(jaxtrain.Callback):
    def after_step(self, step: int) -> None: ...


class Plain:
    def after_step(self, run: Any, step: int) -> None: ...


UNCALLED: dict[str, tuple[Any, str]] = {
    "another library's": ([Ends()], "Ends.on_step_end is no call of a run, which makes begin, bef"),
    "a letter short": ([Misspelt()], "Misspelt.after_stp is no call of a run"),
    "fewer arguments": ([Fewer()], r"Fewer.after_step is called as after_step\(self, run, step\)"),
    "no callback": ([Plain()], "inherits from jaxtrain.Callback"),
    "no list": (Ends(), r"give a list of them: callbacks=\[...\]"),
}


@pytest.mark.parametrize("name", UNCALLED)
def test_what_a_run_would_never_call_is_refused_before_it_compiles(
    name: str, own: jaxtrain.Experiment, tmp_path: Path
) -> None:
    given, told = UNCALLED[name]
    mesh = jaxtrain.mesh_from_axes(data=1)
    with pytest.raises(ValueError, match=told):
        jaxtrain.train(own, mesh, cache_dir=tmp_path, callbacks=given)


def test_of_several_processes_garbage_is_collected_at_the_same_steps(monkeypatch) -> None:
    """And as before it is left to Python where one runs alone, and when the run is over."""
    collected: list[int] = []
    monkeypatch.setattr(gc, "collect", lambda: collected.append(step))
    for processes, wanted in ((1, []), (2, [20, 40])):
        collected.clear()
        monkeypatch.setattr(jax, "process_count", lambda n=processes: n)
        each = GarbageCollection(every=20)
        each.begin(Any)
        assert gc.isenabled() == (processes == 1)
        for step in range(1, 50):
            each.before_step(Any, step)
        each.end(Any)
        assert collected == wanted and gc.isenabled()


@pytest.mark.parametrize(("room", "held", "use"), [(64, 65.0, 128), (64, 64.0, None), (4, 9.5, 16)])
def test_rows_with_more_documents_than_cudnn_has_room_for_are_told_once(
    room: int, held: float, use: int | None
) -> None:
    told: list[str] = []
    run: Any = SimpleNamespace(tell=told.append)
    for rows in (CrowdedRows(room), CrowdedRows(None)):
        for step in (1, 2, 3):
            rows.metrics(run, step, {} if step == 1 else {"documents_per_row": held})
    assert len(told) == (use is not None)
    assert all(
        f"NOTE step 2: rows hold {held:.0f}" in t and f"(documents={use})" in t for t in told
    )


class LeavesAtOnce(jaxtrain.Callback):
    """Notes what a process would report that ended here, as one of several does after an error."""

    def __init__(self, phases: Phases) -> None:
        self.phases, self.seen = phases, list[Now]()

    def end(self, run: Any) -> None:
        self.seen.append(self.phases.now)


class FailsAtTheEnd(jaxtrain.Callback):
    def end(self, run: Any) -> None:
        raise OSError("of a callback")


@pytest.mark.parametrize(
    ("in_body", "at_end", "failed_in"),
    [
        (False, False, "finish"),
        (True, False, "step"),
        (False, True, "callback"),
        (True, True, "step"),
    ],
)
def test_an_end_may_be_long_and_knows_where_the_run_failed(
    in_body: bool, at_end: bool, failed_in: str
) -> None:
    """The deadline of a run's end is its own, not that of other callbacks."""
    phases = Phases()
    last = LeavesAtOnce(phases)
    hooks = Hooks(Any, (), (*[FailsAtTheEnd()] * at_end, last), phases)
    phases.enter("step")
    fails = pytest.raises(OSError) if in_body or at_end else nullcontext()
    with fails, hooks.ended():
        if in_body:
            raise OSError("of a step")
        phases.enter("finish")
    (now,) = last.seen
    assert now.failed_in == failed_in and now.phase == ("step" if in_body else "finish")
