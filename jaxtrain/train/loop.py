"""The training loop: batch, step, metrics one step late, evaluation, checkpoints."""

from __future__ import annotations

import io
import math
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import jax

from jaxtrain.checkpoint.run_config import refuse_other_experiment
from jaxtrain.checkpoint.run_lock import refuse_held, sole_run
from jaxtrain.checkpoint.tiers import Checkpoints
from jaxtrain.data import TextData, reference_bits
from jaxtrain.experiment import (
    RESUMABLE,
    Experiment,
    completed,
    config_of,
    load_experiment,
    with_fields,
)
from jaxtrain.files.stores import local_path
from jaxtrain.mesh.mesh import MeshSpec, load_mesh
from jaxtrain.telemetry.metrics import (
    DelayedMetrics,
    MetricsWriter,
    read_metrics,
    refuse_unusable,
)
from jaxtrain.telemetry.profiler import Profiler
from jaxtrain.telemetry.progress import Progress
from jaxtrain.train.generate import generate
from jaxtrain.train.loading import record_run
from jaxtrain.train.natural import natural_shapes
from jaxtrain.train.rates import Rates
from jaxtrain.train.run_directory import refuse_fewer_steps
from jaxtrain.train.saving import Saving, checkpoints_of
from jaxtrain.train.session import CACHE_DIR, Session, open_session

SKIPPED_AT_MOST = 20
"""So many steps skipped in a row, not counting those that look for a loss scale, end a run: the
parameters have not moved since, and nothing says that they will."""


@dataclass
class Result:
    """What a run gives back. `stopped`: it was asked to stop before its last step. `saved`: the
    step it can go on from, None when nothing was saved."""

    experiment: Experiment
    steps: int
    run_dir: Path | None
    history: list[dict[str, Any]] = field(default_factory=list)
    evaluation: dict[str, float] = field(default_factory=dict)
    sample: str | None = None
    stopped: bool = False
    saved: int | None = None
    session: Session | None = field(default=None, repr=False)

    @property
    def loss(self) -> float:
        return self.history[-1]["loss"] if self.history else float("nan")


def train(
    experiment: Experiment | str | Path,
    mesh: MeshSpec | str | Path,
    *,
    run_dir: str | Path | None = None,
    steps: int | None = None,
    settings: list[str] | None = None,
    cache_dir: str | Path = CACHE_DIR,
    stream: TextIO | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Result:
    """Train, or go on with what is in `run_dir`.

    steps: stop after so many of the experiment's steps (its schedules keep their length). settings:
    `path=value` overrides. should_stop is asked after every step; when it says so, or on
    KeyboardInterrupt or an error, the state is saved first (what was raised is then raised again).
    run_dir=None keeps everything in memory.

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
    last = experiment.steps if steps is None else steps
    if not 1 <= last <= experiment.steps:
        raise ValueError(
            f"steps={last}; a run takes at least 1 step and at most experiment.steps="
            f"{experiment.steps}, for which its schedules are made; use steps="
            f"{max(1, min(last, experiment.steps))}, or another experiment.steps in a new run"
        )
    config, process = {"experiment": config_of(experiment)}, jax.process_index()
    if run is not None:
        if process == 0:  # the others of this run come when it is already held
            refuse_held(run)
        known = partial(completed, experiment=experiment)
        refuse_other_experiment(run, config, ignore=RESUMABLE, completed=known)
        refuse_unusable(run, tensorboard=experiment.logging.tensorboard, process=process)
    elif experiment.logging.profile is not None:
        raise ValueError("logging.profile writes a trace into the run directory; give a run_dir")
    policy = experiment.checkpoints
    saves = checkpoints_of(run, policy, spec) if run and policy else None
    with ExitStack() as stack:
        if saves is not None:
            stack.callback(saves.close)
            refuse_fewer_steps(saves.directory.parent, saves.newest_whole(), last)
        session = open_session(experiment, spec, cache_dir=cache, checkpoints=saves, held_out=True)
        stack.callback(session.close)
        if run is not None and process == 0:
            stack.enter_context(sole_run(run))
            record_run(run, config, session.dataset)
        output = (stream or sys.stdout) if process == 0 else io.StringIO()
        loop = _Loop(session, run, saves, output, should_stop)
        stack.callback(loop.close)
        return loop.run(last)


class _Loop:
    def __init__(
        self,
        session: Session,
        run_dir: Path | None,
        saves: Checkpoints | None,
        stream: TextIO,
        should_stop: Callable[[], bool],
    ) -> None:
        e = session.experiment
        self.session, self.should_stop = session, should_stop
        self.saving = Saving(saves, session, self.tell) if saves else None
        self.result = Result(e, session.start, run_dir, session=session)
        self.stream = stream
        self.delayed = DelayedMetrics()
        self.rates = Rates(session.assembly)
        self.profiler = Profiler(e.logging.profile, run_dir or Path("."))
        self.writer: MetricsWriter | None = None
        if run_dir is not None:
            self.writer = MetricsWriter(
                run_dir,
                start=session.start + 1,
                tensorboard=e.logging.tensorboard,
                process=jax.process_index(),
            )
        self.skipped = int(session.state.skipped)
        self.skipped_in_a_row = 0
        self.tripped = session.guard.tripped
        self.waited = 0.0

    def run(self, steps: int) -> Result:
        session, e = self.session, self.session.experiment
        self.last = steps
        self.progress = Progress(steps, session.start, self.stream, e.logging.every)
        if self.saving:
            self.saving.begin()
        self.progress.message(self.headline(steps))
        try:
            self.loop(steps)
        except KeyboardInterrupt:
            self.interrupted()
            raise
        except Exception as error:
            self.failed(error)
            raise
        if not self.result.stopped:
            if session.start == steps:
                self.already_done()
            self.finish()
        return self.result

    def already_done(self) -> None:
        """The last step was saved before: tell what the run reached, and evaluate again."""
        done, whole = self.session.start, self.experiment.steps
        asked = f"all {done} steps" if done == whole else f"the {done} steps asked for, of {whole},"
        self.progress.message(f"{asked} are done")
        run_dir = self.result.run_dir
        self.result.history = read_metrics(run_dir) if run_dir is not None else []
        if self.experiment.evaluation is not None:
            self.run_evaluation(self.session.start)

    def headline(self, steps: int) -> str:
        session = self.session
        parameters = sum(leaf.size for leaf in natural_shapes(session.assembly).params.values())
        sizes = " x ".join(f"{a}={n}" for a, n in session.assembly.sizes.items()) or "one device"
        begin = f"resuming at step {session.start}, " if session.start else session.beginning
        return (
            f"{begin}{parameters / 1e6:.1f}M parameters on {sizes} ({session.assembly.mode}), "
            f"{steps} steps, compiled in {session.compile_s:.1f}s"
        )

    def loop(self, steps: int) -> None:
        session, e = self.session, self.session.experiment
        metrics: dict[str, Any] = {}
        for step in range(session.start, steps):
            at, batch = session.loader.next()
            assert at == step, f"the loader gave the batch of step {at} for step {step}"
            self.profiler.before(step, metrics)
            metrics = session.step(batch)
            self.profiler.after(step, metrics)
            done = self.result.steps = step + 1
            self.log(self.delayed.push(done, metrics))
            self.refuse_skipping()
            evaluates = e.evaluation and (done % e.evaluation.every == 0 or done == steps)
            tier = self.saving and self.saving.due(done)
            rated = self.saving and self.saving.rated
            if evaluates and rated:
                self.run_evaluation(done)
                tier = "durable"
            if tier or done == steps:
                self.save(last=done == steps, durable=tier != "local")
            if evaluates and not rated:
                self.run_evaluation(done)
            if self.should_stop() and done < steps:
                self.save(last=True)
                self.ended = self.result.stopped = True
                break
        self.log(self.delayed.flush())
        self.refuse_skipping()

    def refuse_skipping(self) -> None:
        if self.skipped_in_a_row < SKIPPED_AT_MOST:
            return
        last, scaled = self.result.history[-1], self.experiment.precision.loss_scale is not None
        least = ", at the least loss scale" if scaled else ""
        raise ValueError(
            f"the gradients of {self.skipped_in_a_row} steps in a row, up to step {last['step']}, "
            f"were not finite{least} (learning rate {last['learning_rate']:.3g}, loss "
            f"{last['loss']:.3g}); each was skipped, so the parameters are those before them; use "
            f"a lower learning rate, a longer warmup or clip_norm=1.0{', or bf16' * scaled}, or "
            "look in the model and its data for values that are not finite"
        )

    def count_skipped(self, values: dict[str, Any]) -> None:
        """Steps skipped in a row; one that only lowers the loss scale is not counted."""
        scale, skipped = self.experiment.precision.loss_scale, int(values["skipped"])
        if skipped == self.skipped:
            self.skipped_in_a_row = 0
        elif scale is None or scale.factor == 1 or values["loss_scale"] <= scale.minimum:
            self.skipped_in_a_row += 1
        self.skipped = skipped

    def run_evaluation(self, step: int) -> None:
        """Evaluate with the clock stopped; the values join the metrics of `step`."""
        evaluation = self.experiment.evaluation
        assert evaluation is not None
        self.log(self.delayed.flush(), hold=True)
        with self.rates.paused():
            final = step >= self.last
            batches = evaluation.final_batches if final else evaluation.batches
            values = self.session.evaluate(self.session.state, batches=batches)
        self.result.evaluation, self.evaluated_at = values, step
        text = " ".join(f"{name} {value:.4f}" for name, value in values.items())
        self.progress.message(f"step {step} {text}")
        self.write_held(values)

    def write_held(self, values: dict[str, float]) -> None:
        held, self.held = self.held, None
        if held is not None:
            self.write(held[0], {**held[1], **values})

    @property
    def experiment(self) -> Experiment:
        return self.session.experiment

    evaluated_at: int | None = None
    held: tuple[int, dict[str, Any]] | None = None
    ended = False
    """Whether `result.steps` is the last step that this start takes."""

    def log(self, found: tuple[int, dict[str, Any]] | None, *, hold: bool = False) -> None:
        """Metrics of a step that is finished, to the history, the screen and, when due, files."""
        if found is None:
            return
        step, values = found
        self.count_skipped(values)
        waited, self.waited = self.session.loader.wait_s - self.waited, self.session.loader.wait_s
        values = {**values, **self.rates.of(step), "data_s": waited}
        self.result.history.append({"step": step, **values})
        self.progress.update(step, values)
        self.tell_trip(values)
        ends = (self.session.start + 1, self.result.steps if self.ended else self.last)
        if hold:
            self.held = (step, values)
        elif step % self.experiment.logging.every == 0 or step in ends:
            self.write(step, values)

    def tell_trip(self, values: dict[str, Any]) -> None:
        """Once; steps are counted from 0 in the metric and from 1 in what is told. The step after
        the one that was sampled was already on its way."""
        tripped = int(values.get("guard_tripped", -1))
        if tripped < 0 or self.tripped >= 0:
            return
        self.tripped = tripped
        error, cosine = (values.get(f"reducer_{name}", math.nan) for name in ("error", "cosine"))
        self.progress.message(
            f"step {tripped + 1} compressed sums are beyond the guard's bounds (error {error:.3g}, "
            f"cosine {cosine:.3g}): sums are exact from step {tripped + 3} on"
        )

    def write(self, step: int, values: dict[str, Any]) -> None:
        if self.writer is None:
            return
        try:
            self.writer.write(step, values)
        except OSError as error:  # a full disk; the run is worth more than its log
            self.tell(f"NOT LOGGED step {step}: {error}; the run goes on")

    def tell(self, text: str) -> None:
        self.progress.message(text)

    def save(self, *, last: bool, durable: bool = True) -> None:
        """last: nothing comes after it. Then it raises CheckpointError, which is told otherwise."""
        if self.saving is None:
            return
        jax.block_until_ready(self.session.state)  # the step's time is its own, not the save's
        with self.rates.paused():
            step, metrics = self.result.steps, self.evaluated(self.result.steps)
            if last:
                self.saving.save_last(step, metrics)
            else:
                self.saving.save(step, metrics, durable=durable)
        if last:
            self.result.saved = self.result.steps

    def evaluated(self, step: int) -> dict[str, float]:
        """What an evaluation after `step` found, for `Best`; {} where none was like the others."""
        e = self.experiment.evaluation
        alike = e is not None and (step < self.last or e.final_batches == e.batches)
        return self.result.evaluation if alike and self.evaluated_at == step else {}

    def interrupted(self, word: str = "interrupted") -> None:
        """Save what is whole: the state after the last finished step."""
        if self.saving is None:
            self.progress.message(f"{word}; nothing is saved without checkpoints in a run_dir")
            return
        if not self.session.alive():
            latest = self.saving.manager.latest()
            self.progress.message(f"the last step failed; the newest save is {latest}")
            return
        self.result.steps = int(self.session.state.step)
        self.save(last=True)
        self.progress.message(f"{word}; saved step {self.result.steps}")
        self.ended = True
        self.log(self.delayed.flush())
        self.write_held({})

    def failed(self, error: Exception) -> None:
        """As for an interrupt; what else fails then is noted on the error that came first."""
        try:
            self.interrupted("failed")
        except Exception as second:
            error.add_note(f"saving what was reached failed too: {second}")

    def finish(self) -> None:
        """The last words: what was reached against reference compressors, and a sample."""
        e, say = self.experiment, self.progress.message
        reached = self.result.evaluation.get("bits_per_byte")
        if reached is not None and isinstance(e.data, TextData) and e.data.has_text:
            bits = reference_bits(e.data)
            self.result.evaluation |= bits
            unigram, bigram = bits["unigram_bits_per_byte"], bits["bigram_bits_per_byte"]
            say(
                f"held-out {reached:.3f} bits per byte = {reached / unigram:.0%} of the unigram "
                f"entropy {unigram:.3f}; an interpolated bigram model reaches {bigram:.3f}"
            )
        if e.sample is not None and self.session.assembly.built_in:
            self.result.sample = self.sampled()
            say(f"--- {e.sample.tokens} tokens at temperature {e.sample.temperature}")
            say(self.result.sample)

    def sampled(self) -> str:
        sample = self.experiment.sample
        assert sample is not None
        return sample.prompt + generate(
            self.session,
            sample.prompt,
            tokens=sample.tokens,
            temperature=sample.temperature,
            seed=self.experiment.seed,
        )

    def close(self) -> None:
        self.profiler.close()
        if hasattr(self, "progress"):
            self.progress.close()
        if self.writer is not None:
            self.writer.close()
