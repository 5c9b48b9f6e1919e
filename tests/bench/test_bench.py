"""`bench step`: turns are fair, the plain loop is the same model, and both train."""

from __future__ import annotations

import importlib.util
import json
import math
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain import cli
from jaxtrain.bench.baseline import find_baseline, plain_arguments
from jaxtrain.bench.step import WARMUP, bench_step, environment, plain_environment, take_turns
from jaxtrain.data import BigramChain, ByteTokenizer, StdlibSource, TextData
from jaxtrain.experiment import Experiment, load_experiment
from jaxtrain.mesh.mesh import load_mesh, mesh_from_axes
from jaxtrain.optim.optimizer import AdamW
from jaxtrain.program.collectives import dot_flops
from jaxtrain.step.assembly import assemble
from jaxtrain.transformer.attention import AttentionConfig
from jaxtrain.transformer.feed_forward import MlpConfig

ROOT = Path(__file__).parents[2]
EXPERIMENT = ROOT / "experiments" / "bench_6m.py"
KEYS = {"step_s", "baseline_step_s", "ratio", "compile_s", "first_step_s", "peak_bytes", "loss"}
TINY = """
from dataclasses import replace
from jaxtrain import load_experiment
from jaxtrain.data import BigramChain

def experiment():
    e = load_experiment({path!r})
    block, = e.model.period
    block = replace(
        block, attention=replace(block.attention, heads=2), mlp=replace(block.mlp, hidden=32)
    )
    model = replace(e.model, vocab=64, embed=16, layers=2, period=(block,), vocab_multiple=32)
    return replace(e, model=model, data=BigramChain(vocab=64, seq=8), batch=4)
"""

FAKE = """
import json, os, sys, time
name, log, seconds = sys.argv[1], sys.argv[2], iter(map(float, sys.argv[3:]))

def say(**facts):
    print(json.dumps(facts), flush=True)

def run():
    with open(log, "a") as file:
        file.write(f"{name} begins\\n")
    time.sleep(0.005)
    with open(log, "a") as file:
        file.write(f"{name} ends\\n")

print("a library says hello", flush=True)
run()
say(compile_s=1.5, step_s=9.0, loss=8.0)
for turn, line in enumerate(sys.stdin):
    run()
    say(step_s=next(seconds), loss=7.0 - turn)
say(peak_bytes=11, program_bytes=7)
"""


@pytest.fixture(scope="module")
def experiment() -> Experiment:
    return load_experiment(EXPERIMENT)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.py"
    path.write_text(TINY.format(path=str(EXPERIMENT)))
    return path


@pytest.fixture(scope="module")
def plain() -> ModuleType:
    path = find_baseline(EXPERIMENT)
    spec = importlib.util.spec_from_file_location("plain_loop", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["plain_loop"] = module
    spec.loader.exec_module(module)
    return module


def sizes_of(plain: ModuleType, experiment: Experiment) -> object:
    words = plain_arguments(experiment, mesh_from_axes(fsdp=1))
    given = {n.removeprefix("--"): v for n, v in zip(words[::2], words[1::2], strict=True)}
    assert given.pop("case") == "one"
    return plain.Sizes(**{name: int(value) for name, value in given.items()})


# Turns


def test_turns_are_fair_and_nothing_runs_beside_a_step(tmp_path: Path) -> None:
    log, script, steps = tmp_path / "log", tmp_path / "fake.py", 3

    def told(mine: list[float]) -> list[float]:
        return [77.0] * WARMUP + [s for second in mine for s in (77.0, second)]

    script.write_text(FAKE)
    seconds = {"a": [5.0, 1.0, 2.0], "b": [4.0, 4.0, 4.0], "c": [1.0, 9.0, 3.0]}
    commands = {
        name: ([str(script), name, str(log), *map(str, told(mine))], {})
        for name, mine in seconds.items()
    }
    found = take_turns(commands, steps=steps)
    lines = log.read_text().split("\n")[:-1]
    begun = [line.split()[0] for line in lines[::2]]
    assert lines == [line for name in begun for line in (f"{name} begins", f"{name} ends")]
    assert begun[:3] == ["a", "b", "c"]  # first steps, each alone
    rounds = np.reshape(begun[3 : 3 + 3 * WARMUP], (WARMUP, 3))
    timed = np.reshape(begun[3 + 3 * WARMUP :], (steps, 3, 2))
    assert (timed[..., 0] == timed[..., 1]).all()  # a timed step follows one of its own
    rounds = np.concatenate([rounds, timed[..., 0]])
    assert {tuple(sorted(turn)) for turn in rounds} == {("a", "b", "c")}
    assert {turn[0] for turn in rounds} == {"a", "b", "c"}  # nobody is always first
    for name, mine in seconds.items():
        assert found[name].step_s == statistics.median(mine)  # warm-up left out
        assert found[name].loss == 7.0 - (WARMUP + 2 * steps - 1)
        assert (found[name].compile_s, found[name].peak_bytes) == (1.5, 11)
        assert found[name].first_step_s > 0.005


@pytest.mark.parametrize(
    ("program", "error", "said"),
    [
        ('print(\'{"refused": "too big"}\')', ValueError, "too big"),
        ("raise SystemExit('out of luck')", RuntimeError, "broken ended with 1:\nout of luck"),
        ('print(\'{"compile_s": 1, "loss": 1}\')', RuntimeError, "broken ended with 0"),
    ],
    ids=["refuses", "fails at once", "fails between steps"],
)
def test_a_process_that_fails_says_why(program: str, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        take_turns({"broken": (["-c", program], {})}, steps=1)


def test_processes_start_cold_and_share_an_accelerator() -> None:
    cached = {"JAX_COMPILATION_CACHE_DIR": "/cache", "HOME": "/home"}
    env = environment(mesh_from_axes(fsdp=8), cached)
    assert "JAX_COMPILATION_CACHE_DIR" not in env
    assert env["HOME"] == "/home"
    assert "device_count=8" in env["XLA_FLAGS"]
    loop = plain_environment(mesh_from_axes(fsdp=8), cached)
    assert {k: v for k, v in env.items() if k != "GLIBC_TUNABLES"} == loop
    own = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=2"}
    assert plain_environment(mesh_from_axes(fsdp=8), own).items() >= own.items()
    env = environment(load_mesh(ROOT / "meshes" / "h200_1.toml"), cached)
    assert env["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
    assert "XLA_FLAGS" not in env


# The plain loop


@pytest.mark.parametrize(
    ("mesh", "case"),
    [("cpu_1", "one"), ("cpu_8", "fsdp8"), ("cpu_fsdp4_tensor2", "tp2fsdp4")],
)
def test_mesh_files_are_cases_of_the_loop(experiment: Experiment, mesh: str, case: str) -> None:
    words = plain_arguments(experiment, load_mesh(ROOT / "meshes" / f"{mesh}.toml"))
    assert words[:2] == ["--case", case]


def test_bench_6m_is_the_loops_own_model(plain: ModuleType, experiment: Experiment) -> None:
    assert sizes_of(plain, experiment) == plain.Sizes()


def test_loop_has_as_many_parameters(plain: ModuleType, experiment: Experiment) -> None:
    shapes = jax.tree.leaves(
        jax.eval_shape(lambda: plain.init(jax.random.key(0), sizes=sizes_of(plain, experiment)))
    )
    ours = assemble(experiment, mesh_from_axes(fsdp=1)).abstract.params
    assert sum(leaf.size for leaf in shapes) == sum(leaf.size for leaf in ours.values())


def test_loop_has_as_many_flops(plain: ModuleType, tiny: Path) -> None:
    """Compiled, its dots are the model's FLOPs in the convention that masks nothing."""
    experiment = load_experiment(tiny)
    sizes = sizes_of(plain, experiment)
    params = jax.eval_shape(lambda: plain.init(jax.random.key(0), sizes=sizes))
    tokens = jax.ShapeDtypeStruct((sizes.batch, sizes.seq + 1), jnp.int32)

    def loss(params: object, tokens: jax.Array) -> jax.Array:
        return plain.loss_of(params, tokens, dtype=jnp.float32, constrain=lambda x: x)

    with jax.numpy_rank_promotion("allow"):
        lowered = jax.jit(jax.value_and_grad(loss)).lower(params, tokens)
    model = experiment.model.flops(seq=sizes.seq, sequences=sizes.batch)
    assert dot_flops(lowered.compile().as_text()) == model.train_full


def _model(experiment: Experiment, **changes: object) -> Experiment:
    return replace(experiment, model=replace(experiment.model, **changes))


def _block(experiment: Experiment, **changes: object) -> Experiment:
    return _model(experiment, period=(replace(experiment.model.period[0], **changes),))


REFUSED = {
    "tied": (lambda e: _model(e, tied=True), r"model.tied=True; the loop has False"),
    "padded": (lambda e: _model(e, vocab=4000), r"model.vocab=4000; the loop has 4096"),
    "grouped queries": (
        lambda e: _block(e, attention=AttentionConfig(heads=8, kv_heads=2)),
        r"model.period\[0\].attention.kv_heads=2; the loop has 8",
    ),
    "gelu": (
        lambda e: _block(e, mlp=MlpConfig(1024, activation=jax.nn.relu)),
        r"mlp.activation=relu; the loop has silu",
    ),
    "rate": (lambda e: replace(e, optimizer=AdamW(3e-4)), r"learning_rate=0.0003; .* 0.001"),
    "no clip": (lambda e: replace(e, clip_norm=None), r"clip_norm=None; the loop has 1.0"),
    "microbatches": (lambda e: replace(e, microbatches=2), r"microbatches=2; the loop has 1"),
    "documents": (
        lambda e: replace(e, data=BigramChain(4096, 256, isolate_documents=True)),
        r"data.isolate_documents=True",
    ),
    "text": (
        lambda e: replace(e, data=TextData(StdlibSource(), ByteTokenizer(), seq=256)),
        r"DecoderConfig on TextData; see experiments/bench_6m.py",
    ),
}


@pytest.mark.parametrize(("change", "said"), REFUSED.values(), ids=REFUSED)
def test_what_the_loop_lacks_is_refused(experiment: Experiment, change, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        plain_arguments(change(experiment), mesh_from_axes(fsdp=1))


def test_every_lack_is_named_at_once(experiment: Experiment) -> None:
    wrong = replace(_model(experiment, tied=True), batch=12, ema_decay=0.9)
    with pytest.raises(ValueError) as error:
        plain_arguments(wrong, mesh_from_axes(data=2, fsdp=8))
    for said in ("tied=True", "ema_decay=0.9", "mesh axis data=2", "batch=12 does not split"):
        assert said in str(error.value)


def test_the_same_model_spelled_out_is_not_refused(experiment: Experiment) -> None:
    spelled = AttentionConfig(heads=8, kv_heads=8, head_dim=32)
    here = mesh_from_axes(fsdp=1)
    assert plain_arguments(_block(experiment, attention=spelled), here) == plain_arguments(
        experiment, here
    )


def test_bench_refuses_what_it_cannot_compare() -> None:
    with pytest.raises(ValueError, match="steps=0; time at least 1"):
        bench_step(EXPERIMENT, mesh_from_axes(fsdp=1), steps=0)
    with pytest.raises(ValueError, match="not one of those measured"):
        bench_step(EXPERIMENT, mesh_from_axes(fsdp=1), steps=1, settings=["precision=fp16"])


# The whole of it


@pytest.mark.slow
def test_both_train_and_are_compared(tiny: Path, monkeypatch) -> None:
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # compile time is the cost
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    report = bench_step(tiny, mesh_from_axes(fsdp=1), steps=4, precisions=("fp32",))
    found = report.as_json()
    assert found.keys() >= KEYS
    assert (found["mode"], found["precision"]) == ("explicit", "fp32")
    assert [c.mode for c in report.comparisons] == ["explicit", "gspmd"]
    start = math.log(64) + 0.05
    for variant in (*found["variants"], *found["baselines"].values()):
        assert 0 < variant["loss"] < start  # 1 + WARMUP + 2 * 4 steps of training
        assert 0 < variant["step_s"] < variant["first_step_s"]
        assert 0 < variant["compile_s"] < variant["first_step_s"]
        assert 0 < variant["program_bytes"] < variant["peak_bytes"]
    assert found["ratio"] == found["step_s"] / found["baselines"]["fp32"]["step_s"]
    same = found["baselines_same_environment"]["fp32"]
    assert found["ratio_same_environment"] == found["step_s"] / same["step_s"]
    assert len(report.table().splitlines()) == 5  # head, two loops, two modes


@pytest.mark.exhaustive
def test_command_line_prints_the_keys_alone(tiny: Path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    mesh = tiny.with_name("cut.toml")
    mesh.write_text('chip = "cpu"\ndevices = 4\n[axes]\nfsdp = 2\ntensor = 2\n')
    asked = ["bench", "step", str(tiny), "--mesh", str(mesh), "--steps", "2", "--json"]
    assert cli.main([*asked, "--set", "model.vocab=32", "--set", "data.vocab=32"]) == 0
    said = capsys.readouterr()
    found = json.loads(said.out)
    lines = said.err.strip().splitlines()
    assert found.keys() >= KEYS
    assert {(v["mode"], v["precision"]) for v in found["variants"]} == {
        (mode, precision) for mode in ("explicit", "gspmd") for precision in ("fp32", "bf16")
    }
    assert len(lines) == 1 + 8  # head, a line each
    for each in (*found["variants"], *found["baselines"].values()):
        assert each["loss"] < math.log(32) + 0.05, "the setting reached every process"
