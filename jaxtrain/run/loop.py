"""The training loop: batch, step, metrics one step late, evaluation, checkpoints."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, TextIO

import jax

from jaxtrain.checkpoint.tiers import Checkpoints
from jaxtrain.cluster.agreement import share_failure
from jaxtrain.cluster.pace import Pace
from jaxtrain.cluster.phases import Phases
from jaxtrain.cluster.requests import requests_of
from jaxtrain.data import TextData, reference_bits
from jaxtrain.experiment import Experiment, config_of, load_experiment, with_fields
from jaxtrain.files.stores import local_path
from jaxtrain.mesh.mesh import MeshSpec, load_mesh
from jaxtrain.run.callback import Callback, Running
from jaxtrain.run.directory import RunDirectory, refuse_fewer_steps, refuse_unfit
from jaxtrain.run.health import HealthChecks, WrongNumbers
from jaxtrain.run.hooks import (
    GarbageCollection,
    GuardMessages,
    Hooks,
    MetricsFiles,
    Profiling,
    ProgressLine,
    SlowProcess,
    callbacks_of,
)
from jaxtrain.run.rates import Rates
from jaxtrain.run.readings import Readings
from jaxtrain.run.result import Result
from jaxtrain.run.saving import Saving, checkpoints_of
from jaxtrain.run.session import CACHE_DIR, Session, open_session
from jaxtrain.run.uninterrupted import Uninterrupted
from jaxtrain.step.layer_order import natural_shapes
from jaxtrain.telemetry.metrics import read_metrics
from jaxtrain.weights.generate import generate


def train(
    experiment: Experiment | str | Path,
    mesh: MeshSpec | str | Path,
    *,
    run_dir: str | Path | None = None,
    steps: int | None = None,
    settings: list[str] | None = None,
    cache_dir: str | Path = CACHE_DIR,
    stream: TextIO | None = None,
    callbacks: Sequence[Callback] = (),
    phases: Phases | None = None,
) -> Result:
    """Train, or go on with what is in `run_dir`.

    experiment: one, or the path of its file. mesh: one, the path of its file, or the name of one
    that comes with jaxtrain ("cpu_8"). cache_dir: where tokens and indices of the data are kept
    between runs. stream: what is told goes there, to the standard output where it is None.
    steps: stop after so many of the experiment's steps (its schedules keep their length). settings:
    `path=value` overrides. callbacks: code of your own that the run calls, after that of
    `Logging.callbacks`; it may ask for a stop and for saves (`Callback`). On a stop, a
    KeyboardInterrupt or an error the state is saved first (what was raised is then raised again),
    but for those of one process of several. run_dir=None keeps everything in memory. phases: told
    what the run is at.

    Raises ValueError, before compiling or writing, when experiment, mesh, data and run directory
    do not fit together or more steps are done than are asked for, and later when nothing but
    skipped steps is left; CheckpointError when a save or restore fails.
    """
    if not isinstance(experiment, Experiment):
        experiment = load_experiment(experiment)
    experiment = with_fields(experiment, settings or [])
    spec = load_mesh(mesh)
    run = local_path("run_dir", run_dir) if run_dir is not None else None
    cache = local_path("cache_dir", cache_dir).expanduser()
    last = _last_step(experiment, steps)
    given = callbacks_of(experiment, callbacks)
    config = {}
    if run is not None:
        config = {"experiment": config_of(experiment)}
        refuse_unfit(run, config, experiment)
    elif experiment.logging.profile is not None:
        raise ValueError("logging.profile writes a trace into the run directory; give a run_dir")
    saves = checkpoints_of(run, experiment.checkpoints, spec)
    with ExitStack() as stack:
        if saves is not None:
            stack.callback(saves.close)
            refuse_fewer_steps(saves.directory.parent, saves.newest_whole(), last)
        session = open_session(
            experiment, spec, cache_dir=cache, checkpoints=saves, held_out=True, phases=phases
        )
        stack.callback(session.close)
        first, directory = jax.process_index() == 0, None
        if run is not None and first:
            directory = RunDirectory(run, config, session.dataset)
            stack.callback(directory.close)
        out = (stream or sys.stdout) if first else io.StringIO()
        result = Result(session.experiment, session.start, run, session=session)
        loop = _Loop(result, session, saves, directory, out, last, given)
        stack.callback(loop.close)
        return loop.whole()


def _last_step(experiment: Experiment, steps: int | None) -> int:
    """The step a run is to end with. Raises ValueError where the experiment has none such."""
    last = experiment.steps if steps is None else steps
    if not 1 <= last <= experiment.steps:
        raise ValueError(
            f"steps={last}; a run takes at least 1 step and at most experiment.steps="
            f"{experiment.steps}, for which its schedules are made; use steps="
            f"{max(1, min(last, experiment.steps))}, or another experiment.steps in a new run"
        )
    return last


class _Loop:
    def __init__(
        self,
        result: Result,
        session: Session,
        saves: Checkpoints | None,
        directory: RunDirectory | None,
        stream: TextIO,
        last: int,
        callbacks: Sequence[Callback],
    ) -> None:
        self.result, self.session, self.directory = result, session, directory
        self.experiment = session.experiment
        logging, run_dir = self.experiment.logging, result.run_dir
        progress = ProgressLine(last, session.start, stream, logging.every)
        self.tell = progress.tell
        self.requests = requests_of(session.start)
        self.run = Running(session, run_dir, last, self.tell, self.requests)
        self.rates = Rates(session.assembly, session.documents)
        self.pace, self.waited = Pace(self.requests.key), 0.0
        self.readings = Readings(session, self.rates, self.pace, self.tell_metrics)
        self.files = MetricsFiles(run_dir, session.start, logging, self.rates, self.pace)
        profiling, guard = Profiling(logging.profile, run_dir), GuardMessages(session.guard.tripped)
        of_several = (SlowProcess(self.pace), GarbageCollection())
        own = (profiling, progress, guard, self.files, *of_several)
        self.hooks, self.phases = Hooks(self.run, own, callbacks, session.phases), session.phases
        self.saving = Saving(saves, session, self.tell) if saves else None
        self.health = HealthChecks(self.experiment.execution.health, session, self.tell)
        self.uninterrupted = Uninterrupted()
        self.result.history = self.readings.history.lines
        self.evaluated_at: int | None = None

    def tell_metrics(self, step: int, values: Mapping[str, Any]) -> None:
        self.hooks.tell("metrics", step, MappingProxyType(values))

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """For rows, or for the devices: what is not done by this process of its own."""
        began = time.monotonic()
        yield
        self.waited += time.monotonic() - began

    def whole(self) -> Result:
        """The run from its first words to its last."""
        if self.saving:
            self.uninterrupted(self.saving.begin)
        self.tell(self.headline())
        self.health.begin()
        with self.hooks.ended():
            try:
                self.loop()
            except KeyboardInterrupt:
                self.uninterrupted.to_the_end(self.leave, "interrupted")
                raise
            except WrongNumbers:
                raise  # nothing of it is saved
            except Exception as error:
                self.uninterrupted.to_the_end(self.save_after_error, error)
                raise
            if not self.result.stopped:
                if self.session.start == self.run.last:
                    self.already_done()
                self.finish()
        return self.result

    def loop(self) -> None:
        session, run, hooks, phases = self.session, self.run, self.hooks, self.phases
        phases.enter("first step")
        phases.begin_at(session.start)
        hooks.tell("begin")
        for step in range(session.start, run.last):
            began, self.waited, early = time.monotonic(), 0.0, step < session.start + 2
            phases.enter("first step" if early else "step")
            with phases.within("load"), self.waiting():
                at, batch = session.loader.next()
            assert at == step, f"the loader gave the batch of step {at} for step {step}"
            hooks.tell("before_step", step + 1)
            with self.waiting():
                self.readings.take(step + 1, self.health.step(step, batch))
            self.result.steps = step + 1
            run.advance(step + 1)
            hooks.tell("after_step", step + 1)
            with self.waiting():
                self.readings.read()
            took = time.monotonic() - began
            phases.advance(step + 1, None if early else took)
            self.pace.add(took - self.waited, took, session.loader.wait_s)
            self.readings.refuse_skipping()
            self.health.after_step(step + 1)
            self.evaluate_and_save(step + 1)
            if self.stops_as_asked(step + 1):
                break
        self.readings.flush()
        phases.enter("finish")
        self.readings.refuse_skipping()

    def evaluate_and_save(self, done: int) -> None:
        """What is due after `done` steps."""
        evaluates, last = self.run.evaluates(done), done == self.run.last
        with self.phases.within("save"):
            tier = self.saving and self.uninterrupted(self.saving.due, done)
        rated = self.saving and self.saving.rated
        if evaluates and rated:
            self.run_evaluation(done)
            tier = "durable"
        if tier or last:
            self.save(last=last, durable=tier != "local")
        if evaluates and not rated:
            self.run_evaluation(done)

    def stops_as_asked(self, done: int) -> bool:
        """Do what callbacks asked for; whether the run ends here for it."""
        due = self.run.due(done)
        self.result.stopped = stops = "stop" in due and done < self.run.last
        if stops:
            self.run.end_at(done)
        if "save" in due or stops:
            self.save(last=stops)
        return stops

    def already_done(self) -> None:
        """The last step was saved before: tell what the run reached, and evaluate again."""
        done, whole = self.session.start, self.experiment.steps
        asked = f"all {done} steps" if done == whole else f"the {done} steps asked for, of {whole},"
        self.tell(f"{asked} are done")
        if self.result.run_dir is not None:
            for line in read_metrics(self.result.run_dir):
                self.readings.history.add(line)
        if self.experiment.evaluation is not None:
            self.run_evaluation(self.session.start)

    def headline(self) -> str:
        session = self.session
        parameters = sum(leaf.size for leaf in natural_shapes(session.assembly).params.values())
        sizes = " x ".join(f"{a}={n}" for a, n in session.assembly.sizes.items()) or "one device"
        begin = f"resuming at step {session.start}, " if session.start else session.beginning
        return (
            f"{begin}{parameters / 1e6:.1f}M parameters on {sizes} ({session.assembly.mode}), "
            f"{self.run.last} steps, compiled in {session.compile_s:.1f}s"
        )

    def run_evaluation(self, step: int) -> None:
        """Evaluate with the clock stopped; the values join the metrics of `step`."""
        evaluation = self.experiment.evaluation
        assert evaluation is not None
        self.readings.flush()
        with self.rates.paused(), self.phases.within("evaluate"):
            final = step >= self.run.last
            batches = evaluation.final_batches if final else evaluation.batches
            values = self.session.evaluate(self.session.state, batches=batches)
        self.result.evaluation, self.evaluated_at = values, step
        self.hooks.tell("after_evaluation", step, MappingProxyType(values))

    def save(self, *, last: bool, durable: bool = True) -> None:
        """As `save_now`, in one piece whatever interrupts it, and told to callbacks; the step's
        metrics first, which a run that goes on from the save never has again."""
        with self.phases.within("save"):
            begun = self.uninterrupted(self.ready_to_save, last, durable)
            if begun:
                self.readings.flush()
                begun = self.uninterrupted(self.save_now, last, durable)
        if begun:
            self.hooks.tell("after_save", self.result.steps)

    def ready_to_save(self, last: bool, durable: bool = True) -> bool:
        """Whether there is a directory to save in, and a state worth it."""
        if self.saving is None:
            return False
        jax.block_until_ready(self.session.state)  # the step's time is its own, not the save's
        with self.rates.paused():
            self.health.before_save(self.result.steps)
            if not self.directory_is_whole(last):
                self.saving.manager.put_off(self.result.steps, durable=durable)
                return False
        return True

    def save_now(self, last: bool, durable: bool = True) -> bool:
        """Whether a save of this step has begun, unless it was there. last: nothing comes after it.
        Then it raises what is told otherwise: CheckpointError, and ValueError where the run
        directory is gone and cannot be written again."""
        assert self.saving is not None
        with self.rates.paused():
            step, metrics = self.result.steps, self.evaluation_at(self.result.steps)
            if not last:
                return self.saving.save(step, metrics, durable=durable)
            begun = self.saving.save_last(step, metrics)
        self.result.saved = step
        return begun

    def directory_is_whole(self, last: bool) -> bool:
        """Whether the run directory is there to save in, and can be gone on from: the same on every
        process, for they all wait for each other in a save."""
        try:
            share_failure(self.write_again)
        except (OSError, ValueError) as error:
            if last:
                raise
            self.tell(f"NOT SAVED step {self.result.steps}: {error}; the run goes on")
            return False
        return True

    def write_again(self) -> None:
        """What was removed of the run directory. Raises ValueError and OSError."""
        assert self.saving is not None
        found = self.directory.written_again() if self.directory else None
        if found is not None:
            self.saving.manager.name_again()
            self.tell(f"NOTE {found}")
            self.files.write_again(self.run)

    def evaluation_at(self, step: int) -> dict[str, float]:
        """What an evaluation after `step` found, for `Best`; {} where none was like the others."""
        e = self.experiment.evaluation
        alike = e is not None and (step < self.run.whole or e.final_batches == e.batches)
        return self.result.evaluation if alike and self.evaluated_at == step else {}

    def leave(self, word: str) -> None:
        """Save what is whole: the state after the last finished step."""
        self.hooks.own_alone()  # one of the others may be why it ends
        if jax.process_count() > 1:  # a save is of all processes, and the others may go on
            latest = self.saving and self.saving.manager.latest()
            self.tell(f"{word} on one process of several; the newest save is {latest}")
            return
        self.phases.enter("finish")
        if self.saving is None:
            self.tell(f"{word}; nothing is saved without checkpoints in a run_dir")
            return
        if not self.session.alive():
            latest = self.saving.manager.latest()
            self.tell(f"{word}: the last step failed; the newest save is {latest}")
            return
        self.result.steps = int(self.session.state.step)
        self.run.end_at(self.result.steps)
        if self.ready_to_save(last=True):
            self.save_now(last=True)
        self.tell(f"{word}; saved step {self.result.steps}")
        self.readings.flush()
        self.files.write_held(self.run)

    def save_after_error(self, error: Exception) -> None:
        """As for an interrupt; what else fails then is noted on the error that came first."""
        try:
            self.leave("failed")
        except Exception as second:
            error.add_note(f"saving what was reached failed too: {second}")

    def finish(self) -> None:
        """The last words: what was reached against reference compressors, and a sample."""
        e, say = self.experiment, self.tell
        reached = self.result.evaluation.get("bits_per_byte")
        if reached is not None and isinstance(e.data, TextData) and e.data.has_text:
            bits = reference_bits(e.data)
            self.result.evaluation |= bits
            unigram, bigram = bits["unigram_bits_per_byte"], bits["bigram_bits_per_byte"]
            say(
                f"held-out {reached:.3f} bits per byte = {reached / unigram:.0%} of the unigram "
                f"entropy {unigram:.3f}; an interpolated bigram model reaches {bigram:.3f}"
            )
        if e.sample is not None:
            self.result.sample = self.sample_text()
            say(f"--- {e.sample.tokens} tokens at temperature {e.sample.temperature}")
            say(self.result.sample)

    def sample_text(self) -> str:
        e, s = self.experiment, self.experiment.sample
        assert s is not None
        return s.prompt + generate(
            self.session, s.prompt, tokens=s.tokens, temperature=s.temperature, seed=e.seed
        )

    def close(self) -> None:
        self.pace.close()
        self.requests.close()
        self.uninterrupted.close()
        self.hooks.close()
