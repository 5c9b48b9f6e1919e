"""`bench gpu` without a GPU: its parts at sizes that mean nothing, and that none costs another."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absent_gpu import NEW_JAX

from jaxtrain import cli
from jaxtrain.attention.online_softmax import Scoring
from jaxtrain.bench_gpu import calibration, experts, layer, model, parts, peer, saving
from jaxtrain.bench_gpu.documents import SyntheticDocuments, lengths
from jaxtrain.bench_gpu.model import Need, largest_batch
from jaxtrain.bench_gpu.results import LINES, TABLES, PartResult, over_torch, read_results, tables
from jaxtrain.bench_gpu.runner import bench_gpu, chosen
from jaxtrain.bench_gpu.setting import DRY, REAL, AttentionShape, Row, Setting, Sizes, Skipped
from jaxtrain.bench_gpu.timing import Timed, summary, timed
from jaxtrain.bench_gpu.worker import environment
from jaxtrain.mesh.hardware import CHIPS
from jaxtrain.moe import MosaicBlocks
from jaxtrain.moe.grouped import Asked
from jaxtrain.step.batches import fields_of, token_fields


@dataclass
class Told:
    """A setting of a dry run, and the rows that its part has told, by name."""

    out: Path

    def __post_init__(self) -> None:
        self.rows: dict[str, Row] = {}
        self.found: dict[str, list[Row]] = {}
        self.setting = Setting(True, "cpu", None, self.found, self.out, self._tell)

    def _tell(self, row: Row) -> None:
        self.rows.setdefault(row["row"], {}).update(row)


@pytest.fixture
def told(tmp_path: Path) -> Told:
    return Told(tmp_path)


# Rows of documents


def test_rows_are_packed_full_with_documents() -> None:
    config = SyntheticDocuments(vocab=50, seq=4096, mean=200)
    dataset = config.open("train", seed=3, cache_dir=Path())
    batch = dataset.rows(np.arange(64))
    assert fields_of(dataset, config).keys() == token_fields(config).keys()
    for i in range(64):
        row = {name: values[i] for name, values in batch.items()}
        ends = np.flatnonzero(np.diff(row["segments"]))
        assert (np.diff(row["segments"])[ends] == 1).all() and row["segments"][0] == 1
        restarts = np.flatnonzero(row["positions"] == 0)
        assert restarts.tolist() == [0, *(ends + 1)]
        assert (np.diff(row["positions"])[np.setdiff1d(np.arange(4095), ends)] == 1).all()
        assert np.flatnonzero(row["weights"] == 0).tolist() == ends.tolist()
        assert (row["tokens"][1:] == row["targets"][:-1]).all()
        assert row["tokens"].min() >= 0 and row["tokens"].max() < 50
    found = lengths(batch["positions"])
    assert sum(n * count for n, count in found.items()) == 64 * 4096
    mean = 64 * 4096 / sum(found.values())
    assert 150 < mean < 220  # a little less than asked for: rows cut the last
    again = dataset.rows(np.array([5, 2]))
    assert all((again[name] == batch[name][[5, 2]]).all() for name in batch)
    other = config.open("held_out", seed=3, cache_dir=Path()).rows(np.arange(1))
    assert (other["tokens"] != batch["tokens"][:1]).any()


# The largest batch


@pytest.mark.parametrize(
    ("own", "row", "usable", "most", "wanted"),
    [
        (100, 7, 1000, 500, 128),
        (100, 7, 1000, 20, 20),
        (100, 7, 107, 500, 1),
        (100, 7, 106, 500, 0),
        (100, 7, 1007, 500, 129),
    ],
)
def test_the_largest_batch_is_that_of_the_line(
    own: int, row: int, usable: int, most: int, wanted: int
) -> None:
    asked: list[int] = []

    def need(batch: int) -> Need:
        asked.append(batch)
        return Need(own + row * batch, 5.0 * batch)

    assert largest_batch(need, usable, most) == wanted
    assert len(asked) <= 3, "each is a compilation"


def test_a_program_that_takes_more_than_the_line_or_recomputes_is_too_large() -> None:
    def bent(batch: int) -> Need:
        return Need(10 * batch + (50 if batch > 80 else 0), 1.0 * batch)

    found = largest_batch(bent, 1000, 500)
    assert bent(found).peak <= 1000 and found > 85

    def squeezed(batch: int) -> Need:  # within the bytes, by making products again
        return Need(min(10 * batch, 800), batch * (1.3 if batch > 60 else 1.0))

    assert 50 < largest_batch(squeezed, 800, 500) <= 60


# What the parts measure


def test_pairs_are_those_that_the_masks_leave() -> None:
    shape = AttentionShape(3, 64, 2, 1, 8)
    _, _, starts = layer.operands(shape, 10, packed=True)
    i, j = np.ogrid[:64, :64]
    causal = np.broadcast_to(j <= i, (3, 64, 64))
    same = np.asarray(starts)[:, :, None] == np.asarray(starts)[:, None]
    assert layer.pairs(shape, starts) == (causal & same).sum()
    assert layer.pairs(shape, None) == causal.sum()


def test_kernels_are_held_against_the_reference(told: Told) -> None:
    layer.measure(told.setting, "blockwise")
    checked = [row for name, row in told.rows.items() if name.startswith("checked")]
    assert len(checked) == 3 and all(len(row) == 1 + 5 for row in checked)
    for row in checked:
        # The log-sum-exp may be equal to the bit: it depends on the processor's instructions.
        assert 0 <= row["lse_error"] < 1e-2
        assert all(0 < row[f"{name}_error"] < 1e-2 for name in ("o", "dq", "dk", "dv"))
    timings = [row for name, row in told.rows.items() if name.startswith("layer")]
    assert len(timings) == 2 and all(row["of_peak"] > 0 for row in timings)


def wrong(q: jax.Array, k: jax.Array, v: jax.Array, starts: Any, scoring: Scoring) -> Any:
    """A window that is one too long, and the wrong derivative."""
    return layer.Reference()(q, k, v, None, scoring)


def test_a_wrong_kernel_is_seen(told: Told) -> None:
    found = layer.check(told.setting, wrong, packed=True)
    assert all(found[f"{name}_error"] > 0.1 for name in ("o", "dq", "dk", "dv"))
    assert layer.check(told.setting, wrong, packed=False)["dq_error"] < 1e-2
    nan = jnp.array([1.0, math.nan])
    assert math.isnan(layer.error(nan, jnp.ones(2)))


class CheckedOnly(Setting):
    """Without the timings of an interpreted kernel."""

    @property
    def sizes(self) -> Sizes:
        return replace(DRY, layers={})


class OnGpu(Setting):
    """An A100, with the sizes of a dry run."""

    platform = "gpu"
    chip = CHIPS["a100_80g"]


def test_what_a_kernel_refuses_is_a_finding_and_where_it_cannot_run_it_is_skipped(
    told: Told,
) -> None:
    with pytest.raises(Skipped, match="the kernel runs on gpu, and this is cpu"):
        layer.measure(told.setting, "cudnn")
    layer.measure(CheckedOnly(True, "cpu", None, {}, told.out, told.setting.tell), "triton")
    assert "window=10 is not supported" in told.rows["checked, documents and window 10"]["refused"]
    assert told.rows["checked, documents"]["dk_error"] < 1e-2


@pytest.mark.parametrize("part", [experts, layer])
def test_kernels_by_mosaic_are_measured_on_hopper_alone(told: Told, part: Any) -> None:
    with pytest.raises(Skipped, match="the kernel runs on gpu, and this is cpu"):
        part.measure(told.setting, "mosaic")
    on_gpu = OnGpu(True, "gpu", None, {}, told.out, told.setting.tell)
    with pytest.raises(Skipped, match="the kernel runs on Hopper GPUs, and this is a100_80g"):
        part.measure(on_gpu, "mosaic")


@NEW_JAX
def test_mosaic_takes_the_sizes_that_are_measured() -> None:
    for shape in (REAL.checked_experts, REAL.experts):
        rows, dims = shape.chosen * shape.tokens, (shape.embed, shape.hidden)
        asked = Asked(rows, shape.experts, *dims, jnp.dtype(jnp.bfloat16))
        assert not MosaicBlocks().violations(asked)


@pytest.mark.parametrize("name", [n for n in experts.LAYERS if n != "mosaic"])
def test_every_mixture_is_the_dense_sum(told: Told, name: str) -> None:
    experts.measure(told.setting, name)
    for dtype, bound in (("float32", 1e-5), ("bfloat16", 2e-2)):
        row = told.rows[f"checked {dtype}"]
        errors = [value for key, value in row.items() if key.endswith("_error")]
        assert len(errors) == 6 and max(errors) < bound
    assert told.rows["layer"]["both_ms"] > 0


def test_the_chip_is_calibrated(told: Told) -> None:
    calibration.calibrate(told.setting, "")
    product = told.rows["matmul bfloat16 64"]
    assert product["tflops"] * product["us"] == pytest.approx(2e-6 * 64**3)
    peak = told.setting.chip.bf16_flops
    assert product["of_peak"] == pytest.approx(product["tflops"] * 1e12 / peak)
    copied = told.rows["copy, read and written"]
    assert copied["gbytes_per_s"] * copied["us"] == pytest.approx(2e-3 * DRY.copied)
    assert told.rows["shard_map with check_vma"]["runs"] is True


def test_a_call_is_timed_as_often_as_fills_a_round() -> None:
    calls: list[int] = []
    found = timed(lambda: calls.append(1), round_s=1e-4)
    assert len(calls) > 2 + 3 * 5 and 0 < found.seconds < 1e-4
    calls.clear()
    timed(lambda: calls.append(1), round_s=0.0)
    assert len(calls) == 2 + 3


def test_a_spread_is_between_the_slowest_and_the_quickest_round() -> None:
    assert summary([2.0, 1.0, 4.0]) == Timed(2.0, (4.0 - 1.0) / 2.0)


def test_a_state_is_saved_where_there_is_room(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    saving.measure(told.setting, "")
    assert told.rows["later save"]["next_step_s"] > 0
    assert not list(told.out.iterdir()), "what it has written is gone"
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 10}))
    with pytest.raises(Skipped, match="has 10 free"):
        saving.measure(told.setting, "")


@pytest.mark.exhaustive
def test_a_model_is_timed_at_the_largest_batch_that_fits(told: Told) -> None:
    with pytest.raises(Skipped, match="llama3_1b/batch finds, which found nothing"):
        model.step(told.setting, "largest")
    model.step(told.setting, "batch")
    batch = told.rows["largest batch"]["batch"]
    told.found["llama3_1b/batch"] = [told.rows["largest batch"]]
    model.step(told.setting, "largest")
    row = told.rows["jaxtrain, largest"]
    assert row["batch"] == batch > 1 and row["program_gb"] * 1e9 <= DRY.usable
    assert row["tokens_per_s"] == pytest.approx(batch * 32 / row["step_s"])
    assert 0 < row["mfu_causal"] < row["mfu_full"], "documents are not rows"
    assert 0 < row["peaks_s"] < row["step_s"], "no step is quicker than the chip's peaks"
    assert row["first_loss"] == pytest.approx(math.log(256), rel=0.05)


def test_the_model_is_llama3_1b_on_documents_of_its_length() -> None:
    real = Setting(False, "NVIDIA H200", None, {}, Path(), print)
    assert real.spec.chip.name == "h200" and real.platform == "gpu"
    e = model.experiment(real, model.Variant(16, chunk_tokens=4096))
    assert (e.model.vocab, e.model.layers, e.model.chunk_tokens) == (128_256, 16, 4096)
    assert (e.data.seq, e.batch, e.microbatches) == (4096, 16, 1)
    loop = model.assembled(real, model.Variant(16)).loop
    assert (loop.unroll, loop.remat) == (True, model.REMAT), "the loop is the platform's own"
    loop = model.assembled(real, model.Variant(16, "full", unroll=False)).loop
    assert (loop.unroll, loop.remat) == (False, "full")
    options = model.assembled(real, model.Variant(16, options={"xla_a": 1})).compiler_options
    assert options == {"xla_a": 1}
    with pytest.raises(ValueError, match="is not in the table of chips"):
        replace(real, device="Voodoo2").spec  # noqa: B018
    with pytest.raises(ValueError, match="has 8 devices, and bench gpu measures one"):
        replace(real, mesh="h100_8").spec  # noqa: B018


def test_a_loop_over_layers_is_measured_beside_unrolled_ones(
    told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[model.Variant] = []
    monkeypatch.setattr(model, "best_batch", lambda _: 3)
    monkeypatch.setattr(model, "measure", lambda _, row, variant: measured.append(variant))
    measure, argument = parts.measured_by("sweep/scanned")
    measure(told.setting, argument)
    assert measured == [model.Variant(3, unroll=False)]


def test_best_batches_are_those_of_the_most_tokens_a_second(
    told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    told.found["llama3_1b/largest"] = [{"batch": 8, "program_gb": 1.0}]
    with pytest.raises(Skipped, match="which found nothing"):
        model.best_batch(told.setting)  # compiled, and then it hung
    told.found["llama3_1b/largest"] += [{"batch": 8, "tokens_per_s": 10.0, "loss": 1.0}]
    told.found["llama3_1b/half"] = [{"batch": 4, "tokens_per_s": 11.0, "loss": 1.0}]
    assert model.best_batch(told.setting) == 4
    trained: list[int] = []
    monkeypatch.setattr(peer, "_trained", lambda _, batch: trained.append(batch) or {})
    told.found["llama3_1b/torch/4"] = [{"batch": 4, "tokens_per_s": 5.0}]
    told.found["llama3_1b/torch/8"] = [{"batch": 8, "tokens_per_s": 6.0}]
    told.found["llama3_1b/torch/16"] = [{"batch": 16, "out_of_memory": True}]
    peer.again(told.setting, "1")
    assert trained == [8]
    with pytest.raises(Skipped, match="a batch of 16 does not fit"):
        peer.measure(told.setting, "32")


# Parts and processes


def test_every_part_is_measured_by_something() -> None:
    assert len(set(parts.PARTS)) == len(parts.PARTS)
    assert set(parts.KERNELS) == set(layer.KERNELS)
    found = [parts.measured_by(part) for part in parts.PARTS]
    assert all(callable(function) for function, _ in found)
    whats = dict(zip(parts.PARTS, (what for _, what in found), strict=True))
    assert whats["llama3_1b/turn/torch/2"] == "2" and whats["save"] == ""
    assert whats["sweep/flag/cublaslt"] in parts.FLAGS
    assert set(parts.PRECISIONS) == set(model.PRECISIONS)
    of_torch = [part for part in parts.PARTS if "torch" in part]
    assert [part for part in parts.PARTS if parts.of_torch(part)] == of_torch
    order = [parts.PARTS.index(f"llama3_1b/turn/{who}") for who in ("jaxtrain/1", "torch/1")]
    assert order[1] == order[0] + 1, "they take turns"


def test_parts_are_chosen_by_name_and_group() -> None:
    assert chosen(None) == list(parts.PARTS)
    asked = chosen(["save", "attention", "llama3_1b/turn"])
    assert asked == [
        *(f"attention/{kernel}" for kernel in parts.KERNELS),
        *(part for part in parts.PARTS if "/turn/" in part),
        "save",
    ]
    with pytest.raises(ValueError, match=r"no part 'atention'; did you mean 'attention'\?"):
        chosen(["atention", "save"])


def test_a_process_has_the_device_for_itself(tmp_path: Path) -> None:
    given = {"HOME": "/home", "CUDA_VISIBLE_DEVICES": "3"}
    env = environment("save", dry=False, out=tmp_path, environ=given)
    assert env.items() >= given.items()
    assert env["XLA_CLIENT_MEM_FRACTION"] == "0.92" and "JAX_PLATFORMS" not in env
    assert env["JAX_COMPILATION_CACHE_DIR"] == str(tmp_path / "programs")
    own = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5"}
    env = environment("save", dry=False, out=tmp_path, environ=own)
    assert env["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.5"
    assert "XLA_CLIENT_MEM_FRACTION" not in env, "JAX refuses both"
    for part, dry in (("llama3_1b/torch/4", False), ("save", True)):
        assert environment(part, dry=dry, out=tmp_path, environ={})["JAX_PLATFORMS"] == "cpu"


LINES_TOLD = ({"device": "toy"}, {"row": {"row": "a", "ms": 1.5}})
SAYS = "".join(f"print({json.dumps(line)!r}, flush=True); " for line in LINES_TOLD)
PROGRAMS = {
    "calibration": SAYS,
    "attention/cudnn": SAYS + "import os; os.abort()",
    "attention/triton": SAYS + "import time; time.sleep(60)",
    "attention/splash": 'print(\'{"skipped": "not here"}\')',
    "save": SAYS + 'print(\'{"failed": "OSError: full"}\'); raise SystemExit(1)',
}


def by(programs: dict[str, str], log: list[str]) -> Callable[[str], Sequence[str]]:
    def command(part: str) -> Sequence[str]:
        log.append(part)
        return ["-c", programs[part]]

    return command


def test_a_part_that_fails_costs_itself_and_what_is_done_is_not_run_again(tmp_path: Path) -> None:
    out, log, lines = tmp_path / "out", list[str](), list[str]()
    run = {"dry_run": True, "limit_s": 3.0, "command": by(PROGRAMS, log)}
    found = bench_gpu(out, parts=list(PROGRAMS), progress=lines.append, **run).results
    states = {part: each.state for part, each in found.items()}
    assert states == {
        "calibration": "done",
        "attention/cudnn": "failed",
        "attention/triton": "failed",
        "attention/splash": "skipped",
        "save": "failed",
    }
    assert all(found[part].rows == [{"row": "a", "ms": 1.5}] for part in ("calibration", "save"))
    assert found["attention/cudnn"].rows, "what it told before it crashed"
    assert "ended with -6" in found["attention/cudnn"].why
    assert found["attention/triton"].why.startswith("not done after 3 seconds")
    assert 3 <= found["attention/triton"].seconds < 20
    assert any("failed" in line and "OSError: full" in line for line in lines)
    assert log == list(PROGRAMS)
    first = (out / TABLES).read_text()
    others = {part: SAYS for part in parts.PARTS}
    again = bench_gpu(out, dry_run=True, command=by(others, log))
    ended = {part for part, state in states.items() if state != "failed"}
    assert sorted(log[5:]) == sorted(set(parts.PARTS) - ended), "what failed is taken again"
    assert list(again.results) == list(parts.PARTS)
    assert again.results["attention/splash"].state == "skipped"
    bench_gpu(out, parts=["attention/splash"], dry_run=True, command=by(others, log))
    assert read_results(out)["attention/splash"].state == "done", "asked for by name"
    assert "- attention/splash skipped: not here" in first, "the tables say why"
    assert "| a | 1.5 |" in (out / TABLES).read_text()


def test_results_of_different_things_are_kept_apart(tmp_path: Path) -> None:
    log: list[str] = []
    command = by({"calibration": SAYS, "save": SAYS.replace("toy", "other")}, log)
    bench_gpu(tmp_path, parts=["calibration"], dry_run=True, command=command)
    with pytest.raises(ValueError, match="are a dry run's, not measured; give another --out"):
        bench_gpu(tmp_path, command=command)
    with pytest.raises(ValueError, match="was measured on toy, and this is other; give another"):
        bench_gpu(tmp_path, parts=["save"], dry_run=True, command=command)
    assert list(read_results(tmp_path)) == ["calibration"]
    refuses = by({"calibration": 'print(\'{"refused": "no accelerator"}\')'}, log)
    with pytest.raises(ValueError, match="no accelerator"):
        bench_gpu(tmp_path / "other", parts=["calibration"], command=refuses)
    assert read_results(tmp_path / "other") == {}
    (tmp_path / LINES).write_text('{"step": 1}\n')
    with pytest.raises(ValueError, match="holds no results of bench gpu"):
        bench_gpu(tmp_path, dry_run=True, command=command)


def test_tables_have_a_line_for_each_row_and_the_ratio_to_torch() -> None:
    def result(part: str, *rows: Row) -> PartResult:
        return PartResult(part, "done", "toy", False, 1.0, list(rows))

    turns = [("jaxtrain", 1, 30.0), ("torch", 1, 20.0), ("jaxtrain", 2, 33.0), ("torch", 2, 22.0)]
    found = [
        result("calibration", {"row": "copy", "gbytes_per_s": 2.0}, {"row": "copy", "us": 3.0}),
        *(
            result(f"llama3_1b/turn/{who}/{n}", {"row": f"{who} {n}", "tokens_per_s": pace})
            for who, n, pace in turns
        ),
    ]
    text = tables(found)
    assert "| copy | 2 | 3 |" in text
    assert "| llama3_1b/turn/torch/2 | torch 2 | 22 |" in text
    by_part = {each.part: each for each in found}
    assert over_torch(by_part) == pytest.approx(1.5)
    assert "tokens a second over torch's, in turn: 1.500" in text
    del by_part["llama3_1b/turn/torch/1"], by_part["llama3_1b/turn/torch/2"]
    assert over_torch(by_part) is None


def test_the_command_measures_in_a_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    asked = ["bench", "gpu", "--dry-run", "--out", str(tmp_path / "out"), "--json"]
    assert cli.main([*asked, "--parts", "experts/jaxtrain,attention/cudnn"]) == 0
    found = json.loads(capsys.readouterr().out)
    states = {each["part"]: (each["state"], each["why"]) for each in found["parts"]}
    assert states["experts/jaxtrain"] == ("done", None)
    assert states["attention/cudnn"] == ("skipped", "the kernel runs on gpu, and this is cpu")
    assert cli.main(["bench", "gpu", "--out", str(tmp_path / "real"), "--parts", "save"]) == 2
    assert "JAX sees no accelerator here; --dry-run" in capsys.readouterr().err


@pytest.mark.exhaustive
def test_every_part_goes_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    found = bench_gpu(tmp_path, dry_run=True).results
    here = [part for part in parts.PARTS if not parts.of_torch(part)]
    elsewhere = {part for part in here if found[part].state == "skipped"}
    assert all(found[part].state != "failed" for part in parts.PARTS), tables(found.values())
    options = {
        f"sweep/flag/{name}" for name, given in parts.FLAGS.items() if "xla_gpu" in str(given)
    }
    assert elsewhere == {"attention/cudnn"} | options
    assert all(found[part].rows for part in set(here) - elsewhere)
    with_torch = peer.importlib.util.find_spec("torch") is not None
    for part in set(parts.PARTS) - set(here):
        assert (found[part].state == "done") == with_torch, found[part].why


def test_sizes_that_are_measured_are_no_toys() -> None:
    assert REAL.saved == 15e9 and not REAL.shrunk and REAL.usable is None
    assert REAL.experts.tokens == 16384 and REAL.layers["8B"].seq == 8192
