"""The training loop: batch, step, metrics one step late, evaluation, checkpoints."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import jax

from jaxtrain.checkpoint.exchange import together
from jaxtrain.checkpoint.tiers import Checkpoints
from jaxtrain.data import TextData, reference_bits
from jaxtrain.experiment import Experiment, config_of, load_experiment, with_fields
from jaxtrain.files.stores import local_path
from jaxtrain.mesh.mesh import MeshSpec, load_mesh
from jaxtrain.run.directory import RunDirectory, refuse_fewer_steps, refuse_unfit
from jaxtrain.run.log import RunLog
from jaxtrain.run.saving import Saving, checkpoints_of
from jaxtrain.run.session import CACHE_DIR, Session, open_session
from jaxtrain.run.shielded import Shielded
from jaxtrain.step.layer_order import natural_shapes
from jaxtrain.telemetry.metrics import read_metrics
from jaxtrain.telemetry.profiler import Profiler
from jaxtrain.weights.generate import generate


@dataclass
class Result:
    """What a run gives back. `history`: a line of metrics for each step that this start took, of
    long runs every so many (see `History`); all that was logged is in metrics.jsonl. `stopped`: it
    was asked to stop before its last step. `saved`: the step it can go on from, None when nothing
    was saved. `experiment`: as it was run, with the settings applied. `steps`: that are done in
    all. `run_dir`: where it is kept, None for memory alone. `evaluation`: the last held-out
    metrics. `sample`: the text drawn at the end. `session`: the state, the dataset and the compiled
    step, for `generate` and notebooks."""

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

    experiment: one, or the path of its file. mesh: one, the path of its file, or the name of one
    that comes with jaxtrain ("cpu_8"). cache_dir: where tokens and indices of the data are kept
    between runs. stream: what is told goes there, to the standard output where it is None.
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
    config = {"experiment": config_of(experiment)}
    if run is not None:
        refuse_unfit(run, config, experiment)
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
        first, directory = jax.process_index() == 0, None
        if run is not None and first:
            directory = RunDirectory(run, config, session.dataset)
            stack.callback(directory.close)
        log = RunLog(session, run, (stream or sys.stdout) if first else io.StringIO(), last)
        stack.callback(log.close)
        loop = _Loop(session, log, saves, directory, should_stop)
        stack.callback(loop.close)
        return loop.run()


class _Loop:
    def __init__(
        self,
        session: Session,
        log: RunLog,
        saves: Checkpoints | None,
        directory: RunDirectory | None,
        should_stop: Callable[[], bool],
    ) -> None:
        self.session, self.log, self.directory = session, log, directory
        self.should_stop = should_stop
        self.saving = Saving(saves, session, log.tell) if saves else None
        self.shielded = Shielded()
        self.result = Result(session.experiment, session.start, log.run_dir, session=session)
        self.result.history = log.history.lines
        self.profiler = Profiler(session.experiment.logging.profile, log.run_dir or Path("."))
        self.evaluated_at: int | None = None

    @property
    def experiment(self) -> Experiment:
        return self.session.experiment

    @property
    def last(self) -> int:
        return self.log.last

    def run(self) -> Result:
        if self.saving:
            self.shielded(self.saving.begin)
        self.log.tell(self.headline())
        try:
            self.loop()
        except KeyboardInterrupt:
            self.shielded.to_the_end(self.leave, "interrupted")
            raise
        except Exception as error:
            self.shielded.to_the_end(self.failed, error)
            raise
        if not self.result.stopped:
            if self.session.start == self.last:
                self.already_done()
            self.finish()
        return self.result

    def already_done(self) -> None:
        """The last step was saved before: tell what the run reached, and evaluate again."""
        done, whole = self.session.start, self.experiment.steps
        asked = f"all {done} steps" if done == whole else f"the {done} steps asked for, of {whole},"
        self.log.tell(f"{asked} are done")
        if self.result.run_dir is not None:
            for line in read_metrics(self.result.run_dir):
                self.log.history.add(line)
        if self.experiment.evaluation is not None:
            self.run_evaluation(self.session.start)

    def headline(self) -> str:
        session = self.session
        parameters = sum(leaf.size for leaf in natural_shapes(session.assembly).params.values())
        sizes = " x ".join(f"{a}={n}" for a, n in session.assembly.sizes.items()) or "one device"
        begin = f"resuming at step {session.start}, " if session.start else session.beginning
        return (
            f"{begin}{parameters / 1e6:.1f}M parameters on {sizes} ({session.assembly.mode}), "
            f"{self.last} steps, compiled in {session.compile_s:.1f}s"
        )

    def loop(self) -> None:
        session, e, steps = self.session, self.experiment, self.last
        metrics: dict[str, Any] = {}
        for step in range(session.start, steps):
            at, batch = session.loader.next()
            assert at == step, f"the loader gave the batch of step {at} for step {step}"
            self.profiler.before(step, metrics)
            metrics = session.step(batch)
            self.profiler.after(step, metrics)
            done = self.result.steps = step + 1
            self.log.push(done, metrics)
            self.log.refuse_skipping()
            evaluates = e.evaluation and (done % e.evaluation.every == 0 or done == steps)
            tier = self.saving and self.shielded(self.saving.due, done)
            rated = self.saving and self.saving.rated
            if evaluates and rated:
                self.run_evaluation(done)
                tier = "durable"
            if tier or done == steps:
                self.shielded(self.save, done == steps, tier != "local")
            if evaluates and not rated:
                self.run_evaluation(done)
            if self.should_stop() and done < steps:
                self.shielded(self.save, True)
                self.log.last, self.result.stopped = done, True
                break
        self.log.flush()
        self.log.refuse_skipping()

    def run_evaluation(self, step: int) -> None:
        """Evaluate with the clock stopped; the values join the metrics of `step`."""
        evaluation = self.experiment.evaluation
        assert evaluation is not None
        self.log.hold()
        with self.log.rates.paused():
            final = step >= self.last
            batches = evaluation.final_batches if final else evaluation.batches
            values = self.session.evaluate(self.session.state, batches=batches)
        self.result.evaluation, self.evaluated_at = values, step
        text = " ".join(f"{name} {value:.4f}" for name, value in values.items())
        self.log.tell(f"step {step} {text}")
        self.log.evaluated(values)

    def save(self, last: bool, durable: bool = True) -> None:
        """last: nothing comes after it. Then it raises what is told otherwise: CheckpointError, and
        ValueError where the run directory is gone and cannot be written again."""
        if self.saving is None:
            return
        jax.block_until_ready(self.session.state)  # the step's time is its own, not the save's
        with self.log.rates.paused():
            step, metrics = self.result.steps, self.evaluated(self.result.steps)
            if not self.mended(last):
                self.saving.manager.put_off(step, durable=durable)
                return
            if last:
                self.saving.save_last(step, metrics)
            else:
                self.saving.save(step, metrics, durable=durable)
        if last:
            self.result.saved = self.result.steps

    def mended(self, last: bool) -> bool:
        """Whether the run directory is there to save in, and can be gone on from: the same on every
        process, for they all wait for each other in a save."""
        try:
            together(self.write_again)
        except (OSError, ValueError) as error:
            if last:
                raise
            self.log.tell(f"NOT SAVED step {self.result.steps}: {error}; the run goes on")
            return False
        return True

    def write_again(self) -> None:
        """What was removed of the run directory. Raises ValueError and OSError."""
        assert self.saving is not None
        found = self.directory.written_again() if self.directory else None
        if found is not None:
            self.saving.manager.name_again()
            self.log.tell(f"NOTE {found}")
            self.log.write_again()

    def evaluated(self, step: int) -> dict[str, float]:
        """What an evaluation after `step` found, for `Best`; {} where none was like the others."""
        e = self.experiment.evaluation
        alike = e is not None and (step < self.last or e.final_batches == e.batches)
        return self.result.evaluation if alike and self.evaluated_at == step else {}

    def leave(self, word: str) -> None:
        """Save what is whole: the state after the last finished step."""
        if self.saving is None:
            self.log.tell(f"{word}; nothing is saved without checkpoints in a run_dir")
            return
        if not self.session.alive():
            latest = self.saving.manager.latest()
            self.log.tell(f"{word}: the last step failed; the newest save is {latest}")
            return
        self.result.steps = self.log.last = int(self.session.state.step)
        self.save(last=True)
        self.log.tell(f"{word}; saved step {self.result.steps}")
        self.log.flush()
        self.log.evaluated({})

    def failed(self, error: Exception) -> None:
        """As for an interrupt; what else fails then is noted on the error that came first."""
        try:
            self.leave("failed")
        except Exception as second:
            error.add_note(f"saving what was reached failed too: {second}")

    def finish(self) -> None:
        """The last words: what was reached against reference compressors, and a sample."""
        e, say = self.experiment, self.log.tell
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
        self.shielded.close()
        self.profiler.close()
