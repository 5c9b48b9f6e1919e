"""A run's own callbacks (its line of progress, files of metrics, traces, what the guard of
compressed sums found), and how they and the user's are called."""

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
from jaxtrain.experiment import Experiment, Logging
from jaxtrain.experiment.kinds import callback_violations
from jaxtrain.run.callback import Callback, Run
from jaxtrain.run.rates import Rates
from jaxtrain.telemetry.metrics import MetricsWriter
from jaxtrain.telemetry.profiler import Profiler, Steps
from jaxtrain.telemetry.progress import Progress
from jaxtrain.violations import raise_violations


def callbacks_of(experiment: Experiment, given: Sequence[Any]) -> list[Callback]:
    """The experiment's callbacks and those given to `train`, made where functions make them.
    Raises ValueError for what is none."""
    if not isinstance(given, Sequence):
        raise ValueError(f"callbacks={given!r}; give a list of them: callbacks=[...]")
    raise_violations(callback_violations("callbacks", tuple(given)))
    made = []
    for each in (*experiment.logging.callbacks, *given):
        found = each() if callable(each) and not isinstance(each, Callback) else each
        if not isinstance(found, Callback):
            raise ValueError(
                f"the callback {each!r} gave {found!r}; use a value whose class inherits from "
                "jaxtrain.Callback"
            )
        made.append(found)
    raise_violations([said for each in made for said in _never_called(each)])
    return made


def _never_called(callback: Callback) -> list[str]:
    """Methods that a run does not call, though they are named as if it did, and those that it
    could not call with what it gives."""
    events = [name for name in vars(Callback) if not name.startswith("_")]
    kind, found = type(callback).__name__, []
    for name in dir(type(callback)):
        if name in events:
            given = inspect.signature(getattr(Callback, name)).parameters
            try:
                inspect.signature(getattr(callback, name)).bind(*[None] * (len(given) - 1))
            except TypeError:
                asked = ", ".join(given)
                found.append(f"{kind}.{name} is called as {name}({asked}); take these arguments")
        elif name.startswith("on_") or difflib.get_close_matches(name, events, n=1, cutoff=0.85):
            calls = ", ".join(events)
            found.append(f"{kind}.{name} is no call of a run, which makes {calls}; rename it")
    return found


class Hooks:
    """The callbacks of a run: its `own`, then those `given`; each is told of everything. What those
    given take is the phase "callback" of `phases`."""

    def __init__(
        self, run: Run, own: Iterable[Callback], given: Iterable[Callback], phases: Phases
    ) -> None:
        self.run, self._own, self._given, self._phases = run, tuple(own), tuple(given), phases
        self._told = self._given

    def tell(self, event: str, *of: Any) -> None:
        """Call that method of each."""
        for each in self._own:
            getattr(each, event)(self.run, *of)
        for each in self._told:
            call = getattr(each, event)
            if getattr(call, "__func__", None) is not getattr(Callback, event):
                with self._phases.within("callback"):
                    call(self.run, *of)

    def own_alone(self) -> None:
        """From here on those given are told of the end only."""
        self._told = ()

    @contextmanager
    def ended(self) -> Iterator[None]:
        """Tells those given of the end of what is done within, however it ends."""
        try:
            yield
        except BaseException as error:
            try:
                self._end(self._given)
            except Exception as second:
                error.add_note(f"a callback failed at the end too: {second!r}")
            raise
        self._end(self._given)

    def close(self) -> None:
        """Tells its own of the end."""
        self._end(self._own)

    def _end(self, of: Sequence[Callback]) -> None:
        with ExitStack() as stack:  # it calls all of them, the latest first, whatever they raise
            for each in reversed(of):
                stack.callback(each.end, self.run)


class ProgressLine(Callback):
    """The line of progress, and whatever else the run tells."""

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
    """Tells once that compressed sums are beyond their guard's bounds. tripped: the step of which
    that was known before, or -1."""

    def __init__(self, tripped: int) -> None:
        self._tripped = tripped

    def metrics(self, run: Run, step: int, values: Mapping[str, Any]) -> None:
        """Steps are counted from 0 in the metric and from 1 in what is told. The step after the
        one that was sampled was already on its way."""
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
    the last and those that were evaluated, whose line waits for what was found. Speeds are means
    since the line before, so `rates` are told of each, also where run_dir=None keeps none. Lines
    have what `pace` knows of each process, where it is new."""

    def __init__(
        self, run_dir: Path | None, start: int, logging: Logging, rates: Rates, pace: Pace
    ) -> None:
        self._run_dir, self._logging, self._rates, self._pace = run_dir, logging, rates, pace
        self._held: tuple[int, Mapping[str, Any]] | None = None
        self._latest = start
        self._writer = self._open(start + 1)

    def metrics(self, run: Run, step: int, values: Mapping[str, Any]) -> None:
        self._latest = step
        if run.evaluates(step):
            self._held = (step, values)
        elif step % self._logging.every == 0 or step in (run.start + 1, run.last):
            self._write(run, step, values)

    def after_evaluation(self, run: Run, step: int, values: Mapping[str, float]) -> None:
        self.write_held(run, values)

    def after_rollback(self, run: Run, step: int) -> None:
        """The lines of the steps that come again are dropped."""
        self._held, self._latest = None, step
        self.write_again(run)

    def end(self, run: Run) -> None:
        self.write_held(run)
        self._close(run)

    def write_held(self, run: Run, values: Mapping[str, float] = MappingProxyType({})) -> None:
        """The line that waits for an evaluation, with what it found; {} where it failed."""
        held, self._held = self._held, None
        if held is not None:
            self._write(run, held[0], {**held[1], **values})

    def write_again(self, run: Run) -> None:
        """Go on in new files, after the latest step: the old ones were removed, or go further."""
        if self._writer is not None:
            self._close(run)
            self._writer = self._open(self._latest + 1)

    def _open(self, start: int) -> MetricsWriter | None:
        if self._run_dir is None:
            return None
        tensorboard, process = self._logging.tensorboard, jax.process_index()
        return MetricsWriter(self._run_dir, start=start, tensorboard=tensorboard, process=process)

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
        except OSError as error:  # it would hide what ends the run
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
    """Tells of a process that the others wait for, once of each."""

    def __init__(self, pace: Pace) -> None:
        self._pace, self._told = pace, set[int]()

    def metrics(self, run: Run, step: int, values: Mapping[str, Any]) -> None:
        slow = self._pace.slow()
        if slow is not None and slow.process not in self._told:
            self._told.add(slow.process)
            run.tell(f"NOTE step {step}: {slow}")


class CrowdedRows(Callback):
    """Tells once of rows with more documents than cuDNN's attention has room for. room: documents
    in the mean of a row; None where another kernel runs."""

    def __init__(self, room: int | None) -> None:
        self._room = room

    def metrics(self, run: Run, step: int, values: Mapping[str, Any]) -> None:
        found = values.get("documents_per_row") or 0
        if self._room is None or found <= self._room:
            return
        run.tell(
            f"NOTE step {step}: rows hold {found:.0f} documents in the mean, and Cudnn(documents="
            f"{self._room}) has room for fewer: devices with more run attention as loops over "
            f"tiles, on an H100 8 times as long; use execution.attention=Cudnn(documents="
            f"{1 << math.ceil(1.2 * found).bit_length()})"
        )
        self._room = None


class GarbageCollection(Callback):
    """Of several processes: Python collects its garbage at the same steps on all of them, `every`
    so many. Each would else stop for it at steps of its own, and all wait for each (MegaScale,
    Jiang et al. 2024, section 5)."""

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
