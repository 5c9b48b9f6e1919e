"""A run's own callbacks (progress line, metrics files, traces, messages of the guard of compressed
sums), and how they and the user's are called."""

from __future__ import annotations

import difflib
import gc
import inspect
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, TextIO

import jax

from jaxtrain.cluster.pace import Pace
from jaxtrain.cluster.phases import Phases
from jaxtrain.experiment import Logging
from jaxtrain.experiment.kinds import callback_violations
from jaxtrain.run.callback import Callback, Run
from jaxtrain.session.rates import Rates
from jaxtrain.telemetry.metrics import MetricsWriter
from jaxtrain.telemetry.profiler import Profiler, Steps
from jaxtrain.telemetry.progress import Progress
from jaxtrain.violations import raise_violations


def callbacks_of(own: Sequence[Any], added: Sequence[Any]) -> list[Callback]:
    """Returns an experiment's own callbacks and those `added`; functions are called to create them.
    Raises ValueError for an object that is no callback."""
    if not isinstance(added, Sequence):
        raise ValueError(f"callbacks={added!r}; give a list of them: callbacks=[...]")
    raise_violations(callback_violations("callbacks", tuple(added)))
    callbacks = []
    for entry in (*own, *added):
        callback = entry() if callable(entry) and not isinstance(entry, Callback) else entry
        if not isinstance(callback, Callback):
            raise ValueError(
                f"the callback {entry!r} gave {callback!r}; use a value whose class inherits from "
                "jaxtrain.Callback"
            )
        callbacks.append(callback)
    raise_violations([violation for entry in callbacks for violation in _never_called(entry)])
    return callbacks


def _never_called(callback: Callback) -> list[str]:
    """Problems: methods named as if a run called them, which it does not; and methods that cannot
    take the arguments of the call."""
    events = [name for name in vars(Callback) if not name.startswith("_")]
    kind, problems = type(callback).__name__, []
    for name in dir(type(callback)):
        if name in events:
            parameters = inspect.signature(getattr(Callback, name)).parameters
            try:
                inspect.signature(getattr(callback, name)).bind(*[None] * (len(parameters) - 1))
            except TypeError:
                names = ", ".join(parameters)
                problems.append(f"{kind}.{name} is called as {name}({names}); take these arguments")
        elif name.startswith("on_") or difflib.get_close_matches(name, events, n=1, cutoff=0.85):
            calls = ", ".join(events)
            problems.append(f"{kind}.{name} is no call of a run, which makes {calls}; rename it")
    return problems


class Hooks:
    """The callbacks of a run: its `own` first, then those of the `user`. Every event goes to all of
    them. Time in user callbacks counts as the phase "callback" of `phases`."""

    def __init__(
        self, run: Run, own: Iterable[Callback], user: Iterable[Callback], phases: Phases
    ) -> None:
        self.run, self._own, self._user, self._phases = run, tuple(own), tuple(user), phases
        self._active = self._user

    def tell(self, event: str, *arguments: Any) -> None:
        """Calls the method `event` of each callback."""
        for callback in self._own:
            getattr(callback, event)(self.run, *arguments)
        for callback in self._active:
            call = getattr(callback, event)
            if getattr(call, "__func__", None) is not getattr(Callback, event):
                with self._phases.within("callback"):
                    call(self.run, *arguments)

    def own_alone(self) -> None:
        """From now on, user callbacks get only the end."""
        self._active = ()

    @contextmanager
    def ended(self) -> Iterator[None]:
        """Calls `end` of the user's callbacks after the body, however it ends. Their time counts as
        the phase of the body's end, and may be long; their errors are of the phase "callback"."""
        try:
            yield
        except BaseException as error:
            self._phases.fail()
            try:
                self._end(self._user, "callback")
            except Exception as second:
                error.add_note(f"a callback failed at the end too: {second!r}")
            raise
        self._end(self._user, "callback")

    def close(self) -> None:
        """Calls `end` of the run's own callbacks."""
        self._end(self._own)

    def _end(self, callbacks: Sequence[Callback], phase: str = "") -> None:
        """Ends all of them, even if some raise. phase: of their errors, if not the current one."""

        def end(callback: Callback) -> None:
            try:
                callback.end(self.run)
            except BaseException:
                self._phases.fail(phase)  # before the next one, which may leave at once
                raise

        with ExitStack() as stack:  # the latest first
            for callback in reversed(callbacks):
                stack.callback(end, callback)


class ProgressLine(Callback):
    """The progress line, and all other output of the run."""

    def __init__(self, total: int, start: int, stream: TextIO, every: int) -> None:
        self._progress = Progress(total, start, stream, every)
        self.tell = self._progress.message

    def metrics(self, run: Run, step: int, values: Mapping[str, Any]) -> None:
        self._progress.update(step, values)

    def after_evaluation(self, run: Run, step: int, values: Mapping[str, float]) -> None:
        if values:
            self.tell(" ".join([f"step {step}", *(f"{k} {v:.4f}" for k, v in values.items())]))

    def end(self, run: Run) -> None:
        self._progress.close()


class GuardMessages(Callback):
    """Reports once that compressed sums exceed their guard's bounds. tripped: the step at which
    that was known before this start, or -1."""

    def __init__(self, tripped: int) -> None:
        self._tripped = tripped

    def metrics(self, run: Run, step: int, values: Mapping[str, Any]) -> None:
        """The metric counts steps from 0, the message from 1. When the message is printed, the step
        after the sampled one was already dispatched."""
        tripped = int(values.get("guard_tripped", -1))
        if tripped < 0 or self._tripped >= 0:
            return
        self._tripped = tripped
        error, cosine = (values.get(f"reducer_{name}", math.nan) for name in ("error", "cosine"))
        run.tell(
            f"step {tripped + 1} compressed sums are beyond the guard's bounds (error {error:.3g}, "
            f"cosine {cosine:.3g}): sums are exact from step {tripped + 3} on"
        )


class MetricsFiles(Callback):
    """metrics.jsonl and TensorBoard events: a line for every `Logging.every`-th step, the first,
    the last and evaluated ones, whose line waits for the evaluation. Speeds are means since the
    previous line, so `rates` hears of each line, even if run_dir=None keeps none. Lines include
    what is new in `pace` of each process."""

    def __init__(
        self,
        run_dir: Path | None,
        start: int,
        logging: Logging,
        rates: Rates,
        pace: Pace,
        *,
        begins: int = 0,
    ) -> None:
        self._run_dir, self._logging, self._rates, self._pace = run_dir, logging, rates, pace
        self._waiting: tuple[int, Mapping[str, Any]] | None = None
        self._latest, self._first = start, begins + 1
        self._writer = self._open(start + 1)

    def begin(self, run: Run) -> None:
        if self._writer is not None and self._writer.lacks:
            run.tell(f"NOTE {self._writer.lacks}")

    def metrics(self, run: Run, step: int, values: Mapping[str, Any]) -> None:
        self._latest = step
        if run.evaluates(step):
            self._waiting = (step, values)
        elif step % self._logging.every == 0 or step in (run.start + 1, run.last):
            self._write(run, step, values)

    def after_evaluation(self, run: Run, step: int, values: Mapping[str, float]) -> None:
        self.write_waiting(run, values)

    def after_rollback(self, run: Run, step: int) -> None:
        """Drops the lines of the steps after `step`, which the run takes again."""
        self._waiting, self._latest = None, step
        self.write_again(run)

    def end(self, run: Run) -> None:
        self.write_waiting(run)
        self._close(run)

    def write_waiting(self, run: Run, values: Mapping[str, float] = MappingProxyType({})) -> None:
        """Writes the line that waits for an evaluation, with its values; {} if it failed."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            self._write(run, waiting[0], {**waiting[1], **values})

    def write_again(self, run: Run) -> None:
        """Continues in new files after the latest step: the old ones are gone or go further."""
        if self._writer is not None:
            self._close(run)
            self._writer = self._open(self._latest + 1)

    def _open(self, start: int) -> MetricsWriter | None:
        if self._run_dir is None:
            return None
        tensorboard, process = self._logging.tensorboard, jax.process_index()
        more: Any = dict(tensorboard=tensorboard, process=process, first=self._first)
        return MetricsWriter(self._run_dir, start=start, **more)

    def _write(self, run: Run, step: int, values: Mapping[str, Any]) -> None:
        self._rates.written()
        if self._writer is None:
            return
        try:
            self._writer.write(step, {**values, **self._pace.of_each()})
        except OSError as error:  # a full disk; the run is worth more than its log
            run.tell(f"NOT LOGGED step {step}: {error}; the run goes on")

    def _close(self, run: Run) -> None:
        try:
            if self._writer is not None:
                self._writer.close()
        except OSError as error:  # raising would hide why the run ends
            run.tell(f"NOT LOGGED the last steps: {error}")


class Profiling(Callback):
    """Traces `steps`, which are counted from 0, into run_dir/profile."""

    def __init__(self, steps: Steps | None, run_dir: Path | None) -> None:
        self._profiler = Profiler(steps, run_dir or Path("."))

    def before_step(self, run: Run, step: int) -> None:
        self._profiler.before(step - 1, run.state)

    def after_step(self, run: Run, step: int) -> None:
        self._profiler.after(step - 1, run.state)

    def after_rollback(self, run: Run, step: int) -> None:
        self._profiler.close()

    def end(self, run: Run) -> None:
        self._profiler.close()


class SlowProcess(Callback):
    """Reports a process that the others wait for, once per process."""

    def __init__(self, pace: Pace) -> None:
        self._pace, self._reported = pace, set[int]()

    def metrics(self, run: Run, step: int, values: Mapping[str, Any]) -> None:
        slow = self._pace.slow()
        if slow is not None and slow.process not in self._reported:
            self._reported.add(slow.process)
            run.tell(f"NOTE step {step}: {slow}")


class CrowdedRows(Callback):
    """Reports once that rows have more documents than cuDNN's attention has room for. room: mean
    documents per row; None if another kernel runs."""

    def __init__(self, room: int | None) -> None:
        self._room = room

    def metrics(self, run: Run, step: int, values: Mapping[str, Any]) -> None:
        mean = values.get("documents_per_row") or 0
        if self._room is None or mean <= self._room:
            return
        run.tell(
            f"NOTE step {step}: rows hold {mean:.0f} documents in the mean, and Cudnn(documents="
            f"{self._room}) has room for fewer short ones: devices with more run attention as "
            "loops over tiles, on an H100 8 times as long; use execution.attention=Cudnn(documents="
            f"{1 << math.ceil(1.2 * mean).bit_length()})"
        )
        self._room = None


class GarbageCollection(Callback):
    """With several processes, runs Python's garbage collection at the same steps on all: every
    `every` steps. Otherwise each would pause at different steps, and all would wait for each pause
    (MegaScale, Jiang et al. 2024, section 5)."""

    def __init__(self, every: int = 200) -> None:
        self._every, self._enabled = every, False

    def begin(self, run: Run) -> None:
        if jax.process_count() > 1:
            self._enabled = gc.isenabled()
            gc.disable()

    def before_step(self, run: Run, step: int) -> None:
        if self._enabled and step % self._every == 0:
            gc.collect()

    def end(self, run: Run) -> None:
        if self._enabled:
            gc.enable()
