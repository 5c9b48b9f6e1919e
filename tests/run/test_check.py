"""`check` says, without a device, what the compiled step's arguments and the arrays weigh."""

from __future__ import annotations

import io
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
from jaxtrain.attention.kernels import Splash
from jaxtrain.compression.powersgd import PowerSGD
from jaxtrain.data import BigramChain
from jaxtrain.experiment import with_fields
from jaxtrain.experiment.resolve import resolve
from jaxtrain.mesh.hardware import CHIPS
from jaxtrain.mesh.mesh import make_mesh
from jaxtrain.moe import Megablox
from jaxtrain.session.session import initialise, open_session
from jaxtrain.sources import documents
from jaxtrain.step.assembly import active_mesh, assemble
from jaxtrain.step.state import shardings
from jaxtrain.validation.experiment import field_violations

ROOT = Path(__file__).parents[2]
BF16_WEIGHTS = jaxtrain.optim.Precision(params=jnp.bfloat16, compute=jnp.bfloat16, matmul="default")
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


def violations_of_fields(**changes: Any) -> list[str]:
    return field_violations(resolve(experiment(**changes), jaxtrain.mesh_from_axes(data=1))[0])


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
    axes: dict[str, int], precision: jaxtrain.optim.Precision, wanted: int
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
        ({"data": 8}, "data parallel", jaxtrain.optim.fp16),
        ({"data": 1}, "fsdp", jaxtrain.fp32),
    ],
    ids=str,
)
def test_bytes_are_those_of_the_arrays_on_every_device(
    axes: dict[str, int], rules: str, precision: jaxtrain.optim.Precision
) -> None:
    spec = jaxtrain.mesh_from_axes(**axes)
    given = experiment(sharding=RULES[rules], precision=precision)
    report = jaxtrain.check(given, spec)
    assembly = assemble(given, spec)
    mesh = active_mesh(make_mesh(spec), assembly.sizes)
    where = shardings(assembly.abstract, assembly.splits, mesh)
    state = initialise(assembly, where)
    others = (state.model_state, state.ema, state.step, state.loss_scale, state.skipped)
    for device in mesh.devices.flat:
        assert held_by(device, state.params) == report.bytes_per_device["params"]
        assert held_by(device, state.optimizer) == report.bytes_per_device["optimizer"]
        assert held_by(device, others) == report.bytes_per_device["other"]


@pytest.mark.parametrize(
    ("dropout", "reducer"),
    [
        (0.1, jaxtrain.collectives.Lax()),
        pytest.param(0.0, jaxtrain.collectives.Lax(), marks=pytest.mark.slow),
        pytest.param(0.0, jaxtrain.compression.Compressed(PowerSGD(2)), marks=pytest.mark.slow),
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
    ramp = jaxtrain.data.BatchRamp(start=4, end=10, increment=6, steps=2)
    found = violations_of_fields(batch=ramp, microbatches=5)
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
        "batch=6 is not a multiple of microbatches=4; use batch=32",
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
        ("model.period=()", r"period=\(\) has no block to repeat; use period=\(block,\)"),
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
        (
            jaxtrain.data.ByteTokenizer(),
            "four",
            "prompt of at least 4 .* and tokens=13 .*; use tokens=12 or",
        ),
        (jaxtrain.data.ByteTokenizer(), "x" * 20, "prompt of at least 20 .*; use a shorter prompt"),
        (jaxtrain.data.BpeTokenizer(), "four", None),
        (jaxtrain.data.ByteTokenizer(), "one", None),
    ],
)
def test_a_sample_past_the_learned_positions_is_refused_before_the_run(
    tokenizer: Any, prompt: str, message: str | None
) -> None:
    """Only what is certain is refused: a tokenizer not yet built may make one token of a prompt."""
    fields = dict(
        model=replace(experiment().model, learned_positions=16),
        data=jaxtrain.TextData(seq=16, tokenizer=tokenizer),
        evaluation=jaxtrain.Evaluation(sample=jaxtrain.Sample(prompt, tokens=13)),
    )
    if message is None:
        assert violations_of_fields(**fields) == []
        return
    with pytest.raises(ValueError, match=message):
        jaxtrain.check(experiment(**fields), jaxtrain.mesh_from_axes(data=1))


@pytest.mark.parametrize("positions", [None, 16])
def test_a_sample_that_no_device_would_hold_is_refused(positions: int | None) -> None:
    model = replace(experiment().model, learned_positions=positions)

    def found(tokens: int) -> str:
        evaluation = jaxtrain.Evaluation(sample=jaxtrain.Sample("a", tokens=tokens))
        return "\n".join(violations_of_fields(model=model, evaluation=evaluation))

    assert "evaluation.sample: tokens=1048577 is more than a sample may have" in found(2**20 + 1)
    assert "more than a sample may have" not in found(2**20)


def test_a_profile_after_the_last_step_is_refused() -> None:
    late = experiment(logging=jaxtrain.Logging(profile=jaxtrain.Steps(10, 12)))
    with pytest.raises(ValueError, match="begins after the last step, 9; use first=9 or less"):
        jaxtrain.check(late, jaxtrain.mesh_from_axes(data=1))
    last = jaxtrain.Logging(profile=jaxtrain.Steps(9, 12))
    assert violations_of_fields(logging=last) == []


@pytest.mark.parametrize("name", ["gpt2_124m", "llama3_1b", "llama3_8b", "stdlib_lm"])
def test_presets_fit_a_node_of_eight_without_device_or_data(name: str) -> None:
    files = ROOT / f"experiments/{name}.py", ROOT / "meshes/h100_8.toml"
    report = jaxtrain.check(*files, data_here=False)
    weights = report.bytes_per_device
    assert 4 * report.parameters / 8 <= weights["params"] < 4.2 * report.parameters / 8
    assert sum(weights.values()) == 2 * weights["total"]


def test_a_users_own_state_is_weighed() -> None:
    report = jaxtrain.check(ROOT / "experiments/own_module.py", ROOT / "meshes/cpu_8.toml")
    averages = sum(
        math.prod(leaf.shape) * 4
        for name, leaf in report.assembly.abstract.model_state.items()
        if name.endswith(("norm.mean", "norm.var"))
    )
    keys = sum(name.endswith("rngs.key") for name in report.assembly.abstract.model_state)
    assert averages == 6 * 2 * 128 * 4 and keys == 6
    assert report.bytes_per_device["other"] == averages + keys * (8 + 4) + 8


ARGUMENTS = """
import json, math, sys
import jax
from jaxtrain.experiment import load_experiment
from jaxtrain.mesh.mesh import load_mesh, make_mesh
from jaxtrain.step.assembly import active_mesh, assemble
from jaxtrain.step.state import shardings
from jaxtrain.step.train_step import compile_step

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
    report = jaxtrain.check(*files, data_here=False)
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


def test_what_is_wrong_with_kernel_data_sample_state_and_patterns_is_told_at_once() -> None:
    """On one H100: 20 bytes a parameter of four billion are more than its pool."""
    model = replace(experiment().model, embed=2**14, vocab=2**17)
    files = jaxtrain.TextFiles("no/*.txt", held_out_patterns="nor/*.md")
    source = jaxtrain.data.Mixture(((1.0, files), (1.0, jaxtrain.data.TokenFiles("none/*.tokens"))))
    wrong = experiment(
        model=model,
        data=jaxtrain.TextData(source, jaxtrain.data.TokenizerFile("no.json"), seq=16),
        execution=jaxtrain.Execution(attention="splash"),
        evaluation=jaxtrain.Evaluation(sample=jaxtrain.Sample("a", tokens=10**9)),
        fine_tuning=jaxtrain.FineTuning(trainable=("*", "layers.*")),
    )
    with pytest.raises(ValueError) as caught:
        jaxtrain.check(wrong, ROOT / "meshes/h100_1.toml")
    message = str(caught.value)
    for part in (
        "execution.attention='splash' is no kernel; use one such as "
        "jaxtrain.attention.Splash(), or None",
        "evaluation.sample: tokens=1000000000 is more",
        "fine_tuning.trainable: 'layers.*' names none of the leaves",
        "data: no file matches 'no/*.txt', 'nor/*.md'",
        "data: no file matches 'none/*.tokens'",
        "data: there is no tokenizer no.json",
        "63.7 GB, 75% of the memory of a h100_sxm",
        "; use for example 2 devices",
    ):
        assert part in message, part
    assert message.startswith(f"{message.count(chr(10) + '  - ')} things to mend")


def test_data_elsewhere_is_not_looked_for_and_what_is_here_is_told_of_its_splits() -> None:
    here = jaxtrain.TextFiles(str(ROOT / "tests" / "*.py"), held_out_patterns="no/*.md")
    given = experiment(data=jaxtrain.TextData(here, seq=16))
    jaxtrain.check(given, jaxtrain.mesh_from_axes(data=1), data_here=False)
    with pytest.raises(ValueError, match=r"1 thing to mend .*\n  - data: no file matches 'no/"):
        jaxtrain.check(given, jaxtrain.mesh_from_axes(data=1))
    given = experiment(data=jaxtrain.TextData(replace(here, held_out_patterns=()), seq=16))
    jaxtrain.check(given, jaxtrain.mesh_from_axes(data=1))
    whole = experiment(data=jaxtrain.TextData(jaxtrain.data.StdlibSource(held_out=0.0), seq=16))
    jaxtrain.check(whole, jaxtrain.mesh_from_axes(data=1))
    with pytest.raises(ValueError, match=r"held_out=0 of StdlibSource.* holds no document out"):
        evaluated = replace(whole, evaluation=jaxtrain.Evaluation())
        jaxtrain.check(evaluated, jaxtrain.mesh_from_axes(data=1))


@pytest.mark.parametrize(
    ("data", "field"),
    [
        (jaxtrain.TextData(jaxtrain.data.StdlibSource(), 3, seq=16), "data.tokenizer is 3"),  # type: ignore
        (jaxtrain.TextData(3, jaxtrain.data.ByteTokenizer(), seq=16), "data.source is 3"),  # type: ignore
    ],
)
def test_what_train_could_not_store_check_tells_with_all_else(data: Any, field: str) -> None:
    given = experiment(data=data, microbatches=3)
    with pytest.raises(ValueError, match=field):
        jaxtrain.check(given, jaxtrain.mesh_from_axes(data=1))


def test_a_value_of_another_kind_is_told_once() -> None:
    given = experiment(execution=jaxtrain.Execution(attention="splash"), microbatches=3)
    with pytest.raises(ValueError, match=r"2 things to mend") as told:
        jaxtrain.check(given, jaxtrain.mesh_from_axes(data=1))
    assert str(told.value).count("execution.attention") == 1


@pytest.mark.parametrize("kernel", ["splash", "none", 3, Splash, Splash()])
def test_a_kernel_is_a_value(kernel: Any) -> None:
    found = violations_of_fields(execution=jaxtrain.Execution(attention=kernel))
    near = {"none": "Blockwise()", 3: "Blockwise()"}.get(kernel, "Splash()")
    assert found == [] if kernel == Splash() else near in found[0]


@pytest.mark.parametrize("kernel", ["megablox", 3, Megablox, Megablox()])
def test_a_grouped_matmul_is_a_value(kernel: Any) -> None:
    found = violations_of_fields(execution=jaxtrain.Execution(grouped_matmul=kernel))
    told = "is no kernel; use a value of jaxtrain.moe such as BlockLoop(), or None"
    assert found == [] if kernel == Megablox() else told in found[0]


def moved(axes: dict[str, int], usable: float, **changes: Any) -> tuple[Any, Any]:
    """An experiment and a GPU that leaves a program so much."""
    spec = jaxtrain.mesh_from_axes(**axes)
    chip = replace(CHIPS["h100_sxm"], usable_gbytes=usable / 1e9)
    return experiment(**changes), replace(spec, chip=chip, simulated=False)


@pytest.mark.parametrize(
    ("axes", "changes", "remedy"),
    [
        ({"data": 2}, {}, "fit 2 devices: split it over more of the 2"),
        ({"fsdp": 2}, {"microbatches": 4}, "use for example 4 devices, or a smaller model"),
        ({"fsdp": 2}, {"microbatches": 4, "precision": jaxtrain.bf16}, "use for example 4 devices"),
        ({"data": 2}, {"sharding": RULES["zero1"], "precision": BF16_WEIGHTS}, "fit 2 devices"),
    ],
)
def test_the_least_a_step_holds_is_its_state_batch_and_gradients(
    axes: dict[str, int], changes: dict[str, Any], remedy: str
) -> None:
    """Gradients are as Adam's two moments are: split as they are, and of their width."""
    report = jaxtrain.check(experiment(**changes), jaxtrain.mesh_from_axes(**axes))
    counts = 2 * 4  # of steps
    least = report.bytes_per_device["total"] + (report.bytes_per_device["optimizer"] - counts) // 2
    jaxtrain.check(*moved(axes, least, **changes))
    with pytest.raises(ValueError, match=f"{remedy}"):
        jaxtrain.check(*moved(axes, least - 1, **changes))
    if "example 4" in remedy:
        jaxtrain.check(*moved({"fsdp": 4}, least - 1, **changes))
    given, machine = moved(axes, 1.0, **changes)
    assert jaxtrain.check(given, machine.simulate()).bytes_per_device == report.bytes_per_device


@pytest.mark.parametrize(
    ("rules", "axis", "share"),
    [("zero1", "data", 0.75), ("fsdp", "fsdp", 0.7), ("fsdp", "fsdp", 0.4)],
)
def test_as_many_devices_as_are_asked_for_are_enough(rules: str, axis: str, share: float) -> None:
    """Also where the sharding leaves a part of the state whole, as zero1 leaves the parameters."""
    changes = dict(sharding=RULES[rules], batch=64)
    report = jaxtrain.check(experiment(**changes), jaxtrain.mesh_from_axes(**{axis: 2}))
    parts = report.bytes_per_device
    room = share * (parts["total"] + parts["optimizer"] / 2)
    with pytest.raises(ValueError, match=r"use for example \d+ devices") as caught:
        jaxtrain.check(*moved({axis: 2}, room, **changes))
    devices = int(re.search("use for example ([0-9]+) devices", str(caught.value))[1])
    jaxtrain.check(*moved({axis: devices}, room, **changes))
    with pytest.raises(ValueError, match="before any activation"):
        jaxtrain.check(*moved({axis: devices // 2}, room, **changes))


def test_what_a_sharding_leaves_whole_wants_another_sharding() -> None:
    changes = dict(sharding=RULES["zero1"], batch=64)
    report = jaxtrain.check(experiment(**changes), jaxtrain.mesh_from_axes(data=2))
    room = 0.4 * report.bytes_per_device["total"]  # of which the parameters alone are more
    with pytest.raises(ValueError, match=r"whole on each device.*use sharding=fsdp\(\)") as caught:
        jaxtrain.check(*moved({"data": 2}, room, **changes))
    devices = int(re.search("fsdp=([0-9]+) under", str(caught.value))[1])
    jaxtrain.check(*moved({"fsdp": devices}, room, **changes | {"sharding": RULES["fsdp"]}))


def test_routers_that_learn_nothing_are_noted() -> None:
    (block,) = experiment().model.period
    for k, experts, noted in ((1, 4, True), (2, 4, False), (1, 1, False)):
        mixture = replace(block, mlp=jaxtrain.MoeConfig(64, experts, experts_per_token=k))
        model = replace(experiment().model, period=(block, mixture), layers=4)
        report = jaxtrain.check(experiment(model=model), jaxtrain.mesh_from_axes(data=1))
        told = "experts_per_token=1 in 2 of 4 layers: "
        assert (f"\nnote: {told}" in report.summary()) is noted
        assert len(report.as_json()["notes"]) == noted


@pytest.mark.parametrize(("seq", "use"), [(31, 30), (32, None), (61, 60), (62, None)])
def test_a_head_in_many_chunks_is_noted(seq: int, use: int | None) -> None:
    """31 is prime: a chunk is one position of 4 rows. 62 has 31 chunks, not four times the 10."""
    model = replace(experiment().model, chunk_tokens=25)
    given = experiment(model=model, data=jaxtrain.TextData(seq=seq))
    report = jaxtrain.check(given, jaxtrain.mesh_from_axes(fsdp=4))
    found = report.notes
    assert len(found) == (use is not None)
    if use is not None:
        assert f"seq={use}, or chunk_tokens={4 * seq} for a single one" in found[0]
        fixed = replace(given, data=jaxtrain.TextData(seq=use))
        assert not jaxtrain.check(fixed, jaxtrain.mesh_from_axes(fsdp=4)).notes
        whole = replace(given, model=replace(model, chunk_tokens=4 * seq))
        assert not jaxtrain.check(whole, jaxtrain.mesh_from_axes(fsdp=4)).notes


EVALUATION = jaxtrain.Evaluation()


def test_a_split_without_a_document_is_told_before_it_is_tokenised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("a text")
    (tmp_path / "empty.md").touch()
    files = jaxtrain.TextFiles(str(tmp_path / "*.txt"), held_out=0.5)
    sets = jaxtrain.Evaluation(sets={"empty": str(tmp_path / "empty.md")})
    one = "data: the corpus is one document, which is trained on, and none is held out"
    none = r"data: held_out=0 of TextFiles.* holds no document out: use evaluation=None"
    empty = r"evaluation\.sets\['empty'\]: split 'train' of TextFiles.* has no text: add documents"
    with pytest.raises(ValueError, match=one):
        checked(replace(files, held_out=0.01))
    with pytest.raises(ValueError, match=none):
        checked(replace(files, held_out=0.0))
    checked(replace(files, held_out=0.0), None)
    (tmp_path / "b.md").write_text("another")
    checked(replace(files, held_out=0.0, held_out_patterns=str(tmp_path / "b.md")))
    for n in range(8):
        (tmp_path / f"b{n}.txt").write_text(f"text {n}")
    with pytest.raises(ValueError, match=empty):
        checked(files, sets)
    learnt = {*(d.text for d in documents(files, "train"))}
    assert learnt and "a text" not in learnt, "the first is none of them"
    checked(files)
    (tmp_path / "empty.md").write_text(" ")
    checked(files, sets)
    read: list[str] = []
    real = jaxtrain.TextFiles.read
    monkeypatch.setattr(
        jaxtrain.TextFiles, "read", lambda s, p, split: read.append(p.path) or real(s, p, split)
    )
    monkeypatch.setattr("jaxtrain.data.text.LOOK_BYTES", 3)
    monkeypatch.setattr("jaxtrain.sources.files.is_held_out", lambda key, fraction: False)
    checked(files)  # not all was looked at
    assert [Path(path).name for path in read] == ["a.txt"] * 2


def checked(source: Any, evaluation: Any = EVALUATION) -> None:
    given = experiment(data=jaxtrain.TextData(source, seq=16), evaluation=evaluation)
    jaxtrain.check(given, jaxtrain.mesh_from_axes(data=1))


def test_a_run_says_as_many_parameters_as_check() -> None:
    """Without the rows that pad the vocabulary."""
    small = experiment(data=BigramChain(vocab=4, seq=4), steps=1, batch=1)
    padded = replace(small.model, vocab=20_000, vocab_multiple=50_000, tied=True)
    told = io.StringIO()
    given = replace(small, model=padded)
    jaxtrain.train(given, "cpu_1", stream=told)
    count = jaxtrain.check(given, "cpu_1").parameters
    assert 20_000 * 32 < count < 50_000 * 32
    assert f" {count / 1e6:.1f}M parameters on one device" in told.getvalue()
