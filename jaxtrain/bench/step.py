"""`bench step`: seconds a step, compared with a plain jax + optax loop of the same model in the
same run.

Each variant and the loop is a process of its own. All are alive at once and take turns, one step at
a time with nothing else running, so that other work of the machine affects all alike.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from jaxtrain.bench.baseline import find_baseline, plain_arguments
from jaxtrain.bench.step_worker import PRECISIONS, arguments_of
from jaxtrain.experiment import Experiment, load_experiment, with_fields
from jaxtrain.mesh.mesh import MeshSpec
from jaxtrain.mesh.simulation import simulation_flags

MODES = ("explicit", "gspmd")
WARMUP = 3
"""Untimed steps after the first."""
LOOP, SAME_ENVIRONMENT = "plain loop", "plain loop in our environment"

ProcessCommand = tuple[Sequence[str], Mapping[str, str]]
"""Python's arguments, and the environment."""


@dataclass(frozen=True)
class Measurement:
    """step_s: median of the timed steps. first_step_s: from process start to the end of the first
    step, nothing cached, no other process at work. peak_bytes: of the device, on CPU of the whole
    process. program_bytes: what the compiled step needs on one device. loss: of the last, nats.
    """

    step_s: float
    compile_s: float
    first_step_s: float
    peak_bytes: int
    program_bytes: int | None
    loss: float


@dataclass(frozen=True)
class Comparison:
    """One way to run the experiment, compared with the plain loop in the same precision.

    baseline: the loop as its user starts it. same_environment: the loop in our process environment,
    huge pages for the heap of a simulated mesh included; the same as `baseline` where the
    environments are equal.
    """

    mode: str
    precision: str
    ours: Measurement
    baseline: Measurement
    same_environment: Measurement

    @property
    def ratio(self) -> float:
        """Our seconds per step divided by those of the plain loop; below 1, ours is faster."""
        return self.ours.step_s / self.baseline.step_s

    @property
    def ratio_same_environment(self) -> float:
        """Our seconds a step over those of the loop in our environment."""
        return self.ours.step_s / self.same_environment.step_s

    def as_json(self) -> dict[str, Any]:
        name = {"mode": self.mode, "precision": self.precision}
        against = {
            "baseline_step_s": self.baseline.step_s,
            "ratio": self.ratio,
            "ratio_same_environment": self.ratio_same_environment,
        }
        return {**name, **asdict(self.ours), **against}


@dataclass(frozen=True)
class BenchReport:
    """own: the (mode, precision) that the experiment itself asks for, one of `comparisons`."""

    mesh: str
    own: tuple[str, str]
    comparisons: tuple[Comparison, ...]

    def as_json(self) -> dict[str, Any]:
        """Returns step_s baseline_step_s ratio compile_s first_step_s peak_bytes loss (and a few
        more) of the experiment's own variant; the same of all under `variants`, the loop's in
        `baselines`."""
        own = next(c for c in self.comparisons if (c.mode, c.precision) == self.own)
        return {
            **own.as_json(),
            "mesh": self.mesh,
            "baselines": {c.precision: asdict(c.baseline) for c in self.comparisons},
            "baselines_same_environment": {
                c.precision: asdict(c.same_environment) for c in self.comparisons
            },
            "variants": [c.as_json() for c in self.comparisons],
        }

    def table(self) -> str:
        """Returns a line for each variant and loop; * marks the experiment's own. ratio: to the
        loop as its user starts it; same env: to the loop in our environment."""
        head = (
            f"{self.mesh:<20} {'step s':>9} {'ratio':>6} {'same env':>8} {'compile s':>9} "
            f"{'first s':>8} {'peak MiB':>9} {'program MiB':>11} {'loss':>7}"
        )
        lines = [head]
        for precision in dict.fromkeys(c.precision for c in self.comparisons):
            comparisons = [c for c in self.comparisons if c.precision == precision]
            loop, same_environment = comparisons[0].baseline, comparisons[0].same_environment
            against = (loop, same_environment)
            lines.append(_line(f"plain loop {precision}", loop, against))
            if same_environment is not loop:
                lines.append(_line(" in our environment", same_environment, against))
            for c in comparisons:
                mark = " *" if (c.mode, c.precision) == self.own else ""
                lines.append(_line(f"{c.mode} {precision}{mark}", c.ours, against))
        return "\n".join(lines)


def _line(name: str, m: Measurement, against: tuple[Measurement, Measurement]) -> str:
    ratio, same = (m.step_s / loop.step_s for loop in against)
    program = "-" if m.program_bytes is None else f"{m.program_bytes / 2**20:.0f}"
    return (
        f"{name:<20} {m.step_s:>9.4f} {ratio:>6.3f} {same:>8.3f} {m.compile_s:>9.2f} "
        f"{m.first_step_s:>8.2f} {m.peak_bytes / 2**20:>9.0f} {program:>11} {m.loss:>7.4f}"
    )


def bench_step(
    experiment: str | Path,
    spec: MeshSpec,
    *,
    steps: int,
    precisions: Sequence[str] = tuple(PRECISIONS),
    baseline: str | Path | None = None,
    settings: Sequence[str] = (),
) -> BenchReport:
    """Measures an experiment file on a mesh: each execution mode in each precision.

    steps: timed steps of each, after `WARMUP` others, every one after an untimed step. baseline:
    the loop's script, None for `baselines/plain_loop.py` next to the experiment. The loop gets the
    experiment's sizes and mesh, but neither the mesh's compiler options nor huge pages, which are
    part of the comparison. On a simulated mesh the loop also runs in our environment. settings:
    other values of the experiment's fields, such as "model.layers=2", for ours and the loop.

    Raises ValueError for an experiment that does not fit the mesh, or that has features which the
    plain loop lacks, each with all violations; RuntimeError, with its last output, when a process
    fails. Runs three or four processes for each precision, alive at once: one accelerator must have
    memory for all of them.
    """
    loaded = with_fields(load_experiment(experiment), settings)
    own = _own(loaded, steps, precisions)
    loop = [str(baseline or find_baseline(experiment)), *plain_arguments(loaded, spec), "--turns"]
    ours, plain = environment(spec, os.environ), plain_environment(spec, os.environ)
    comparisons = []
    for precision in precisions:
        commands: dict[str, ProcessCommand] = {
            mode: (
                arguments_of(experiment, spec, mode=mode, precision=precision, settings=settings),
                ours,
            )
            for mode in MODES
        }
        commands[LOOP] = [*loop, "--dtype", precision], plain
        if plain != ours:
            commands[SAME_ENVIRONMENT] = [*loop, "--dtype", precision], ours
        measured = take_turns(commands, steps=steps)
        loops = measured[LOOP], measured.get(SAME_ENVIRONMENT, measured[LOOP])
        comparisons += [Comparison(mode, precision, measured[mode], *loops) for mode in MODES]
    return BenchReport(Path(spec.where).stem, own, tuple(comparisons))


def _own(experiment: Experiment, steps: int, precisions: Sequence[str]) -> tuple[str, str]:
    """Returns the experiment's own mode and precision. Raises ValueError where they are not
    measured."""
    violations = [] if steps >= 1 else [f"steps={steps}; time at least 1"]
    mode = experiment.execution.mode or "explicit"
    names = [name for name, value in PRECISIONS.items() if value == experiment.precision]
    if not names or names[0] not in precisions:
        violations.append(
            f"precision={experiment.precision} is not one of those measured "
            f"({', '.join(precisions)}); use jaxtrain.fp32 or jaxtrain.bf16"
        )
    if mode not in MODES:
        violations.append(f"execution.mode={mode!r}; the modes are {' and '.join(MODES)}")
    if violations:
        raise ValueError("\n".join(violations))
    return mode, names[0]


def environment(spec: MeshSpec, environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of the processes: the mesh's devices, no compilation cache, memory
    shared."""
    env = {k: v for k, v in environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
    if spec.simulated:
        env |= simulation_flags(spec, environ)
    else:
        # Else the first process takes three quarters of an accelerator's memory from the others.
        env["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    root = str(Path(__file__).parents[2])
    env["PYTHONPATH"] = os.pathsep.join(p for p in (root, environ.get("PYTHONPATH")) if p)
    return env


def plain_environment(spec: MeshSpec, environ: Mapping[str, str]) -> dict[str, str]:
    """Returns `environment` with GLIBC_TUNABLES as the user has it, without jaxtrain's settings of
    malloc."""
    env = environment(spec, environ)
    env.pop("GLIBC_TUNABLES", None)
    tunables = environ.get("GLIBC_TUNABLES")
    return env if tunables is None else env | {"GLIBC_TUNABLES": tunables}


def take_turns(commands: Mapping[str, ProcessCommand], *, steps: int) -> dict[str, Measurement]:
    """Runs Python processes with `step_worker`'s protocol, step by step in turn.

    Each is started when the earlier ones have ended their first step and wait, so it has the
    machine for itself. Another is first in each round. A timed step follows an untimed one.
    """
    with ExitStack() as stack:
        runners = []
        for name, (command, env) in commands.items():
            runners.append(Runner(name, command, env))
            stack.callback(runners[-1].close)
            runners[-1].start()
        for turn in range(WARMUP + steps):
            first = turn % len(runners)
            for runner in [*runners[first:], *runners[:first]]:
                if turn >= WARMUP:  # as in training: fills the caches after the others' steps
                    runner.step(timed=False)
                runner.step(timed=turn >= WARMUP)
        return {runner.name: runner.finish() for runner in runners}


@dataclass
class Runner:
    """A process that runs one step on request, and its measurements."""

    name: str
    command: Sequence[str]
    env: Mapping[str, str]
    seconds: list[float] = field(default_factory=list)

    def start(self) -> None:
        """Starts the process, and waits for the end of the first step."""
        began = time.perf_counter()
        self._errors = tempfile.TemporaryFile(mode="w+")  # noqa: SIM115 (close() closes it)
        self._process: Any = subprocess.Popen(
            [sys.executable, *self.command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=dict(self.env),
        )
        self._facts = self._answer()
        self._first_step_s = time.perf_counter() - began
        self._loss = self._facts["loss"]

    def step(self, *, timed: bool) -> None:
        with suppress(BrokenPipeError):  # it has ended: `_answer` says how
            self._process.stdin.write("step\n")
            self._process.stdin.flush()
        answer = self._answer()
        self._loss = answer["loss"]
        if timed:
            self.seconds.append(answer["step_s"])

    def finish(self) -> Measurement:
        """Asks for the final numbers, and returns the measurement."""
        self._process.stdin.close()
        last = self._answer()
        self._process.wait()
        return Measurement(
            step_s=statistics.median(self.seconds),
            compile_s=self._facts["compile_s"],
            first_step_s=self._first_step_s,
            peak_bytes=last["peak_bytes"],
            program_bytes=last["program_bytes"],
            loss=self._loss,
        )

    def close(self) -> None:
        """Ends the process, whatever it is doing."""
        if not hasattr(self, "_process"):
            return
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            with suppress(BrokenPipeError):
                stream.close()

    def _answer(self) -> dict[str, Any]:
        """Returns the next JSON line; other lines are messages of libraries."""
        for line in self._process.stdout:
            if line.startswith("{"):
                answer = json.loads(line)
                if "refused" in answer:
                    raise ValueError(answer["refused"])
                return answer
        code = self._process.wait()
        self._errors.seek(0)
        last = "\n".join(self._errors.read().splitlines()[-20:])
        raise RuntimeError(f"bench step: the process of {self.name} ended with {code}:\n{last}")
