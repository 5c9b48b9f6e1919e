"""`jaxtrain compile`: what it finds, what it tells, and what makes it fail."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import jax
import pytest

import jaxtrain
from jaxtrain.mesh.sharding import partition_spec
from jaxtrain.planner import compile as compiling
from jaxtrain.planner.compile import compile_experiment
from jaxtrain.train import step as stepping
from jaxtrain.train.shrink import shrink

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def small():
    return shrink(jaxtrain.load_experiment(ROOT / "experiments" / "stdlib_lm.py"), devices=8)


@contextmanager
def silent():
    yield lambda: ""


def test_an_explicit_step_is_held_to_its_contract(small):
    report = compile_experiment(small, jaxtrain.mesh_from_axes(data=2, fsdp=2, tensor=2))
    found = report.as_json()
    assert found["contract"] is True and not report.violations
    assert report.memory["argument_bytes"] == report.checked.bytes_per_device["total"]
    assert {row["kind"] for row in found["collectives"]} >= {"all-gather", "reduce-scatter"}
    assert report.flops > 0 and not report.opaque
    assert "kept" in report.table() and "BROKEN" not in report.table()
    assert "bytes per device" in report.summary()


@pytest.mark.slow
def test_gspmd_tells_what_xla_chose(small):
    experiment = replace(small, execution=jaxtrain.Execution(mode="gspmd"))
    report = compile_experiment(experiment, jaxtrain.mesh_from_axes(data=2, tensor=4))
    assert report.contract is None and report.as_json()["contract"] is None
    assert report.sent and "predicted" not in report.table()


def test_a_branch_that_devices_take_differently_is_a_violation(small, monkeypatch):
    """With and without types in the program that is compiled."""

    def step(assembly, mesh, **given):
        def on_device(x):
            here = jax.lax.axis_index("data") == 0
            swap = [(0, 1), (1, 0)]
            return jax.lax.cond(here, lambda x: jax.lax.ppermute(x, "data", swap), lambda x: x, x)

        def run(state, batch):
            branchy = jax.shard_map(
                on_device,
                mesh=mesh,
                in_specs=partition_spec((("data",),)),
                out_specs=partition_spec((("data",),)),
                check_vma=assembly.check_vma,
            )
            return state, {"loss": branchy(jax.numpy.ones(2)).sum()}

        return run

    monkeypatch.setattr(stepping, "make_train_step", step)
    for checked in (True, False):
        execution = jaxtrain.Execution(check_vma=checked)
        report = compile_experiment(
            replace(small, execution=execution), jaxtrain.mesh_from_axes(data=2)
        )
        assert any("stands in a cond" in text for text in report.violations), checked


@pytest.mark.slow
def test_the_program_of_the_last_steps_is_compiled(small):
    reducer = jaxtrain.Compressed(jaxtrain.Int8(), warmup_steps=2)
    execution = jaxtrain.Execution(reducer=reducer, small_leaf=100)
    report = compile_experiment(
        replace(small, execution=execution, sharding=jaxtrain.data_parallel()),
        jaxtrain.mesh_from_axes(data=2),
    )
    assert report.as_json()["contract"] is True
    assert "u8" in {row["dtype"] for row in report.as_json()["collectives"]}
    assert "as in the last step, by Int8" in report.summary()


def test_a_broken_contract_is_a_violation(small, monkeypatch):
    right = compiling.collectives
    monkeypatch.setattr(compiling, "collectives", lambda text: right(text)[:-1])
    report = compile_experiment(small, jaxtrain.mesh_from_axes(fsdp=8))
    assert report.as_json()["contract"] is False
    assert any("the contract is broken: " in text for text in report.violations)
    assert "BROKEN" in report.table()


def test_what_the_compiler_logs_is_read(small):
    @contextmanager
    def log():
        yield lambda: "W spmd.cc] [spmd] Involuntary full rematerialization. %add\nother\n"

    report = compile_experiment(small, jaxtrain.mesh_from_axes(fsdp=2), compiler_log=log)
    (text,) = report.violations
    assert text.startswith("XLA gathers a whole tensor") and "%add" in text


def test_too_much_for_the_chip_does_not_fit(small, monkeypatch):
    spec = jaxtrain.mesh_from_axes(fsdp=2)
    for gbytes, fits in ((1e-6, False), (1.0, True)):
        tiny = replace(spec, chip=replace(spec.chip, hbm_gbytes=gbytes))
        assert compile_experiment(small, tiny, compiler_log=silent).fits is fits


def run(*arguments):
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    return subprocess.run(
        [Path(sys.executable).parent / "jaxtrain", "compile", *arguments],
        capture_output=True, text=True, cwd=ROOT, env=environment, timeout=300,
    )  # fmt: skip


def test_the_command_prints_both_sides_and_one_json_object():
    done = run("experiments/stdlib_lm.py", "--mesh", "meshes/cpu_fsdp4_tensor2.toml", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["contract"] is True and found["bytes_per_device"]["params"] > 0
    assert "predicted" in done.stderr and "reduce-scatter" in done.stderr


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is not None, reason="libtpu is installed")
def test_a_mesh_that_nothing_here_can_compile_for_is_refused():
    done = run("experiments/stdlib_lm.py", "--mesh", "meshes/v5e_16.toml")
    assert done.returncode == 2 and "pip install '.[tpu]'" in done.stderr
