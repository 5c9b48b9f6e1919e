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
from types import SimpleNamespace

import jax
import pytest

import jaxtrain
from jaxtrain.attention.cudnn import Cudnn
from jaxtrain.attention.kernels import CPU_BLOCKS
from jaxtrain.certificate.shrink import shrink
from jaxtrain.contract import compile as compiling
from jaxtrain.contract.compile import compile
from jaxtrain.mesh.hardware import CHIPS, LINKS
from jaxtrain.mesh.sharding import partition_spec
from jaxtrain.program import scratch
from jaxtrain.session.check import check
from jaxtrain.step import train_step as stepping

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def small():
    return shrink(jaxtrain.load_experiment(ROOT / "experiments" / "stdlib_lm.py"), devices=8)


@contextmanager
def silent():
    yield lambda: ""


def test_an_explicit_step_is_held_to_its_contract(small):
    report = compile(small, jaxtrain.mesh_from_axes(data=2, fsdp=2, tensor=2))
    found = report.as_json()
    assert found["contract"] is True and not report.violations
    assert report.memory["argument_bytes"] == report.checked.bytes_per_device["total"]
    assert {row["kind"] for row in found["collectives"]} >= {"all-gather", "reduce-scatter"}
    assert (found["attention"], found["grouped_matmul"]) == ([str(CPU_BLOCKS)], [])
    assert all(
        row["hidden_bytes"] + row["exposed_bytes"] == row["bytes"] for row in found["collectives"]
    )
    assert 0.9 * report.asked_flops < report.flops <= report.asked_flops and not report.opaque
    assert "kept" in report.table() and "BROKEN" not in report.table()
    assert "bytes per device" in report.summary()


def test_documents_for_which_a_kernel_has_no_room_are_in_no_figure(small):
    """As `compile` says of a program for GPUs, whose rows may have more."""
    report = compile(small, jaxtrain.mesh_from_axes(fsdp=2))
    assert report.as_json()["documents_room"] is None and "documents" not in report.summary()
    for changes, room in ({}, 64), (dict(attention=Cudnn(documents=32)), 32):
        execution = jaxtrain.Execution(**changes)
        experiment = replace(small, precision=jaxtrain.bf16, execution=execution)
        packed = replace(report, checked=check(experiment, "h100_1", data_here=False))
        assert packed.as_json()["documents_room"] == room
        told = f"whose rows have more than {room} short documents in the mean runs attention as"
        assert told in packed.summary()


@pytest.mark.slow
def test_gspmd_tells_what_xla_chose(small):
    experiment = replace(small, execution=jaxtrain.Execution(mode="gspmd"))
    report = compile(experiment, jaxtrain.mesh_from_axes(data=2, tensor=4))
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
        report = compile(replace(small, execution=execution), jaxtrain.mesh_from_axes(data=2))
        assert any("stands in a cond" in text for text in report.violations), checked


@pytest.mark.slow
def test_the_program_of_the_last_steps_is_compiled(small):
    reducer = jaxtrain.compression.Compressed(jaxtrain.compression.Int8(), warmup_steps=2)
    execution = jaxtrain.Execution(reducer=reducer, small_leaf=100)
    report = compile(
        replace(small, execution=execution, sharding=jaxtrain.data_parallel()),
        jaxtrain.mesh_from_axes(data=2),
    )
    assert report.as_json()["contract"] is True
    assert "u8" in {row["dtype"] for row in report.as_json()["collectives"]}
    assert "as in the last step, by Int8" in report.summary()


def test_a_broken_contract_is_a_violation(small, monkeypatch):
    right = compiling.collectives
    monkeypatch.setattr(compiling, "collectives", lambda text: right(text)[:-1])
    report = compile(small, jaxtrain.mesh_from_axes(fsdp=8))
    assert report.as_json()["contract"] is False
    assert any("the contract is broken: " in text for text in report.violations)
    assert "BROKEN" in report.table()


def test_what_the_compiler_logs_is_read(small):
    log = logged("W spmd.cc] [spmd] Involuntary full rematerialization. %add\nother\n")
    report = compile(small, jaxtrain.mesh_from_axes(fsdp=2), compiler_log=log)
    (text,) = report.violations
    assert text.startswith("XLA gathers a whole tensor") and "%add" in text


def logged(text):
    @contextmanager
    def log():
        yield lambda: text

    return log


def test_too_much_for_what_a_program_may_take_does_not_fit(small, monkeypatch):
    """To the byte, whatever the chip has in all; with scratch memory that the compiler left out."""
    spec = jaxtrain.mesh_from_axes(fsdp=2)
    counted = compile(small, spec, compiler_log=silent)
    assert counted.as_json()["bytes_per_device"]["scratch"] == 0
    monkeypatch.setattr(scratch, "uncounted_scratch", lambda text: 1000)
    peak = counted.memory["peak_bytes"] + 1000
    for usable, fits in ((peak - 1, False), (peak, True)):
        tiny = replace(spec, chip=replace(spec.chip, usable_gbytes=usable / 1e9))
        report = compile(small, tiny, compiler_log=silent)
        assert report.fits is fits and not report.violations
        found = report.as_json()
        assert found["usable_bytes"] == usable and found["bytes_per_device"]["scratch"] == 1000
        assert ", scratch 1,000;" in report.summary()
        assert f"a program may take {usable:,}" in report.summary()


SQUEEZED = (
    "W1122 20:19:08.674311   15594 hlo_rematerialization.cc:3231] Can't reduce memory use below "
    "60.78GiB (65259248639 bytes) by rematerialization; only reduced to 77.92GiB (83663588620 "
    "bytes), down from 77.67GiB (83394891084 bytes) originally\n"
)
"""What XLA logged of llama3_1b on one H100 (jax 0.10.2)."""


def test_what_xla_cannot_squeeze_in_does_not_fit(small, monkeypatch):
    """It compiles all the same, recomputes what it can, and only logs it."""
    right = compiling.dot_flops
    monkeypatch.setattr(compiling, "dot_flops", lambda text: 1.615 * right(text))
    spec = jaxtrain.mesh_from_axes(fsdp=2)
    report = compile(small, spec, compiler_log=logged(SQUEEZED))
    smaller, again = report.violations
    assert "no smaller than 77.92GiB, and has 60.78GiB" in smaller and report.fits is False
    assert again.startswith("XLA recomputes 6") and "more matmul FLOPs" in again
    assert "DOES NOT FIT" in report.summary() and report.as_json()["fits"] is False
    monkeypatch.setattr(compiling, "dot_flops", lambda text: 1.005 * right(text))
    assert not compile(small, spec, compiler_log=silent).violations


def test_a_compiler_that_refuses_the_memory_is_quoted(small, monkeypatch):
    """As TPUs' does; any other failure of a compiler is not one of memory."""
    told = "Ran out of memory on HBM, the total memory required (384.00G) exceeds (15.75G)."

    def failing(status):
        def compile(**given):
            raise jax.errors.JaxRuntimeError(f"{status}: {told}\nmore")

        program = SimpleNamespace(compile=compile)
        jaxpr = jax.make_jaxpr(lambda x: x)(1.0)
        return lambda *_, **given: SimpleNamespace(jaxpr=jaxpr, lower=lambda: program)

    spec = jaxtrain.mesh_from_axes(fsdp=2)
    monkeypatch.setattr(compiling, "trace_step", failing("RESOURCE_EXHAUSTED"))
    with pytest.raises(ValueError, match=r"does not fit a cpu: Ran out .*G\). Use more microbatch"):
        compile(small, spec)
    monkeypatch.setattr(compiling, "trace_step", failing("INTERNAL"))
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        compile(small, spec)


@pytest.mark.slow
@pytest.mark.parametrize(("microbatches", "fits"), [(32, False), (64, True)])
def test_llama3_1b_on_one_h100(microbatches, fits):
    """With 16 rows in a microbatch XLA recomputes to squeeze it in, and fails; with 8 it has room,
    and the program has the FLOPs that are asked for, to the last one."""
    if not any(importlib.util.find_spec(f"jax_cuda{n}_plugin") for n in (12, 13)):
        pytest.skip("compiles for an absent H100: pip install '.[cuda12]'")
    files = "experiments/llama3_1b.py", "--mesh", "meshes/h100_1.toml"
    done = run(*files, "--set", f"microbatches={microbatches}", "--json")
    found = json.loads(done.stdout)
    assert found["fits"] is fits and done.returncode == (not fits), done.stderr
    if fits:
        assert found["flops"] == found["asked_flops"]
    else:
        assert any("XLA recomputes 62% more" in text for text in found["violations"])
        assert any("no smaller than 77.92GiB" in text for text in found["violations"])


def run(*arguments):
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    return subprocess.run(
        [Path(sys.executable).parent / "jaxtrain", "compile", *arguments],
        capture_output=True, text=True, cwd=ROOT, env=environment, timeout=900,
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


def test_what_travels_behind_an_attention_kernel_is_hidden():
    """As long as one forward call takes: of more bytes than the link sends meanwhile the rest is
    not. A program of one permute around one kernel."""
    experiment = ROOT / "experiments" / "llama2_7b.py"
    assembly = check(experiment, "v5p_16", data_here=False).assembly
    pairs = ",".join(f"{{{i},{(i + 1) % 16}}}" for i in range(16))
    size, ring = 2**29, f"channel_id=1, source_target_pairs={{{pairs}}}"
    text = f"""HloModule m, is_scheduled=true, num_partitions=16

ENTRY %main (x: bf16[{size}]) -> bf16[{size}] {{
  %x = bf16[{size}]{{0}} parameter(0)
  %s = (bf16[{size}], bf16[{size}]) collective-permute-start(%x), {ring}
  %k = bf16[8]{{0}} custom-call(%x), custom_call_target="tpu_custom_call"
  ROOT %d = bf16[{size}]{{0}} collective-permute-done(%s)
}}
"""
    ((key, found),) = compiling._overlap(text, assembly).items()
    assert (key.kind, key.axes, found.hidden) == ("collective-permute", ("fsdp",), 1)
    rows, seq, width = 4, 4096, 4096
    flops = 2 * 2 * rows * seq * (seq + 1) / 2 * width
    link = LINKS["ici_v5p"].bandwidth_gbytes * 1e9
    sent = flops / CHIPS["tpu_v5p"].bf16_flops * link
    assert found.hidden_bytes == pytest.approx(sent) and found.wire_bytes == 2 * size > sent
