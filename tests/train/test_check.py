"""`check` says, without a device, what the compiled step's arguments and the arrays weigh."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxtrain
from jaxtrain.collectives.powersgd import PowerSGD
from jaxtrain.data import BigramChain
from jaxtrain.experiment import with_fields
from jaxtrain.mesh.mesh import make_mesh
from jaxtrain.train.assembly import active_mesh, assemble
from jaxtrain.train.session import initialise, open_session
from jaxtrain.train.state import shardings
from jaxtrain.train.violations import field_violations

ROOT = Path(__file__).parents[2]
BF16_WEIGHTS = jaxtrain.Precision(params=jnp.bfloat16, compute=jnp.bfloat16, matmul="default")
RULES = {
    "fsdp": jaxtrain.fsdp() | jaxtrain.tensor(),
    "zero1": jaxtrain.zero1() | jaxtrain.tensor(),
    "data parallel": jaxtrain.data_parallel() | jaxtrain.tensor(),
}


def experiment(**changes: Any) -> jaxtrain.Experiment:
    block = jaxtrain.BlockConfig(
        jaxtrain.AttentionConfig(heads=4, kv_heads=2), jaxtrain.MlpConfig(hidden=64)
    )
    model = jaxtrain.DecoderConfig(
        vocab=257, embed=32, layers=2, period=(block,), vocab_multiple=16
    )
    given = jaxtrain.Experiment(
        model=model,
        data=jaxtrain.TextData(seq=16),
        optimizer=jaxtrain.AdamW(1e-3),
        steps=10,
        batch=16,
        evaluation=None,
        checkpoints=None,
        ema_decay=0.9,
    )
    return replace(given, **changes)


def held_by(device: Any, tree: Any) -> int:
    """Bytes of the arrays of `tree` that rest on one device."""
    shards = (s for leaf in jax.tree.leaves(tree) for s in leaf.addressable_shards)
    return sum(shard.data.nbytes for shard in shards if shard.device == device)


@pytest.mark.parametrize(
    ("axes", "precision", "wanted"),
    [
        ({"stage": 2}, jaxtrain.fp32, 4 * 16 * 32 * 4),
        ({"data": 2, "stage": 2, "tensor": 2}, jaxtrain.fp32, 4 * 16 * 32 * 4 // 4),
        ({"fsdp": 4, "stage": 2}, jaxtrain.bf16, 4 * 16 * 32 * 2 // 4),
    ],
    ids=str,
)
def test_a_stage_has_its_share_of_a_microbatch(
    axes: dict[str, int], precision: jaxtrain.Precision, wanted: int
) -> None:
    """Rows by tokens by embed by bytes: rows go over data and fsdp, tokens over tensor."""
    given = experiment(microbatches=4, precision=precision)
    found = jaxtrain.check(given, jaxtrain.mesh_from_axes(**axes)).as_json()["pipeline"]
    assert found["activation_bytes"] == wanted


@pytest.mark.parametrize(
    ("axes", "rules", "precision"),
    [
        ({"data": 2, "fsdp": 2, "tensor": 2}, "fsdp", jaxtrain.fp32),
        ({"data": 4, "tensor": 2}, "zero1", BF16_WEIGHTS),
        ({"data": 8}, "data parallel", jaxtrain.fp16),
        ({"data": 1}, "fsdp", jaxtrain.fp32),
    ],
    ids=str,
)
def test_bytes_are_those_of_the_arrays_on_every_device(
    axes: dict[str, int], rules: str, precision: jaxtrain.Precision
) -> None:
    spec = jaxtrain.mesh_from_axes(**axes)
    given = experiment(sharding=RULES[rules], precision=precision)
    report = jaxtrain.check(given, spec)
    assembly = assemble(given, spec)
    mesh = active_mesh(make_mesh(spec), assembly.sizes)
    where = shardings(assembly.abstract, assembly.splits, mesh)
    state = initialise(assembly, where)
    others = (state.rest, state.ema, state.step, state.loss_scale, state.skipped)
    for device in mesh.devices.flat:
        assert held_by(device, state.params) == report.bytes_per_device["params"]
        assert held_by(device, state.optimizer) == report.bytes_per_device["optimizer"]
        assert held_by(device, others) == report.bytes_per_device["other"]


@pytest.mark.parametrize(
    ("dropout", "reducer"),
    [
        (0.1, jaxtrain.Lax()),
        pytest.param(0.0, jaxtrain.Lax(), marks=pytest.mark.slow),
        pytest.param(0.0, jaxtrain.Compressed(PowerSGD(2)), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_total_is_the_argument_bytes_of_the_compiled_step(
    dropout: float, reducer: Any, tmp_path: Path
) -> None:
    """Also where the program reads less than it is given: rows number dropout's masks only."""
    model = replace(experiment().model, dropout=dropout)
    given = experiment(model=model, data=BigramChain(250, 16, isolate_documents=True))
    given = replace(given, execution=jaxtrain.Execution(reducer=reducer, small_leaf=100))
    spec = jaxtrain.mesh_from_axes(data=2, fsdp=2, tensor=2)
    session = open_session(given, spec, cache_dir=tmp_path)
    (program,) = session.compiled.values()
    total = jaxtrain.check(given, spec).bytes_per_device["total"]
    session.close()
    assert program.memory_analysis().argument_size_in_bytes == total


def test_the_table_lists_every_parameter_and_its_bytes_add_up() -> None:
    given = experiment(sharding=RULES["zero1"], precision=BF16_WEIGHTS)
    report = jaxtrain.check(given, jaxtrain.mesh_from_axes(data=4, tensor=2))
    header, *rows = report.table().splitlines()
    assert header.split("  ")[0] == "leaf" and "optimizer state over" in header
    cells = {row.split()[0]: row for row in rows}
    assert set(cells) == set(report.assembly.split.params)
    weights = {name: int(row.split()[-1].replace(",", "")) for name, row in cells.items()}
    assert sum(weights.values()) == report.bytes_per_device["params"]
    up = cells["period.0.mlp.up"]
    assert "[layers 2, embed 32, mlp 64]" in up
    assert re.split(r"\s{2,}", up)[2:] == ["mlp: tensor", "embed: data, mlp: tensor", "4,096"]
    assert weights["period.0.mlp.up"] == 2 * 32 * 64 // 2 * 2
    assert "whole" in cells["norm.scale"]


def test_parameters_are_counted_without_the_padding_of_the_vocabulary() -> None:
    report = jaxtrain.check(experiment(), jaxtrain.mesh_from_axes(data=1))
    embed, hidden, vocab = 32, 64, 257
    block = embed * (32 + 16 + 16 + 32) + 3 * embed * hidden + 2 * embed
    assert report.parameters == 2 * block + embed + 2 * vocab * embed
    assert f"{report.parameters:,} parameters on data1 (one device, explicit)" in report.summary()


def test_microbatches_that_fit_every_size_of_a_ramp_are_named() -> None:
    ramp = jaxtrain.BatchRamp(start=4, end=10, increment=6, steps=2)
    found = field_violations(experiment(batch=ramp, microbatches=5))
    assert found == ["batch=4 is not a multiple of microbatches=5; use microbatches=2, or batch=5"]


def test_every_violation_is_told_at_once() -> None:
    """Fields, data, model against mesh and parameters against mesh, in one message."""
    settings = ["steps=0", "batch=6", "microbatches=4", "clip_norm=-1.0", "model.embed=36"]
    settings += ["model.period.0.attention.head_dim=8"]
    wrong = with_fields(experiment(sharding=RULES["fsdp"]), settings)
    with pytest.raises(ValueError) as caught:
        jaxtrain.check(wrong, jaxtrain.mesh_from_axes(fsdp=8, tensor=4))
    message = str(caught.value)
    for part in (
        "steps=0",
        "batch=6 is not a multiple of microbatches=4; use microbatches=3, or batch=4",
        "clip_norm=-1.0",
        "kv_heads=2 does not split over tensor=4",
        "embed=36 does not split over fsdp=8",
    ):
        assert part in message
    listed = [line for line in message.splitlines() if line.startswith("  - ")]
    assert message.startswith(f"{len(listed)} things to mend")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("model.period.0.attention.heads=0", "heads=0; use a whole number of at least 1"),
        ("model.period.0.attention.kv_heads=3", "heads=4 is not a multiple of kv_heads=3"),
        ("model.layers=0", "layers=0 is not prefix"),
        ("model.learned_positions=8", "data.seq=16 is longer than learned_positions=8"),
        ("data.seq=15", "a device's microbatch of 15 tokens does not split over tensor=2"),
        ("execution.mode='auto'", "the modes are explicit and gspmd"),
        ("model.vocab=100", "token ids up to 256 and model.vocab=100; use vocab=257"),
        ("model.logit_scale=1e999", "logit_scale=inf; use a finite number"),
        ("model.embedding_scale=-1e999", "embedding_scale=-inf; use a finite number"),
        ("model.period.0.residual_scale=1e999", "residual_scale=inf; use a finite number"),
        ("model.period.0.attention.scale=1e999", "scale=inf; use a positive number, or None"),
        ("model.init.std=1e999", "init.std=inf; use a finite number"),
        ("model.period=()", "layers=2 is not prefix"),
        ("model.period=(3,)", "use a tuple of BlockConfig"),
        ("clip_norm=1e999", "clip_norm=inf; use a positive bound, or None for none"),
    ],
)
def test_a_wrong_field_is_refused_with_its_remedy(setting: str, message: str) -> None:
    wrong = with_fields(experiment(batch=1), [setting])
    with pytest.raises(ValueError, match=message):
        jaxtrain.check(wrong, jaxtrain.mesh_from_axes(tensor=2))


@pytest.mark.parametrize("change", [{"layers": None}, {"layers": 2.5}, {"period": None}])
def test_a_decoder_whose_layers_cannot_be_counted_is_refused(change: dict[str, Any]) -> None:
    wrong = replace(experiment(), model=replace(experiment().model, **change))
    with pytest.raises(ValueError, match=f"{next(iter(change))}=.*; use a"):
        jaxtrain.check(wrong, jaxtrain.mesh_from_axes(tensor=2))


@pytest.mark.parametrize(
    ("tokenizer", "prompt", "message"),
    [
        (jaxtrain.ByteTokenizer(), "four", "prompt of 4 .* and tokens=13 .*; use tokens=12 or"),
        (jaxtrain.ByteTokenizer(), "x" * 20, "prompt of 20 .*; use a shorter prompt"),
        (jaxtrain.BpeTokenizer(), "four", None),
        (jaxtrain.ByteTokenizer(), "one", None),
    ],
)
def test_a_sample_past_the_learned_positions_is_refused_before_the_run(
    tokenizer: Any, prompt: str, message: str | None
) -> None:
    """Only what is certain is refused: a tokenizer not yet built may make one token of a prompt."""
    given = experiment(
        model=replace(experiment().model, learned_positions=16),
        data=jaxtrain.TextData(seq=16, tokenizer=tokenizer),
        evaluation=jaxtrain.Evaluation(sample=jaxtrain.Sample(prompt, tokens=13)),
    )
    if message is None:
        assert field_violations(given) == []
        return
    with pytest.raises(ValueError, match=message):
        jaxtrain.check(given, jaxtrain.mesh_from_axes(data=1))


@pytest.mark.parametrize("positions", [None, 16])
def test_a_sample_that_no_device_would_hold_is_refused(positions: int | None) -> None:
    model = replace(experiment().model, learned_positions=positions)

    def found(tokens: int) -> str:
        evaluation = jaxtrain.Evaluation(sample=jaxtrain.Sample("a", tokens=tokens))
        return "\n".join(field_violations(experiment(model=model, evaluation=evaluation)))

    assert "evaluation.sample: tokens=1048577 is more than a sample may have" in found(2**20 + 1)
    assert "more than a sample may have" not in found(2**20)


def test_a_profile_after_the_last_step_is_refused() -> None:
    late = experiment(logging=jaxtrain.Logging(profile=jaxtrain.Steps(10, 12)))
    with pytest.raises(ValueError, match="begins after the last step, 9; use first=9 or less"):
        jaxtrain.check(late, jaxtrain.mesh_from_axes(data=1))
    last = experiment(logging=jaxtrain.Logging(profile=jaxtrain.Steps(9, 12)))
    assert field_violations(last) == []


@pytest.mark.parametrize("name", ["gpt2_124m", "llama3_1b", "llama3_8b", "stdlib_lm"])
def test_presets_fit_a_node_of_eight_without_device_or_data(name: str) -> None:
    report = jaxtrain.check(ROOT / f"experiments/{name}.py", ROOT / "meshes/h100_8.toml")
    weights = report.bytes_per_device
    assert 4 * report.parameters / 8 <= weights["params"] < 4.2 * report.parameters / 8
    assert sum(weights.values()) == 2 * weights["total"]


def test_a_users_own_state_is_weighed() -> None:
    report = jaxtrain.check(ROOT / "experiments/own_module.py", ROOT / "meshes/cpu_8.toml")
    averages = sum(
        math.prod(leaf.shape) * 4
        for name, leaf in report.assembly.abstract.rest.items()
        if name.endswith(("norm.mean", "norm.var"))
    )
    keys = sum(name.endswith("rngs.key") for name in report.assembly.abstract.rest)
    assert averages == 6 * 2 * 128 * 4 and keys == 6
    assert report.bytes_per_device["other"] == averages + keys * (8 + 4) + 8


ARGUMENTS = """
import json, math, sys
import jax
from jaxtrain.experiment import load_experiment
from jaxtrain.mesh.mesh import load_mesh, make_mesh
from jaxtrain.train.assembly import active_mesh, assemble
from jaxtrain.train.state import shardings
from jaxtrain.train.step import compile_step

spec = load_mesh(sys.argv[2]).simulate()
assembly = assemble(load_experiment(sys.argv[1]), spec)
mesh = active_mesh(make_mesh(spec), assembly.sizes)
program = compile_step(assembly, mesh, shardings(assembly.abstract, assembly.splits, mesh))
state, batch = program.input_shardings[0]

def weigh(tree, where):
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(where), strict=True)
    return sum(leaf.dtype.itemsize * math.prod(s.shard_shape(leaf.shape)) for leaf, s in pairs)

print(json.dumps({
    "params": weigh(assembly.abstract.params, state.params),
    "optimizer": weigh(assembly.abstract.optimizer, state.optimizer),
    "total": program.memory_analysis().argument_size_in_bytes,
}))
"""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("h100_64", marks=pytest.mark.slow),
        pytest.param("v5p_512", marks=pytest.mark.exhaustive),
    ],
)
def test_llama3_8b_weighs_what_its_compiled_step_takes(name: str) -> None:
    """On as many fake devices as the mesh has: 64 and 512. Compiling takes a minute or two."""
    files = [str(ROOT / "experiments/llama3_8b.py"), str(ROOT / f"meshes/{name}.toml")]
    report = jaxtrain.check(*files)
    devices = f"--xla_force_host_platform_device_count={report.assembly.spec.devices}"
    run = subprocess.run(
        [sys.executable, "-c", ARGUMENTS, *files],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": devices},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    found = json.loads(run.stdout.splitlines()[-1])
    assert found == {part: report.bytes_per_device[part] for part in found}
