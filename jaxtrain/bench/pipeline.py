"""`bench pipeline`: seconds a step of every schedule, compared with the prediction from its table.

In lock-step a masked tick also computes, so a step lasts as long as its table costs
(`pipeline.analysis.cost`) and what each schedule does once: buffers between ticks, the sum of
gradients, the optimizer's update. Each of these is measured alone (`pipeline_costs`), and no
prediction uses a step's time. Neither includes the first tick's memory allocation. Costs and steps
take turns in one process, one program at a time, so that other work of the machine affects all
alike. On simulated devices, which share the machine's cores.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.arrays import Leaves
from jaxtrain.attention.rotary.rope import Rope
from jaxtrain.bench.pipeline_costs import runs_of, ticks_of, without_ticks
from jaxtrain.data import BigramChain
from jaxtrain.data.batch_size import row_numbers
from jaxtrain.experiment import Experiment
from jaxtrain.files.cache import cache_directory
from jaxtrain.mesh.axes import STAGE
from jaxtrain.mesh.mesh import make_mesh, mesh_from_axes
from jaxtrain.optim.optimizer import AdamW
from jaxtrain.pipeline.analysis import bubble, cost
from jaxtrain.pipeline.config import Pipeline
from jaxtrain.pipeline.schedule import Costs, Schedule
from jaxtrain.session.first_state import initialise
from jaxtrain.session.rows import open_split
from jaxtrain.step.assembly import Assembly, active_mesh, assemble
from jaxtrain.step.batches import fields_of
from jaxtrain.step.state import shardings
from jaxtrain.step.train_step import compile_step
from jaxtrain.transformer.attention import AttentionConfig
from jaxtrain.transformer.block import BlockConfig
from jaxtrain.transformer.decoder import DecoderConfig
from jaxtrain.transformer.feed_forward import MlpConfig
from jaxtrain.violations import at_least, count, raise_violations

PIPELINES = (
    Pipeline("one_f_one_b"),
    Pipeline("gpipe"),
    Pipeline("interleaved", chunks=2),
    Pipeline("zero_bubble"),
)
MEASURED_AT = 8
"""Microbatches at which costs, and the time of what is done once, are measured."""
PREDICTED = (2, 32)
ROUNDS = 5
WINDOW = 2.0
"""Seconds for which a program is repeated in its turn. The quickest single run favours short
programs: the sum of their minima is less than the minimum of one long program."""
BOUND = 0.15
"""Larger errors of predictions are marked."""
LEGEND = f"""\
M: microbatches. Cost: of the table's ticks and M heads, in units of F; bubble: its share that is
idle. Once: buffers, the sum of gradients, the update. Predicted: cost and once. Spread: by how much
the slowest round exceeds the quickest; schedules that are no further apart are not told apart.
Error: below 0 a step is slower than predicted; !: off by more than {BOUND:.0%}."""
PASSES = (1, 4)
"""Passes of a program of costs over its tables. The difference of both times is ticks alone,
without what is done once."""

CompiledCall = Callable[[], Any]
PipelineKey = tuple[Pipeline, int]
"""A step: its schedule and its microbatches."""
ONCE = "once"


def benchmark(stages: int) -> Experiment:
    """Returns four layers a stage, so wide that their arithmetic outweighs the other work of a
    tick. `batch` is one microbatch."""
    block = BlockConfig(AttentionConfig(heads=4, rope=Rope(1e4)), MlpConfig(hidden=768))
    return Experiment(
        model=DecoderConfig(vocab=2048, embed=256, layers=4 * stages, period=(block,)),
        data=BigramChain(vocab=2048, seq=128),
        optimizer=AdamW(1e-3),
        steps=100,
        batch=2,
        evaluation=None,
        checkpoints=None,
    )


# Programs


@dataclass(eq=False)
class _Machine:
    """Runs programs on a mesh of stages.

    experiment: with a microbatch as its batch. states: by number of chunks, the train state that
    its programs pass to one another.
    """

    experiment: Experiment
    stages: int
    states: dict[int, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        e, self.spec = self.experiment, mesh_from_axes(stage=self.stages)
        self.dataset = open_split(e, "train", cache_directory())
        self.fields = fields_of(self.dataset, e.data)
        self.mesh = active_mesh(make_mesh(self.spec), {STAGE: self.stages})

    def assemble(self, pipeline: Pipeline, microbatches: int) -> Assembly:
        e = self.experiment
        execution = replace(e.execution, pipeline=pipeline)
        assert isinstance(e.batch, int), "the rows of one microbatch do not change"
        batch = microbatches * e.batch
        e = replace(e, execution=execution, microbatches=microbatches, batch=batch)
        return assemble(e, self.spec, self.fields)

    def step(self, assembly: Assembly) -> CompiledCall:
        """Returns the train step as `train` runs it."""
        state_shardings = shardings(assembly.abstract, assembly.splits, self.mesh)
        program = compile_step(assembly, self.mesh, state_shardings)
        chunks, batch = assembly.on_stages.layout.chunks, self._batch(assembly)
        if chunks not in self.states:
            self.states[chunks] = jax.block_until_ready(initialise(assembly, state_shardings))

        def run() -> Any:
            self.states[chunks], metrics = program(self.states[chunks], batch)
            return self.states[chunks], metrics

        return run

    def ticks(self, assembly: Assembly, kind: str) -> dict[int, CompiledCall]:
        """Returns `ticks_of` by its passes, with the parameters of a step with as many chunks,
        which must run first."""
        chunks, batch = assembly.on_stages.layout.chunks, self._batch(assembly)
        program = jax.jit(ticks_of(assembly, self.mesh, kind))
        lowered = program.lower(self.states[chunks].params, batch, jnp.int32(1))
        compiled = lowered.compile(compiler_options=assembly.compiler_options or None)

        def following(passes: int) -> CompiledCall:
            times = jnp.int32(passes)
            return lambda: compiled(self.states[chunks].params, batch, times)

        return {passes: following(passes) for passes in PASSES}

    def _batch(self, assembly: Assembly) -> Leaves:
        e = assembly.experiment
        placed = assembly.placed(self.dataset, self.mesh, e.microbatches)
        return placed.rows(row_numbers(e.batch)(0))


@dataclass(frozen=True)
class ScheduleRow:
    """A schedule at a number of microbatches.

    cost: in forward passes of a stage, head included. once_s: what is done once, as measured with
    `PipelineReport.measured_at`. measured_s: the quickest round's mean; spread: between the rounds'
    fastest and slowest, over it.
    """

    schedule: str
    chunks: int
    microbatches: int
    ticks: int
    cost: float
    bubble: float
    once_s: float
    predicted_s: float
    measured_s: float
    spread: float

    @property
    def error(self) -> float:
        """predicted / measured - 1. Below 0: the step takes longer than predicted."""
        return self.predicted_s / self.measured_s - 1

    def line(self) -> str:
        mark = " !" if abs(self.error) > BOUND else ""
        return (
            f"{self.schedule:<12} {self.microbatches:>3} {self.ticks:>5} {self.cost:>9.2f} "
            f"{self.bubble:>7.1%} {self.once_s:>6.3f} {self.predicted_s:>11.3f} "
            f"{self.measured_s:>10.3f} "
            f"{self.spread:>7.1%} {self.error:>+7.1%}{mark}"
        )


@dataclass(frozen=True)
class PipelineReport:
    """Predicted and measured step times of schedules. costs: seconds of a stage's work on one
    microbatch, as measured in programs of `measured_at` microbatches."""

    what: str
    stages: int
    measured_at: int
    costs: Costs
    rows: tuple[ScheduleRow, ...]

    @property
    def worst(self) -> float:
        return max(abs(row.error) for row in self.rows)

    def as_json(self) -> dict[str, Any]:
        costs = {f"{name}_s": seconds for name, seconds in vars(self.costs).items()}
        return {
            **{"what": self.what, "stages": self.stages, "measured_at": self.measured_at, **costs},
            **{"bound": BOUND, "worst_error": self.worst},
            "rows": [{**vars(row), "error": row.error} for row in self.rows],
        }

    def table(self) -> str:
        c, ms = self.costs, 1e3
        head = (
            f"{'schedule':<12} {'M':>3} {'ticks':>5} {'cost in F':>9} {'bubble':>7} "
            f"{'once s':>6} {'predicted s':>11} {'measured s':>10} {'spread':>7} {'error':>7}"
        )
        assert c.whole is not None, "it was measured"
        within = sum(abs(row.error) <= BOUND for row in self.rows)
        return "\n".join(
            [
                self.what,
                f"measured at M={self.measured_at}, ms a stage and microbatch: F "
                f"{c.forward * ms:.2f}, B {c.whole * ms:.2f}; split: B {c.backward * ms:.2f}, W "
                f"{c.weight * ms:.2f}; head, with embedding, {c.head * ms:.2f}",
                head,
                *(row.line() for row in self.rows),
                f"{within} of {len(self.rows)} predictions within {BOUND:.0%}, the worst off by "
                f"{self.worst:.2%}",
                LEGEND,
            ]
        )


def bench_pipeline(
    stages: int = 2,
    *,
    experiment: Experiment | None = None,
    measured_at: int = MEASURED_AT,
    microbatches: tuple[int, ...] = PREDICTED,
    rounds: int = ROUNDS,
    window: float = WINDOW,
    progress: Callable[[str], None] = lambda text: None,
) -> PipelineReport:
    """Predicts and times the step of all of PIPELINES on `stages` simulated devices.

    experiment: with one microbatch as its batch; None: `benchmark`. measured_at: microbatches at
    which costs are measured; microbatches: those of the steps. rounds: in each, every program runs
    once, then for `window` seconds, which are timed. progress: called with a line for each action.

    Raises ValueError before anything is compiled: for fewer than 2 stages or rounds (a spread is
    between two), nothing to predict, invalid numbers, an experiment that does not fit, or a process
    with fewer devices.
    """
    violations = count("stages", stages, 2) + count("measured_at", measured_at, 1)
    violations += count("rounds", rounds, 2) + at_least("window", window, 0)
    violations += [
        violation
        for i, m in enumerate(microbatches)
        for violation in count(f"microbatches[{i}]", m, 1)
    ]
    violations += (
        [] if microbatches else ["microbatches is empty; name at least one number, such as 2"]
    )
    violations += _experiment_violations(experiment) if experiment is not None else []
    raise_violations(violations, "bench pipeline")
    e = experiment or benchmark(stages)
    machine, started = _Machine(e, stages), time.perf_counter()

    def report(text: str) -> None:
        progress(f"{time.perf_counter() - started:>5.0f} s  {text}")

    steps = {(p, m): machine.assemble(p, m) for m in microbatches for p in PIPELINES}
    measured = {p: machine.assemble(p, measured_at) for p in PIPELINES}
    fused, split = measured[PIPELINES[0]], measured[PIPELINES[-1]]
    works = {
        **{"forward": (fused, "F"), "whole": (fused, "B"), "head": (fused, "head")},
        **{"backward": (split, "B"), "weight": (split, "W")},
    }
    programs = _compile_programs(machine, steps, measured, works, report)
    seconds = take_turns(programs, rounds, window, report)
    return report_of(
        _describe(e, rounds, window),
        {
            name: runs_of(assembly.on_stages.schedule, kind)
            for name, (assembly, kind) in works.items()
        },
        {key: assembly.on_stages.schedule for key, assembly in steps.items()},
        measured_at,
        seconds,
    )


def _experiment_violations(e: Experiment) -> list[str]:
    violations = []
    if not isinstance(e.batch, int):
        violations.append(
            f"experiment.batch={e.batch!r} must be a number, the rows of a microbatch"
        )
    if e.microbatches != 1:
        violations.append(
            f"experiment.microbatches={e.microbatches} must be 1; steps have more of them"
        )
    return violations


def _compile_programs(
    machine: _Machine,
    steps: Mapping[PipelineKey, Assembly],
    measured: Mapping[Pipeline, Assembly],
    works: Mapping[str, tuple[Assembly, str]],
    report: Callable[[str], None],
) -> dict[Any, CompiledCall]:
    """Returns programs by the keys of `report_of`'s seconds."""
    programs: dict[Any, CompiledCall] = {}
    for (pipeline, microbatches), assembly in steps.items():
        report(f"compiling the step of {pipeline.schedule}, M={microbatches}")
        programs[pipeline, microbatches] = machine.step(assembly)
    for pipeline, assembly in measured.items():
        report(f"compiling what a step of {pipeline.schedule} does once")
        programs[pipeline, ONCE] = machine.step(without_ticks(assembly))
    for name, (assembly, kind) in works.items():
        report(f"compiling {kind} of {assembly.on_stages.schedule.kind}")
        ticks = machine.ticks(assembly, kind)
        programs |= {(name, passes): program for passes, program in ticks.items()}
    return programs


def _describe(e: Experiment, rounds: int, window: float) -> str:
    model, load = e.model, os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    return (
        f"{model.layers} layers, embed {model.embed}, vocabulary {model.vocab}, {e.batch} x "
        f"{e.data.seq} tokens a microbatch; quickest of {rounds} rounds of {window:g} s a program; "
        f"{os.cpu_count()} cores, load at the end {load:.1f}"
    )


def take_turns(
    programs: Mapping[Any, CompiledCall], rounds: int, window: float, report: Callable[[str], None]
) -> dict[Any, list[float]]:
    """Returns the seconds of each program in each round: the mean of as many runs as fill `window`
    seconds. One program runs at a time: two would wait for each other's collectives forever.
    Another is first in each round."""
    names, seconds = list(programs), {name: list[float]() for name in programs}
    for turn in range(rounds):
        report(f"round {turn + 1} of {rounds}: {len(names)} programs")
        first = turn * len(names) // rounds
        for name in [*names[first:], *names[:first]]:
            seconds[name].append(_mean_seconds(programs[name], window))
    return seconds


def _mean_seconds(program: CompiledCall, window: float) -> float:
    """Returns the mean of the runs that fill a window, after one run that allocates memory."""

    def seconds(runs: int) -> float:
        began = time.perf_counter()
        for _ in range(runs):
            jax.block_until_ready(program())
        return time.perf_counter() - began

    runs = max(1, math.ceil(window / seconds(1)))
    return seconds(runs) / runs


def report_of(
    description: str,
    counts: Mapping[str, int],
    schedules: Mapping[PipelineKey, Schedule],
    measured_at: int,
    seconds: Mapping[Any, list[float]],
) -> PipelineReport:
    """Returns the report of times.

    seconds: of steps by `schedules`' keys, of costs by (field of `Costs`, passes), and of steps
    without ticks. counts: how often one pass does each work.
    """
    best = {name: min(rounds) for name, rounds in seconds.items()}
    few, many = PASSES
    measured = {}
    for name, times in counts.items():
        longer = best[name, many] - best[name, few]
        # A tiny difference can be below 0 when the machine has other work.
        measured[name] = max(1e-9, longer / (many - few) / times)
    costs = Costs(**measured)

    def row(key: PipelineKey) -> ScheduleRow:
        (pipeline, microbatches), schedule = key, schedules[key]
        table, once = cost(schedule, costs), best[pipeline, ONCE]
        return ScheduleRow(
            pipeline.schedule, pipeline.chunks, microbatches, schedule.ticks,
            table / costs.forward, bubble(schedule, costs), once,
            table + once, best[key], (max(seconds[key]) - min(seconds[key])) / best[key],
        )  # fmt: skip

    stages = next(iter(schedules.values())).stages
    return PipelineReport(description, stages, measured_at, costs, tuple(map(row, schedules)))
