"""`bench pipeline`: its arithmetic by hand, that its programs do the work, one run of it all."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtrain
from jaxtrain import cli
from jaxtrain.bench import pipeline as bench
from jaxtrain.bench.pipeline import (
    PASSES,
    PIPELINES,
    bench_pipeline,
    report_of,
    take_turns,
)
from jaxtrain.bench.pipeline_costs import only, runs_of, ticks_of, without_ticks
from jaxtrain.experiment import Experiment
from jaxtrain.pipeline.analysis import cost
from jaxtrain.pipeline.schedule import Costs, make_schedule
from jaxtrain.pipeline.slots import training
from jaxtrain.program.collectives import dot_flops
from jaxtrain.step.state import shardings
from jaxtrain.step.train_step import compile_step

ONE, GPIPE, INTERLEAVED, SPLIT = PIPELINES


def schedules(*microbatches: int, stages: int = 2) -> dict[Any, Any]:
    return {
        (p, m): make_schedule(p.schedule, stages, m, p.chunks)
        for m in microbatches
        for p in PIPELINES
    }


# Arithmetic

ONCE = {ONE: 5, GPIPE: 4, INTERLEAVED: 7, SPLIT: 9}


def report(slower: float = 1.0) -> bench.PipelineReport:
    """Of a machine on which F takes 1 s, B 3, a split B 2, W 1.5, the head 0.25, and what is done
    once ONCE; steps of zero_bubble take `slower` times as long."""
    table = schedules(2, 32)
    each = {"forward": 1.0, "whole": 3.0, "backward": 2.0, "weight": 1.5, "head": 0.25}
    counts = dict.fromkeys(each, 9) | {"weight": 8, "head": 8}
    seconds: dict[Any, list[float]] = {}
    for (pipeline, m), _ in table.items():
        by_hand = {
            ONE: 4 * (m + 1),
            GPIPE: 4 * (m + 1),
            INTERLEAVED: 4 * (m + 1 / 2),
            SPLIT: 3 * (m + 1) + 1.5 * m,
        }
        took = by_hand[pipeline] + 0.25 * m + ONCE[pipeline]
        took *= slower if pipeline == SPLIT else 1
        seconds[pipeline, m] = [1.1 * took, took, 2 * took]
        seconds[pipeline, bench.ONCE] = [ONCE[pipeline] + 1, ONCE[pipeline], 3 * ONCE[pipeline]]
    for name, second in each.items():
        for passes in PASSES:
            took = 7 + passes * counts[name] * second
            seconds[name, passes] = [took, took + 100, took]
    return report_of("a machine", counts, table, 8, seconds)


def test_predictions_are_those_made_by_hand() -> None:
    found = report()
    assert found.costs == Costs(1.0, 2.0, 1.5, 0.25, 3.0)
    assert found.worst == pytest.approx(0, abs=1e-12)
    named = [(row.schedule, row.microbatches) for row in found.rows]
    assert named == [(p.schedule, m) for m in (2, 32) for p in PIPELINES]
    once = {pipeline.schedule: seconds for pipeline, seconds in ONCE.items()}
    for row in found.rows:
        assert row.predicted_s == pytest.approx(row.measured_s)
        assert row.once_s == pytest.approx(once[row.schedule])
        assert row.cost == pytest.approx(row.predicted_s - row.once_s)
        assert row.spread == pytest.approx(1.0)
    assert "8 of 8 predictions within 15%" in found.table()
    assert not [line for line in found.table().splitlines() if line.endswith("!")]


def test_an_error_beyond_the_bound_is_marked() -> None:
    found = report(slower=1.25)
    lines = [line for line in found.table().splitlines() if line.endswith("!")]
    assert [line.split()[:2] for line in lines] == [["zero_bubble", "2"], ["zero_bubble", "32"]]
    assert "6 of 8 predictions within 15%, the worst off by 20.00%" in found.table()
    told = found.as_json()
    assert told["worst_error"] == pytest.approx(0.2) and told["weight_s"] == pytest.approx(1.5)
    errors = {(row["schedule"], row["microbatches"]): row["error"] for row in told["rows"]}
    assert errors["zero_bubble", 32] == pytest.approx(-0.2)


def test_who_begins_a_round_changes() -> None:
    ran: list[str] = []
    names = ["a", "b", "c"]
    programs = {name: lambda name=name: ran.append(name) for name in names}
    seconds = take_turns(programs, 5, 0.0, lambda text: None)
    rounds = np.reshape(ran, (5, 3, 2))
    assert (rounds[..., 0] == rounds[..., 1]).all(), "one that is not timed, and one that is"
    assert all(sorted(turn) == names for turn in rounds[..., 0].tolist())
    assert set(rounds[:, 0, 0]) == set(names), "nobody is always first"
    assert {name: len(mine) for name, mine in seconds.items()} == dict.fromkeys(names, 5)


def test_runs_fill_a_window_and_the_first_of_a_turn_is_not_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of programs that take a second more after another's."""
    now, before, lasts = [0.0], [""], {"short": 0.5, "long": 3.0}
    monkeypatch.setattr(bench, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def runs(name: str) -> Any:
        def program() -> None:
            now[0] += lasts[name] + (before[0] != name)
            before[0] = name

        return program

    seconds = take_turns({name: runs(name) for name in lasts}, 2, 2.0, lambda text: None)
    assert seconds == {"short": [0.5] * 2, "long": [3.0] * 2}
    short, long = 1.5 + 2 * 0.5, 4.0 + 3.0
    # The order of the second round is another one: its first goes on from the first round's last.
    assert now[0] == 2 * (short + long) - 1


@pytest.mark.parametrize("pipeline", PIPELINES, ids=lambda p: p.schedule)
def test_ticks_with_one_kind_of_work_are_the_schedules_own(pipeline: Any) -> None:
    for stages, m in ((2, 3), (3, 6)):
        schedule = make_schedule(pipeline.schedule, stages, m, pipeline.chunks)
        rows, _ = training(schedule, keep_residuals=False)
        for kind, table in schedule.tables.items():
            found = only(rows, kind)
            mine = table[(table >= 0).any(1)]
            work = {"F": found.forward, "B": found.backward, "W": found.weight}
            assert np.array_equal(work.pop(kind), mine)
            assert runs_of(schedule, kind) == len(mine)
            for other in (*work.values(), found.enter, found.leave, found.exit):
                assert len(other) == len(mine) and (other == -1).all()


# Programs


@pytest.fixture
def small(decoder: Experiment) -> Experiment:
    return replace(decoder, model=replace(decoder.model, layers=2, tied=False), batch=2)


@pytest.mark.exhaustive
def test_programs_of_costs_do_all_of_a_steps_work_and_no_more(
    optimising_compiler: None, small: Experiment
) -> None:
    """In multiplications, as compiled: the step costs what its table says, of costs counted in the
    programs that are timed."""
    machine, m = bench._Machine(small, 2), 3
    one, split = (machine.assemble(pipeline, m) for pipeline in (ONE, SPLIT))

    def counted(assembly: Any, kind: str) -> float:
        run, passes = ticks_of(assembly, machine.mesh, kind), max(PASSES)
        program = jax.jit(lambda params, batch: run(params, batch, jnp.int32(passes)))
        where = shardings(assembly.abstract, assembly.splits, machine.mesh)
        given = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
            (assembly.abstract.params, assembly.abstract_batch()),
            (where.params, assembly.batch_shardings(machine.mesh)),
        )
        compiled = program.lower(*given).compile(compiler_options=assembly.compiler_options)
        works = runs_of(assembly.on_stages.schedule, kind)
        text = compiled.as_text()
        assert text is not None
        return dot_flops(text) / passes / works

    forward, whole, head = (counted(one, kind) for kind in ("F", "B", "head"))
    backward, weight = (counted(split, kind) for kind in ("B", "W"))
    costs = Costs(forward, backward, weight, head, whole)
    tokens, embed, hidden, vocab = 16, 8, 16, 16
    # B runs F again, without the last product: nobody reads the output that it makes.
    assert forward > 0 and whole == 3 * forward - 2 * tokens * hidden * embed
    assert backward + weight == whole
    assert head == 3 * 2 * tokens * embed * vocab / 2, "split over the stages"
    for assembly in (one, split):
        where = shardings(assembly.abstract, assembly.splits, machine.mesh)
        step = compile_step(assembly, machine.mesh, where).as_text()
        assert dot_flops(step) == cost(assembly.on_stages.schedule, costs)


@pytest.mark.exhaustive
def test_a_step_without_ticks_makes_its_buffers_and_updates(
    optimising_compiler: None, small: Experiment
) -> None:
    machine = bench._Machine(small, 2)
    for number, pipeline in enumerate((ONE, SPLIT)):
        assembly = machine.assemble(pipeline, 3)
        where = shardings(assembly.abstract, assembly.splits, machine.mesh)
        still, step = (
            compile_step(each, machine.mesh, where) for each in (without_ticks(assembly), assembly)
        )
        of_still, of_step = (p.memory_analysis().temp_size_in_bytes for p in (still, step))
        assert of_still == pytest.approx(of_step, rel=0.05)
        state, metrics = machine.step(without_ticks(assembly))()
        assert int(state.step) == number + 1, "the state is handed on"
        assert {float(metrics[k]) for k in ("loss", "weight", "grad_norm", "skipped")} == {0.0}


@pytest.mark.exhaustive
def test_steps_and_costs_are_measured(small: Experiment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "PIPELINES", (ONE, SPLIT))
    lines: list[str] = []
    found = bench_pipeline(
        2, experiment=small, measured_at=2, microbatches=(1,), rounds=2, window=0.02,
        progress=lines.append,
    )  # fmt: skip
    assert [row.schedule for row in found.rows] == ["one_f_one_b", "zero_bubble"]
    assert found.measured_at == 2
    for row in found.rows:
        assert (row.microbatches, row.ticks) == (1, 3)
        assert 0 < row.once_s < 60 and 0 < row.measured_s < 60
    assert any("W of zero_bubble" in line for line in lines)
    json.dumps(found.as_json(), allow_nan=False)


def test_all_that_cannot_be_is_refused_before_anything_is_compiled() -> None:
    told: list[str] = []
    ramp = replace(bench.benchmark(2), batch=jaxtrain.data.BatchRamp(2, 4, 2, 10), microbatches=2)
    with pytest.raises(ValueError, match="bench pipeline: 7 problems") as raised:
        bench_pipeline(
            *(1,), experiment=ramp, measured_at=0, microbatches=(2, -4), rounds=1, window=math.nan,
            progress=told.append,
        )  # fmt: skip
    for wrong in (
        "stages=1 must be a whole number of 2 or more",
        "measured_at=0 must be a whole number of 1 or more",
        "microbatches[1]=-4 must be a whole number of 1 or more",
        "rounds=1 must be a whole number of 2 or more",
        "experiment.microbatches=2 must be 1",
        "window=nan must be a finite number of 0 or more",
        "must be a number, the rows of a microbatch",
    ):
        assert wrong in str(raised.value)
    with pytest.raises(ValueError, match="microbatches is empty"):
        bench_pipeline(2, microbatches=(), progress=told.append)
    assert not told


def test_the_command_prints_the_report(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def measured(stages: int, *, progress: Any, **chosen: Any) -> bench.PipelineReport:
        asked.append((stages, chosen))
        progress("a line")
        return report()

    for name in ("XLA_FLAGS", "JAX_PLATFORMS", "GLIBC_TUNABLES"):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(bench, "bench_pipeline", measured)
    assert cli.main(["bench", "pipeline", "--stages", "4", "--json"]) == 0
    said = capsys.readouterr()
    assert said.err.startswith("a line\na machine\n") and "within 15%" in said.err
    assert len(json.loads(said.out)["rows"]) == 8
    assert cli.main(["bench", "pipeline", "--rounds", "3", "--microbatches", "4,8"]) == 0
    assert "within 15%" in capsys.readouterr().out
    assert asked == [(4, {}), (2, {"rounds": 3, "microbatches": (4, 8)})]
    assert cli.main(["bench", "pipeline", "--microbatches", "2,x"]) == 2
    assert "write whole numbers, such as 2,32" in capsys.readouterr().err


def test_the_command_refuses_what_the_function_does() -> None:
    command = [sys.executable, "-m", "jaxtrain", "bench", "pipeline", "--stages", "0"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "stages=0 must be a whole number of 2 or more" in done.stderr
