"""The training loop: batch, step, metrics one step late, evaluation, checkpoints."""

from __future__ import annotations

import io
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, TextIO

import jax

from jaxtrain.checkpoint.tiers import Checkpoints
from jaxtrain.cluster.agreement import share_failure
from jaxtrain.cluster.pace import Pace
from jaxtrain.cluster.phases import Phases
from jaxtrain.cluster.requests import requests_of
from jaxtrain.experiment import Experiment, load_experiment, with_fields
from jaxtrain.files.cache import cache_directory
from jaxtrain.health.checks import HealthChecks, WrongNumbers
from jaxtrain.mesh.mesh import MeshSpec, load_mesh
from jaxtrain.notices import told_to
from jaxtrain.run.callback import Callback, Running
from jaxtrain.run.directory import (
    RunDirectory,
    begins_anew,
    config_of_run,
    last_step,
    opened_run,
    refuse_fewer_steps,
    refuse_unfit,
    refuse_unfit_anew,
    set_run_aside,
    staged,
    with_start,
)
from jaxtrain.run.hooks import (
    CrowdedRows,
    GarbageCollection,
    GuardMessages,
    Hooks,
    MetricsFiles,
    Profiling,
    ProgressLine,
    SlowProcess,
    callbacks_of,
)
from jaxtrain.run.peers import refuse_other_runs
from jaxtrain.run.readings import Readings
from jaxtrain.run.result import Result
from jaxtrain.run.rollback import refuse_without_saves, rollbacks_of
from jaxtrain.run.saves import Saves
from jaxtrain.run.saving import Saving, checkpoints_of
from jaxtrain.run.uninterrupted import Uninterrupted
from jaxtrain.run.words import finish, headline
from jaxtrain.session.branch import Branch
from jaxtrain.session.lineage import branch_from
from jaxtrain.session.memory import memory_remedies
from jaxtrain.session.rates import Rates
from jaxtrain.session.session import Session, open_session
from jaxtrain.step.running_kernels import documents_room
from jaxtrain.telemetry.metrics import read_metrics
from jaxtrain.telemetry.progress import Lines


def train(
    experiment: Experiment | str | Path,
    mesh: MeshSpec | str | Path,
    *,
    run_dir: str | Path | None = None,
    steps: int | None = None,
    settings: list[str] | None = None,
    cache_dir: str | Path | None = None,
    stream: TextIO | None = None,
    callbacks: Sequence[Callback] = (),
    phases: Phases | None = None,
    fresh: bool | str = False,
    from_run: str | Path | None = None,
) -> Result:
    """Train, or go on with what is in `run_dir`, a path or the address of a store (gs://, s3://).

    experiment: an Experiment or its file's path. mesh: a MeshSpec, its file's path, or the name of
    a built-in mesh ("cpu_8"). run_dir=None keeps all in memory. cache_dir: for tokens and indices,
    None for that of `jaxtrain cache`. stream: for the run's output, None for the standard output.
    steps: stop after so many of the experiment's steps (schedules keep their length). settings:
    `path=value` overrides. callbacks: called after those of `Logging.callbacks`; they may ask for
    stops and saves. phases: records times. fresh: begin anew; a run that is in `run_dir` is
    moved to `run_dir`.1 (.2, ...) once nothing is refused. A text: but go on with one begun with
    this text, for starts that repeat. from_run: RUN or RUN@STEP, by default its newest: `run_dir`
    begins as a branch, with the whole state of that step; what changes no leaf of it may differ.

    On a stop, a KeyboardInterrupt or an error the state is saved first (the exception is then
    raised again), except for an exception in one process of several.

    Raises ValueError, before compiling or writing, when experiment, mesh, data and run directory do
    not fit together, processes are of several runs or more steps are done than are asked for, and
    later when nothing but skipped steps is left; CheckpointError when a save or restore fails.
    """
    experiment, spec = _with_settings(experiment, settings), load_mesh(mesh)
    last = last_step(steps, of_experiment=experiment.steps)
    with told_to(lines_to(stream)), memory_remedies(spec), ExitStack() as stack:
        refuse_other_runs(experiment, spec, run_dir, last)
        run = opened_run(stack, run_dir)
        user_callbacks = callbacks_of(experiment.logging.callbacks, callbacks)
        fresh, beginning = begins_anew(run, fresh)
        branch = branch_from(from_run, run, last, fresh=fresh)
        config = {} if run is None else config_of_run(experiment, branch, beginning)
        last_held = _refuse(run, config, experiment, fresh=fresh)
        place = stack.enter_context(staged(run)) if fresh and run is not None else run
        saves = _checkpoints(stack, place, experiment, spec)
        if saves is not None:
            refuse_fewer_steps(saves.directory.parent, saves.newest_whole(), last)
        more: Any = dict(checkpoints=saves, branch=branch, held_out=True, phases=phases)
        session = open_session(experiment, spec, cache_dir=cache_directory(cache_dir), **more)
        stack.callback(session.close)
        out = (stream or sys.stdout) if jax.process_index() == 0 else io.StringIO()
        config = with_start(config, session.begins)
        if fresh and run is not None:
            _set_aside(run, place, out)
            saves = _checkpoints(stack, run, experiment, spec)
        directory = _open_directory(stack, run, config, session, last_held)
        result = Result(session.experiment, session.start, run, session=session)
        loop = _Loop(result, session, saves, directory, out, last, user_callbacks, branch)
        stack.callback(loop.close)
        return loop.run_to_end()


def _with_settings(experiment: Experiment | str | Path, settings: list[str] | None) -> Experiment:
    if not isinstance(experiment, Experiment):
        experiment = load_experiment(experiment)
    return with_fields(experiment, settings or [])


def _checkpoints(
    stack: ExitStack, run: Path | None, experiment: Experiment, spec: MeshSpec
) -> Checkpoints | None:
    """Returns the checkpoints of a run as `checkpoints_of`; the stack closes them."""
    saves = checkpoints_of(run, experiment, spec)
    return None if saves is None else stack.enter_context(saves)


def lines_to(stream: TextIO | None) -> Callable[[str], None]:
    """Returns a function that writes lines to the stream, None for the standard output, in the
    first of all processes; before the run has its own."""

    def tell(text: str) -> None:
        if jax.process_index() == 0:
            Lines(stream or sys.stdout).write(text)

    return tell


def _refuse(
    run: Path | None, config: dict[str, Any], experiment: Experiment, *, fresh: bool
) -> str:
    """Raises ValueError for a run directory in which this run can neither go on nor, if `fresh`,
    begin anew. Returns which run held it last."""
    refuse_without_saves(experiment.execution.health.spikes, experiment.checkpoints, run)
    if run is None:
        if experiment.logging.profile is not None:
            raise ValueError(
                "logging.profile writes a trace into the run directory; give a run_dir"
            )
        return ""
    # On all, or the others end with a crash report as the one that is refused leaves.
    if fresh:
        share_failure(lambda: refuse_unfit_anew(run, config, experiment))
        return ""
    return share_failure(lambda: refuse_unfit(run, config, experiment))


def _set_aside(run: Path, place: Path | None, stream: TextIO) -> None:
    """Sets the run in a directory aside, on the first process, and says where it is kept; removes
    the place where the new run was tried. Raises on all if that fails, as `share_failure`."""
    first = jax.process_index() == 0
    aside = share_failure(lambda: set_run_aside(run) if first else None)
    if first and place is not None:
        shutil.rmtree(place, ignore_errors=True)
    if aside is not None:
        Lines(stream).write(f"the run that was in {run} is kept in {aside}")


def _open_directory(
    stack: ExitStack, run: Path | None, config: dict[str, Any], session: Session, last: str
) -> RunDirectory | None:
    """Opens the run directory, if there is one, on the first process, until the stack closes it.
    Raises on all if that fails, as `share_failure`."""
    if run is None:
        return None
    first = jax.process_index() == 0
    opened = share_failure(lambda: RunDirectory(run, config, session, last) if first else None)
    if opened is not None:
        stack.callback(opened.close)
    return opened


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
        branch: Branch | None,
    ) -> None:
        self.result, self.session = result, session
        self.experiment = session.experiment
        logging, run_dir = self.experiment.logging, result.run_dir
        progress = ProgressLine(last, session.start, stream, logging.every)
        self.tell = progress.tell
        self.requests = requests_of(session.start)
        self.run = Running(session, run_dir, last, self.tell, self.requests)
        self.rates = Rates(session.assembly, session.loader.documents)
        self.pace, self.waited = Pace(self.requests.key), 0.0
        self.readings = Readings(session, self.rates, self.pace, self.tell_metrics)
        written_by = (logging, self.rates, self.pace)
        first = 0 if branch is None else branch.step
        self.files = MetricsFiles(run_dir, session.start, *written_by, begins=first)
        profiling, guard = Profiling(logging.profile, run_dir), GuardMessages(session.guard.tripped)
        of_several = (SlowProcess(self.pace), GarbageCollection())
        crowded = CrowdedRows(documents_room(session.assembly))
        own = (profiling, progress, guard, self.files, *of_several, crowded)
        self.hooks, self.phases = Hooks(self.run, own, callbacks, session.phases), session.phases
        self.health = HealthChecks(self.experiment.execution.health, session, self.tell)
        self.uninterrupted = Uninterrupted()
        saving = Saving(saves, session, self.tell) if saves else None
        self.rollbacks = rollbacks_of(session, saving, self.tell)
        self.saves = Saves(
            result=result,
            session=session,
            run=self.run,
            saving=saving,
            directory=directory,
            health=self.health,
            readings=self.readings,
            rates=self.rates,
            hooks=self.hooks,
            files=self.files,
            uninterrupted=self.uninterrupted,
            rollbacks=self.rollbacks,
        )
        self.steps_run = session.start
        """Steps run, repeated ones counted again; equal on all processes."""
        self.result.history = self.readings.history.lines

    def tell_metrics(self, step: int, values: Mapping[str, Any]) -> None:
        if self.rollbacks:
            self.rollbacks.see(step, values)
        self.hooks.tell("metrics", step, MappingProxyType(values))

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Adds to `waited` the time in which this process waits for rows or for the devices."""
        began = time.monotonic()
        yield
        self.waited += time.monotonic() - began

    def run_to_end(self) -> Result:
        """Runs everything, from the first line of output to the last."""
        self.saves.begin()
        self.tell(headline(self.session, self.run.last))
        self.health.begin()
        remedies = memory_remedies(self.session.assembly.spec)
        with self.hooks.ended(), remedies, told_to(self.tell):
            try:
                self.loop()
            except KeyboardInterrupt:
                self.uninterrupted.to_the_end(self.saves.leave, "interrupted")
                raise
            except WrongNumbers:
                raise  # a wrong state is not saved
            except Exception as error:
                self.phases.fail()
                self.uninterrupted.to_the_end(self.saves.after_error, error)
                raise
            if not self.result.stopped:
                if self.session.start == self.run.last:
                    self.already_done()
                finish(self.result, self.session, self.tell)
        return self.result

    def loop(self) -> None:
        session, run, phases = self.session, self.run, self.phases
        phases.enter("first step")
        phases.begin_at(session.start)
        self.hooks.tell("begin")
        done = session.start
        while done < run.last:
            self.step(done)
            self.steps_run += 1
            done += 1
            if self.rollbacks and self.rollbacks.due:
                back = self.saves.go_back()
                if back is not None:
                    done = back
                    continue
            if ends := done == self.experiment.steps:
                self.readings.flush()
            self.readings.refuse_skipping(ends=ends)
            self.health.after_step(done)
            self.evaluate_and_save(done)
            if self.stops_as_asked(done):
                break
        self.readings.flush()
        phases.enter("finish")
        self.readings.refuse_skipping()

    def step(self, step: int) -> None:
        """Takes the step after `step` steps; reads the metrics of the previous step."""
        session, run, hooks, phases = self.session, self.run, self.hooks, self.phases
        began, self.waited, early = time.monotonic(), 0.0, self.steps_run < session.start + 2
        phases.enter("first step" if early else "step")
        with phases.within("load"), self.waiting():
            index, batch = session.loader.next()
        assert index == step, f"the loader gave the batch of step {index} for step {step}"
        hooks.tell("before_step", step + 1)
        with self.waiting():
            self.readings.take(step + 1, self.health.step(step, batch))
        self.result.steps = step + 1
        run.advance(step + 1)
        phases.advance(step + 1)
        hooks.tell("after_step", step + 1)
        with self.waiting():
            self.readings.read()
            if self.rollbacks and step + 1 == run.last:
                self.readings.flush()
        took = time.monotonic() - began
        if not early:
            phases.measure(took)
        self.pace.add(took - self.waited, took, session.loader.wait_s)

    def evaluate_and_save(self, done: int) -> None:
        """Evaluates and saves, where due after `done` steps."""
        evaluates, last = self.run.evaluates(done), done == self.run.last
        tier, rated = self.saves.due(done), self.saves.rated
        if evaluates and rated:
            self.run_evaluation(done)
            tier = "durable"
        if tier or last:
            self.saves.save(last=last, durable=tier != "local")
        if evaluates and not rated:
            self.run_evaluation(done)

    def stops_as_asked(self, done: int) -> bool:
        """Carries out requests of callbacks. Returns True if the run ends here."""
        due = self.run.due(self.steps_run)
        self.result.stopped = stops = "stop" in due and done < self.run.last
        if stops:
            self.run.end_at(done)
        if "save" in due or stops:
            self.saves.save(last=stops)
        return stops

    def already_done(self) -> None:
        """The last step was saved before: prints this, loads the metrics, and evaluates again."""
        done, total = self.session.start, self.experiment.steps
        description = (
            f"all {done} steps" if done == total else f"the {done} steps asked for, of {total},"
        )
        self.tell(f"{description} are done")
        if self.result.run_dir is not None:
            self.readings.read_again(read_metrics(self.result.run_dir))
            ends = self.session.start == self.experiment.steps
            share_failure(partial(self.readings.refuse_skipping, ends=ends))
        if self.experiment.evaluation is not None:
            self.run_evaluation(self.session.start)

    def run_evaluation(self, step: int) -> None:
        """Evaluates with the clock stopped; the values join the metrics of `step`."""
        evaluation = self.experiment.evaluation
        assert evaluation is not None
        self.readings.flush()
        with self.rates.paused(), self.phases.within("evaluate"):
            final = step >= self.run.last
            batches = evaluation.final_batches if final else evaluation.batches
            values = self.session.evaluate(self.session.state, batches=batches)
        if "eval_loss" not in values:
            self.tell(
                "NOTE no token of the held-out rows has a weight above 0: there is no eval_loss"
            )
        self.readings.history.add_evaluation(step, values)
        self.result.evaluation, self.saves.evaluated_at = values, step
        self.hooks.tell("after_evaluation", step, MappingProxyType(values))

    def close(self) -> None:
        self.pace.close()
        self.requests.close()
        self.uninterrupted.close()
        self.hooks.close()
