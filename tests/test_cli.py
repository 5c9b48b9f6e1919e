"""The command line: exit codes, what it refuses and how, and that refusing writes nothing."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import types
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest

import jaxtrain
from jaxtrain import cli
from jaxtrain.certificate import certify as certify_module
from jaxtrain.checkpoint import committed_steps, manager, storage
from jaxtrain.checkpoint.storage import CheckpointError, DamagedCheckpoint, FailedSave
from jaxtrain.cli import train as train_command
from jaxtrain.cli.shared import Interrupted, print_failure, signals_to, tell_dropped
from jaxtrain.cluster.phases import Phases
from jaxtrain.cluster.sampler import SUPERVISOR
from jaxtrain.fault_tolerance.ledger import read_ledger
from jaxtrain.run.directory import left_in
from jaxtrain.session.session import Session

ROOT = Path(__file__).parents[1]

FIELDS = {
    "heads": 4,
    "kv_heads": 4,
    "mlp": 16,
    "vocab": 16,
    "batch": 8,
    "seq": 8,
    "steps": 4,
    "data": "BigramChain(vocab=16, seq={seq})",
    "more": "",
}

EXPERIMENT = """
import time
from dataclasses import dataclass
from typing import Any
from jaxtrain import *
from jaxtrain.collectives import *
from jaxtrain.data import *
from jaxtrain.nn import *

@dataclass(frozen=True)
class Slow:
    '''Rows that take their time, so that a signal finds the run at work.'''
    data: Any

    def open(self, split, *, seed, cache_dir):
        dataset = self.data.open(split, seed=seed, cache_dir=cache_dir)
        rows = dataset.rows
        dataset.rows = lambda indices: (time.sleep(0.01), rows(indices))[1]
        return dataset

@dataclass(frozen=True)
class Fails:
    '''Rows until those of the batch after so many steps, where something is raised.'''
    data: Any
    steps: int

    def open(self, split, *, seed, cache_dir):
        dataset = self.data.open(split, seed=seed, cache_dir=cache_dir)
        raise_it = None
        rows = dataset.rows

        def until(indices):
            if raise_it is not None and min(indices) >= 8 * self.steps:
                raise raise_it
            return rows(indices)

        dataset.rows = until
        return dataset

def experiment():
    block = BlockConfig(
        AttentionConfig(heads={heads}, kv_heads={kv_heads}, head_dim=4), MlpConfig(hidden={mlp})
    )
    return Experiment(
        model=DecoderConfig(
            vocab={vocab}, embed=8, layers=1, period=(block,), tied=True, vocab_multiple=16
        ),
        data={data},
        optimizer=AdamW(1e-2),
        steps={steps},
        batch={batch},
        evaluation=None,
        logging=Logging(every=1, tensorboard=False),
        {more}
    )
"""

MESH = 'chip = "cpu"\ndevices = {devices}\n[axes]\n{axes}\n'


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory and home of the test's own; changes of the environment are undone."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("JAXTRAIN_CACHE")
    flags = os.environ.get("XLA_FLAGS", "")  # those of the tests' own compiler
    monkeypatch.setenv("XLA_FLAGS", f"{flags} --xla_force_host_platform_device_count=8".strip())
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")


def write(name: str = "small.py", **fields: Any) -> str:
    values = {**FIELDS, **fields}
    values["data"] = values["data"].format(**values)
    Path(name).write_text(EXPERIMENT.format(**values))
    return name


def mesh(devices: int = 1, **axes: int) -> str:
    lines = "\n".join(f"{axis} = {size}" for axis, size in (axes or {"data": 1}).items())
    Path("mesh.toml").write_text(MESH.format(devices=devices, axes=lines))
    return "mesh.toml"


def losses(run: str) -> list[tuple[int, float]]:
    lines = (Path(run) / "metrics.jsonl").read_text().splitlines()
    return [(line["step"], line["loss"]) for line in map(json.loads, lines)]


def test_version_says_what_a_report_needs(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    said = capsys.readouterr().out
    assert stop.value.code == 0
    assert re.fullmatch(
        r"jaxtrain \d+\.\d+\.\d+, jax [\d.]+\S*, jaxlib [\d.]+\S*, Python 3\.\d+\.\S+\n", said
    )
    assert jax.__version__ in said


def test_the_flags_of_train_are_frozen() -> None:
    """What an experiment or a mesh file can say has no flag beside it."""
    actions = cli._parser()._actions
    commands = next(a for a in actions if isinstance(a, argparse._SubParsersAction))
    actions = commands.choices["train"]._actions
    assert {flag for action in actions for flag in action.option_strings} == {
        *("-h", "--help"),
        *(
            "--mesh",
            "--run-dir",
            "--name",
            "--fresh",
            "--fresh-once",
            "--numbered",
            "--from",
            "--steps",
            "--set",
            "--simulate",
        ),
        *("--coordinator", "--processes", "--process"),
    }
    assert [a.dest for a in actions if not a.option_strings] == ["experiment"]


def test_train_runs_resumes_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    train = ["train", write(), "--mesh", mesh(4, fsdp=2, tensor=2)]
    assert cli.main([*train, "--steps", "2"]) == 0
    assert re.search(r"^[\d:]{8} done: 2 steps", capsys.readouterr().out, re.MULTILINE)
    assert cli.main(train) == 0
    said = capsys.readouterr().out
    assert "resuming at step 2" in said and "done: 4 steps" in said and "runs/small" in said
    assert cli.main([*train, "--run-dir", "whole"]) == 0
    assert losses("runs/small") == losses("whole")
    capsys.readouterr()
    assert cli.main(["train", "small.py", "--mesh", mesh(), "--steps", "2"]) == 2
    said = capsys.readouterr()
    assert "runs/small is at step 4 already" in said.err and "done" not in said.out


@pytest.mark.parametrize(
    "error",
    [
        "OSError(28, 'No space left on device')",
        "ValueError('rows')",
        "BrokenPipeError(32)",
        "SystemExit(0)",
        "SystemExit(2)",
    ],
)
def test_what_a_run_fails_of_once_it_takes_steps_is_no_refusal(
    error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever its type, of the data's own code: it is told with its traceback, and the next start
    goes on."""
    data = "Fails(BigramChain(vocab=16, seq={seq}), 3)"
    train = ["train", write(data=data, more="checkpoints=SavePolicy(every=1),"), "--mesh", mesh()]
    text = Path("small.py").read_text()
    failing = text.replace("raise_it = None", f"raise_it = {error}")
    assert failing != text
    Path("small.py").write_text(failing)
    assert cli.main(train) == 1
    said = capsys.readouterr()
    assert "Traceback" in said.err and said.err.strip().splitlines()[-1].startswith(
        error.partition("(")[0]
    )
    Path("small.py").write_text(text)
    assert cli.main(train) == 0
    assert re.search(r"resuming at step [23]\b", capsys.readouterr().out)


def test_a_resumed_run_says_which_lines_of_its_metrics_are_gone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main([*train_of()(), "--steps", "2"]) == 0
    metrics = Path("runs/small/metrics.jsonl")
    metrics.write_bytes(metrics.read_bytes()[:-20])
    capsys.readouterr()
    assert cli.main(train_of()()) == 0
    told = f"NOTE the last line of {metrics} was cut off; it is dropped\n"
    assert capsys.readouterr().out.count(told) == 1


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (OSError(5, "Input/output error"), 1, "jaxtrain: Input/output error\n"),
        (FileNotFoundError(2, "Gone", "x"), 2, "jaxtrain: Gone: x\n"),
        (BrokenPipeError(32, "Broken pipe"), 141, ""),
    ],
    ids=str,
)
def test_of_any_command_a_disk_that_fails_is_no_refusal(
    error: Exception,
    code: int,
    told: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(options: Any) -> int:
        raise error

    monkeypatch.setattr(cli.verify, "verify_command", fails)
    assert cli.main(["verify", "run"]) == code
    assert capsys.readouterr().err == told


def test_a_reader_of_the_output_that_goes_before_the_first_step_is_no_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*given: Any, **named: Any) -> Any:
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr("jaxtrain.run.loop.train", fails)
    assert cli.main(train_of()()) == 141


def test_where_what_is_saved_cannot_be_seen_the_exit_code_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def ill(run_dir: Path, *, anew: str, text: str | None) -> Any:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("jaxtrain.run.directory.left_in", ill)
    unseen = "stopped; what is saved in run cannot be seen: Input/output error"
    stopped: Any = types.SimpleNamespace(stopped=True, saved=4)
    assert train_command._outcome(stopped, Path("run"), anew="") == (75, unseen)
    for anew in ("", "fresh"):
        assert train_command._outcome(None, Path("run"), anew=anew) == (130, unseen)


BEFORE = {
    "ValueError('rows')": "jaxtrain: rows\n",
    "FileNotFoundError(2, 'No such file', 'corpus.txt')": "jaxtrain: No such file: corpus.txt\n",
    "PermissionError(13, 'Denied')": "jaxtrain: Denied\n",
    "OSError(36, 'Too long', 'x')": "jaxtrain: Too long: x\n",
    "OSError(5, 'Input/output error')": "",
    "ConnectionResetError(104, 'Reset')": "",
    "RuntimeError('rows')": "",
}


@pytest.mark.parametrize(("error", "line"), BEFORE.items(), ids=BEFORE)
def test_before_the_first_step_what_may_pass_is_no_refusal(
    error: str, line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one process as with several, of which the one that fails leaves at once."""
    text = Path(write(data="Fails(BigramChain(vocab=16, seq={seq}), 3)")).read_text()
    opened = "dataset = self.data.open(split, seed=seed, cache_dir=cache_dir)\n        raise_it"
    assert opened in text
    Path("small.py").write_text(text.replace(opened, f"raise {error}\n        raise_it"))
    codes = [cli.main(["train", "small.py", "--mesh", mesh()])]
    said = [capsys.readouterr().err]
    monkeypatch.setattr(train_command.os, "_exit", codes.append)
    monkeypatch.setattr(train_command, "settle_streams", lambda: None)
    ledger = types.SimpleNamespace(keep=lambda: None)
    train_command.LeaveAtOnce(Phases(), ledger).leave(eval(error))  # type: ignore[arg-type]
    said.append(capsys.readouterr().err)
    assert codes == ([2, 2] if line else [1, 1])
    for told in said:
        assert told == line if line else told.strip().splitlines()[-1].startswith(error[:7])


@pytest.mark.parametrize(
    ("fail", "begins"), [({2}, ""), ({2, 3}, "step 2"), ({1, 2, 3}, "the beginning")], ids=str
)
def test_a_last_save_that_fails_is_told_without_a_traceback(
    fail: set[int], begins: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """fail: of the saves of steps 2 and 4, and of 4 on the way out."""
    tries, make = itertools.count(1), manager.make_and_remove

    def full(directory: Path) -> None:
        if next(tries) in fail:
            raise OSError(28, "No space left on device", str(directory))
        make(directory)

    monkeypatch.setattr(manager, "make_and_remove", full)
    train = ["train", write(more="checkpoints=SavePolicy(every=2),"), "--mesh", mesh()]
    assert cli.main([*train, "--steps", "4"]) == 1
    out, said = capsys.readouterr()
    remedy = f"; make room or mend the directory, and start the run again: it goes on from {begins}"
    if not begins:
        remedy = "; a second try saved it: start the run again"
    assert "Traceback" not in said and said.endswith(f"{remedy}\n")
    assert out.count("; the run goes on, and its next save tries again") == (1 in fail)


def test_what_fails_of_a_checkpoint_is_a_line_and_says_no_more_than_it_knows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "4").mkdir()
    place: Any = {"step": 4, "directory": tmp_path, "remedy": "mend it"}
    damaged = DamagedCheckpoint(["a byte"], **place)
    damaged.add_note("one more")
    print_failure(damaged)
    assert capsys.readouterr().err == f"jaxtrain: {damaged}\none more\n"
    print_failure(CheckpointError("not set aside", **place))
    assert capsys.readouterr().err.endswith("; mend it\n")

    def ill(directory: Path) -> list[int]:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(storage, "committed_steps", ill)
    print_failure(FailedSave("no room", **place))
    told = capsys.readouterr().err
    assert told.endswith("; mend it, and start the run again: it goes on from the newest save\n")
    assert "cannot be seen (Input/output error)" in told


@pytest.mark.parametrize(
    ("kind", "first", "code"), [("Damaged", -1, 2), ("Damaged", 0, 1), ("Failed", 0, 1)]
)
def test_one_of_several_leaves_with_a_line_too(
    kind: str,
    first: int,
    code: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Steps none of which can be gone on from are a refusal, as with one process."""
    place: Any = {"step": 4, "directory": tmp_path, "remedy": "mend it"}
    errors = {
        "Damaged": DamagedCheckpoint(["a byte"], **place),
        "Failed": FailedSave("no room", **place),
    }
    codes: list[int] = []
    monkeypatch.setattr(train_command.os, "_exit", codes.append)
    monkeypatch.setattr(train_command, "settle_streams", lambda: None)
    phases = Phases()
    if first >= 0:
        phases.begin_at(first)
    ledger = types.SimpleNamespace(keep=lambda: None)
    train_command.LeaveAtOnce(phases, ledger).leave(errors[kind])  # type: ignore[arg-type]
    assert codes == [code]
    told = capsys.readouterr().err
    assert told.startswith("jaxtrain: checkpoint step 4") and "Traceback" not in told


def test_a_process_of_a_launch_says_who_starts_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SUPERVISOR, "41")
    monkeypatch.setattr(train_command, "end_with_parent", lambda process: None)
    assert cli.main(["train", write(), "--mesh", mesh(), "--steps", "1"]) == 0
    assert Path("runs/small/.lock").read_text() == f"{os.getpid()} 41"


# Refusals


def train_of(
    devices: int = 1, axes: dict[str, int] | None = None, **fields: Any
) -> Callable[[], list[str]]:
    return lambda: ["train", write(**fields), "--mesh", mesh(devices, **(axes or {}))]


def train_file(text: str) -> Callable[..., Any]:
    def arguments() -> list[str]:
        Path("other.py").write_text(text)
        return ["train", "other.py", "--mesh", mesh()]

    return arguments


def train_mesh(text: str) -> Callable[..., Any]:
    def arguments() -> list[str]:
        Path("other.toml").write_text(text)
        return ["train", write(), "--mesh", "other.toml"]

    return arguments


def text_data(patterns: str) -> str:
    return f"TextData(TextFiles({patterns!r}), ByteTokenizer(), seq=8)"


def corpus(content: bytes | None) -> Callable[..., Any]:
    def arguments() -> list[str]:
        if content is not None:
            Path("corpus.txt").write_bytes(content)
        return train_of(data=text_data("corpus.txt"), vocab=257)()

    return arguments


REFUSED: dict[str, tuple[Callable[..., list[str]], tuple[str, ...]]] = {
    "unknown field": (
        train_of(more="bacth=8"), ("small.py", "line ", "bacth", "did you mean 'batch'?"),
    ),
    "unknown field set": (
        lambda: [*train_of()(), "--set", "bacth=8"],
        ("--set bacth=8", "no field 'bacth'", "did you mean 'batch'"),
    ),
    "value of another kind": (
        lambda: [*train_of()(), "--set", "batch='many'"],
        ("batch", "'many'", "give an int"),
    ),
    "no experiment file": (
        lambda: (write(), ["train", "smal.py", "--mesh", mesh()])[1],
        ("no experiment file smal.py", "did you mean small.py"),
    ),
    "experiment with a syntax error": (
        train_file("def experiment(:\n"), ("other.py does not load", "SyntaxError"),
    ),
    "experiment that imports what is not there": (
        train_file("from jaxtrain import Experimant\n"), ("other.py does not load", "Experimant"),
    ),
    "no function experiment": (
        train_file("x = 1\n"), ("other.py has no function experiment()", "define one"),
    ),
    "experiment returns something else": (
        train_file("def experiment():\n    return 3\n"),
        ("returned int", "return jaxtrain.Experiment"),
    ),
    "a closure in a field": (
        train_of(more="execution=Execution(attention=lambda: 1),"),
        ("experiment.execution.attention", "lambda", "top of a module"),
    ),
    "no mesh file": (
        lambda: (mesh(), ["train", write(), "--mesh", "mess.toml"])[1],
        ("mess.toml", "No such file", "mesh.toml"),
    ),
    "mesh not TOML": (train_mesh("axes = ["), ("other.toml is not a TOML file",)),
    "mesh of an unknown chip": (
        train_mesh(MESH.format(devices=1, axes="data = 1").replace('"cpu"', '"cpv"')),
        ("other.toml", "cpv", "cpu"),
    ),
    "axes that do not multiply": (
        train_of(8, {"data": 2, "fsdp": 2}),
        ("data=2 x fsdp=2 multiply to 4", "8 devices", "set devices = 4"),
    ),
    "heads": (
        train_of(4, {"tensor": 4}, heads=6, kv_heads=6),
        ("heads=6 does not split over tensor=4", "use heads=12,", "kv_heads=8 with heads=8"),
    ),
    "kv_heads": (
        train_of(4, {"tensor": 4}, heads=4, kv_heads=2),
        ("kv_heads=2 does not split over tensor=4", "tensor=2"),
    ),
    "heads over kv_heads": (
        train_of(heads=4, kv_heads=3),
        ("heads=4 is not a multiple of kv_heads=3", "use kv_heads=2"),
    ),
    "mlp": (train_of(4, {"tensor": 4}, mlp=18), ("hidden=18", "tensor=4", "use hidden=16 or 20")),
    "batch": (
        train_of(8, {"data": 4, "fsdp": 2}, batch=12),
        ("batch=12", "data=4 x fsdp=2 = 8 ways", "use batch=8 or 16"),
    ),
    "seq": (
        train_of(8, {"fsdp": 4, "tensor": 2}, batch=4, seq=7),
        ("data.seq=7", "7 tokens", "tensor=2", "use seq=6 or 8"),
    ),
    "no corpus": (corpus(None), ("corpus.txt", "no file matches")),
    "empty corpus": (corpus(b""), ("corpus.txt",)),
    "corpus not UTF-8": (corpus(b"abc\xff\xfe def " * 9), ("corpus.txt", "not UTF-8 at byte 3")),
    "a token id outside the vocabulary": (
        train_of(vocab=12), ("token ids up to 15", "model.vocab=12", "use vocab=16"),
    ),
    "devices that are not here": (
        lambda: ["train", write(), "--mesh", str(ROOT / "meshes" / "h100_8.toml")],
        ("h100_8.toml needs 8 devices", "--simulate"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_refused_with_code_2_and_nothing_is_written(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments, wanted = REFUSED[name][0](), REFUSED[name][1]
    monkeypatch.setattr(Session, "step", lambda *_: pytest.fail("a step was run"))
    before = sorted(Path().rglob("*"))
    assert cli.main(arguments) == 2
    streams = capsys.readouterr()
    assert streams.err.startswith("jaxtrain: ")
    for part in wanted:
        assert part in streams.err
    assert "Traceback" not in streams.err
    after = [p for p in Path().rglob("*") if "__pycache__" not in p.parts]
    assert [p for p in sorted(after) if p not in before and p.parts[0] != "home"] == []


def test_every_violation_is_told_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = train_of(8, {"fsdp": 2, "tensor": 4}, heads=6, kv_heads=6, mlp=18, batch=7)()
    assert cli.main(arguments) == 2
    told = capsys.readouterr().err
    for part in ("heads=6", "kv_heads=6", "hidden=18", "batch=7"):
        assert part in told


def test_the_run_directory_of_another_experiment_is_refused_and_kept(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["--mesh", mesh(), "--run-dir", "run"]
    assert cli.main(["train", write(steps=2), *arguments]) == 0
    kept = {p: p.stat().st_mtime_ns for p in Path("run").rglob("*")}
    assert cli.main(["train", write(steps=2, batch=4), *arguments]) == 2
    told = capsys.readouterr().err
    assert "experiment.batch was 8, now 4" in told and "another --run-dir" in told
    assert {p: p.stat().st_mtime_ns for p in Path("run").rglob("*")} == kept


def test_a_full_disk_is_refused_before_the_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(100, 90, 10))
    monkeypatch.setattr(Session, "step", lambda *_: pytest.fail("a step was run"))
    assert cli.main(train_of()()) == 2
    told = capsys.readouterr().err
    assert "10 are free" in told and "runs/small" in told and "--run-dir" in told
    assert not [p for p in Path("runs").rglob("*") if p.is_file()]


def test_a_disk_that_fills_costs_the_log_and_not_the_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from jaxtrain.files.appended import AppendedFile

    def full(file: Any, record: bytes) -> None:
        raise OSError(28, "No space left on device", "runs/small/metrics.jsonl")

    monkeypatch.setattr(AppendedFile, "append", full)
    assert cli.main(train_of()()) == 0
    out = capsys.readouterr().out
    assert out.count("No space left on device") == out.count("NOT LOGGED step") == 4


def test_verify_names_what_is_damaged_and_exits_with_1(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(train_of()()) == 0
    assert cli.main(["verify", "runs/small"]) == 0
    config = Path("runs/small/config.json")
    stored = config.read_text()
    for text, says in ("{", "config.json cannot be read"), ("{}", "names no experiment"):
        config.write_text(text)
        capsys.readouterr()
        assert cli.main(["verify", "runs/small", "--json"]) == 1
        said = capsys.readouterr()
        found = json.loads(said.out)
        assert says in found["config"] and found["damaged"] == []
        assert f"DAMAGED {found['config']}" in said.err
    config.unlink()
    assert cli.main(["verify", "runs/small"]) == 1
    other = json.loads(stored)
    other["experiment"]["logging"]["every"] += 1  # which a resumed run may change
    config.write_text(json.dumps(other))
    assert cli.main(["verify", "runs/small"]) == 0
    other["experiment"]["seed"] += 1
    config.write_text(json.dumps(other))
    capsys.readouterr()
    assert cli.main(["verify", "runs/small"]) == 1
    said = capsys.readouterr().out
    assert "DAMAGED" not in said and "a start of this run is refused" in said
    assert "  FOREIGN the step is of another experiment: experiment.seed was 0, now 1\n" in said
    del other["experiment"]["seed"], other["experiment"]["clip_norm"]  # older than the fields
    config.write_text(json.dumps(other))
    assert cli.main(["verify", "runs/small"]) == 0
    other["experiment"]["data"]["own"] = 1  # newer than the step
    config.write_text(json.dumps(other))
    assert cli.main(["verify", "runs/small"]) == 0
    config.write_text(stored)
    capsys.readouterr()
    pack = next(Path("runs/small/checkpoints").rglob("*.pack"))
    data = bytearray(pack.read_bytes())
    data[len(data) // 2] ^= 1
    pack.write_bytes(bytes(data))
    assert cli.main(["verify", "runs/small", "--json"]) == 1
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert found["damaged"] == [found["steps"][-1]["step"]] and found["config"] is None
    assert "DAMAGED in 1 places" in said.err and pack.name in said.err
    assert found["aside"] == [] and "kept, unread here" not in said.err
    (step,) = Path("runs/small/checkpoints").glob("[0-9]*")
    (step.parent / "1.damaged").mkdir()
    assert cli.main(["verify", "runs/small", "--json"]) == 1
    said = capsys.readouterr()
    assert json.loads(said.out)["aside"] == ["1.damaged"]
    assert "kept, unread here: 1.damaged\n" in said.err
    step.rename(step.with_name(f"{step.name}.damaged"))
    assert cli.main(["verify", "runs/small"]) == 2
    aside = f"passed over as damaged (1.damaged, {step.name}.damaged)"
    assert f"no committed checkpoint but what starts {aside}" in capsys.readouterr().err


@pytest.mark.parametrize("when", ["before it begins", "after"])
def test_a_signal_asks_the_run_to_stop(when: str) -> None:
    """While it compiles there is no run yet to ask."""
    asked: list[str] = []
    run = types.SimpleNamespace(stop=lambda: asked.append("stop"))
    stop = train_command.Stop()
    steps = [lambda: stop.begin(run), lambda: stop.take(signal.SIGINT, None)]  # type: ignore[arg-type]
    assert asked == []
    for step in steps if when == "after" else reversed(steps):
        step()
    assert asked == ["stop"]


LISTENED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SIGNALS = {
    "ctrl-c": (signal.SIGINT, 1),
    "a closed terminal": (signal.SIGHUP, 1),
    "five at a time": (signal.SIGINT, 5),
    "a second one, later": (signal.SIGTERM, 2),
}


@pytest.mark.parametrize("case", SIGNALS)
def test_a_signal_saves_the_step_and_exits_with_75(
    case: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once: after the step. Later again: at once. Either way the same command goes on."""
    (number, times), train = SIGNALS[case], train_of()()
    handlers, take, asked = [signal.getsignal(s) for s in LISTENED], Session.step, []

    def signalled(session: Session, batch: Any) -> Any:
        metrics = take(session, batch)
        asked.append(None)
        if len(asked) == 2:
            for _ in range(times):
                os.kill(os.getpid(), number)
        return metrics

    with monkeypatch.context() as patch:
        patch.setattr(Session, "step", signalled)
        if times == 2:
            patch.setattr(train_command, "TOGETHER_S", 0.0)
        assert cli.main(train) == 75
    said = capsys.readouterr().out
    assert ("interrupted" in said) == (times == 2)
    stopped = r"[\d:]{8} stopped; step 2 is saved in runs/small; the same command goes on"
    assert re.fullmatch(stopped, said.splitlines()[-1])
    assert [signal.getsignal(s) for s in LISTENED] == handlers
    assert [p.name for p in Path("runs/small/checkpoints").iterdir()] == ["2"]
    assert cli.main(train) == 0
    said = capsys.readouterr().out
    assert "resuming at step 2" in said and "done: 4 steps" in said


def test_one_of_several_that_leaves_at_once_keeps_the_ledger(monkeypatch) -> None:
    """The first process, where no supervisor does; and of a run that was not refused."""
    codes: list[int] = []
    monkeypatch.setattr(train_command.os, "_exit", codes.append)
    monkeypatch.setattr(train_command, "settle_streams", lambda: None)
    for name, first, mine in (("kept", 3, True), ("another's", 3, False), ("refused", -1, True)):
        phases = Phases()
        ledger = train_command.KeepLedger(Path(name), phases, writes=mine)
        phases.enter("step")
        if first >= 0:
            phases.begin_at(first)
        train_command.LeaveAtOnce(phases, ledger).leave(RuntimeError("no way on"))
        assert (Path(name) / "ledger.jsonl").exists() == (name == "kept")
    assert codes == [1, 1, 1]
    assert read_ledger("kept").seconds.keys() == {"init", "step"}


def test_what_nohup_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with train_command.Stop().listening() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.requested
    finally:
        signal.signal(signal.SIGHUP, before)


def test_no_line_promises_what_would_be_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """A config.json removed after the last save; then its directory."""
    assert cli.main([*train_of()(), "--steps", "2"]) == 0
    run = Path("runs/small")
    assert left_in(run) == (2, f"step 2 is saved in {run}; the same command goes on")
    (run / "config.json").unlink()
    assert "same command" not in left_in(run)[1] and "put it back" in left_in(run)[1]
    assert cli.main(train_of()()) == 2
    shutil.rmtree(run)
    assert left_in(run) == (None, f"nothing is saved in {run}")


@pytest.mark.slow
def test_ctrl_c_while_it_compiles_is_no_crash() -> None:
    """The interpreter's own way out would be one of XLA's, most times."""
    process = subprocess.Popen(
        [sys.executable, "-m", "jaxtrain", "bench", "pipeline"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_ENABLE_COMPILATION_CACHE": "false"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if "compiling the step of one_f_one_b, M=2" in line:
                time.sleep(5)
                process.send_signal(signal.SIGINT)
                break
        said, _ = process.communicate(timeout=600)
    finally:
        process.kill()
    assert process.returncode == 130, said


DROPPED = """
import signal, sys, time
from jaxtrain import cli

class Held:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)

def run(options):
    DROPS
    print("dropped", flush=True)
    time.sleep(600)
    return 0

cli.train.train_command = run
sys.argv = ["jaxtrain", "train", "small.py"]
sys.exit(cli.main())
"""
DROPS = {
    "a finalizer": "Held()",
    "a bare except": "exec('try: signal.raise_signal(signal.SIGINT)\\nexcept: pass')",
    "again": "exec('Held()\\ntry: time.sleep(600)\\nexcept: pass')",
}


@pytest.mark.parametrize("drops", DROPS.values(), ids=DROPS)
def test_a_ctrl_c_that_is_dropped_is_sent_again(drops: str) -> None:
    """JAX has a callback of the garbage collector, and bare `except`s around a callable's text."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", DROPPED.replace("DROPS", drops)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (130, "dropped\n", "")


STOPPED = """
import signal, time
from jaxtrain.cli.train import Stop

with Stop().listening(to_the_end=True) as stop:
    signal.raise_signal(signal.SIGINT)
    time.sleep(0.3)
    try:
        signal.raise_signal(signal.SIGINT)
    except:
        pass
    try:
        time.sleep(600)
    except KeyboardInterrupt:
        stop.over = True
        print("ended", flush=True)
"""


def test_a_second_ctrl_c_to_train_is_sent_again_too() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", STOPPED], env=environment, capture_output=True, timeout=300
    )
    assert (done.returncode, done.stdout) == (0, b"ended\n"), done.stderr


def test_only_a_run_that_is_done_says_so_as_it_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch believes no exit code 0 before."""
    made: list[Phases] = []
    monkeypatch.setattr(train_command, "Phases", lambda: made.append(Phases()) or made[-1])
    assert cli.main([*train_of()(), "--steps", "2"]) == 0
    assert made[0].now.phase == "exit"
    stopped = types.SimpleNamespace(stopped=True, saved=2, steps=2)
    monkeypatch.setattr("jaxtrain.run.loop.train", lambda *given, **named: stopped)
    assert cli.main(train_of()()) == 75
    assert made[1].now.phase != "exit"


def test_what_python_drops_is_told_unless_it_is_a_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    monkeypatch.setattr(sys, "__unraisablehook__", told.append)
    monkeypatch.setattr(Interrupted, "__del__", lambda self: None)
    for error in (Interrupted(), ValueError()):
        tell_dropped(types.SimpleNamespace(exc_value=error))
    assert [type(dropped.exc_value) for dropped in told] == [ValueError]


def test_ctrl_c_to_a_process_saves_and_the_rest_is_equal_to_the_bit() -> None:
    name = write(steps=120, data="Slow(BigramChain(vocab=16, seq={seq}))")
    train = ["train", name, "--mesh", mesh(4, data=2, fsdp=2)]
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "jaxtrain", *train],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if " step 3/" in line:
            process.send_signal(signal.SIGINT)
            break
    out, err = process.communicate(timeout=600)
    assert process.returncode == 75, err
    assert "stopping after this step" in err and "the same command goes on" in out
    stopped = losses("runs/small")[-1][0]
    assert 3 <= stopped < 120
    assert cli.main(train) == 0
    assert cli.main([*train, "--run-dir", "whole"]) == 0
    assert [step for step, _ in losses("runs/small")] == list(range(1, 121))
    assert losses("runs/small") == losses("whole")


@pytest.mark.skipif(sys.platform != "linux", reason="login_tty")
def test_a_closed_terminal_costs_the_words_and_not_the_run() -> None:
    """The kernel sends SIGHUP, and nothing can be written any more."""
    name = write(steps=400, data="Slow(BigramChain(vocab=16, seq={seq}))")
    master, slave = os.openpty()
    begin = f"import os, sys; os.login_tty({slave}); os.execv(sys.executable, sys.argv[1:])"
    train = [sys.executable, "-u", "-m", "jaxtrain", "train", name, "--mesh", mesh()]
    process = subprocess.Popen(
        [sys.executable, "-c", begin, *train],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TERM": "dumb"},
        pass_fds=[slave],
    )
    os.close(slave)
    said = b""
    while b"step 3/" not in said:
        said += os.read(master, 4096)
    os.close(master)
    assert process.wait(timeout=600) == 75
    (saved,) = committed_steps(Path("runs/small/checkpoints"))
    assert 3 <= saved < 400 and losses("runs/small")[-1][0] == saved


@pytest.mark.skipif(sys.platform != "linux", reason="GLIBC_TUNABLES is Linux's")
@pytest.mark.slow
def test_a_simulated_run_starts_its_process_again_with_huge_pages() -> None:
    """The C library reads its settings at a process's start: /proc has what it was started with."""
    more = "print(open('/proc/self/environ').read(), os.getpid(), os.environ['XLA_FLAGS'])"
    name = Path(write(steps=1))
    name.write_text(name.read_text().replace("import time", f"import os, time\n{more}", 1))
    clean = {k: v for k, v in os.environ.items() if k != "GLIBC_TUNABLES"}
    command = [sys.executable, "-m", "jaxtrain", "train", str(name), "--mesh", mesh(2, data=2)]
    process = subprocess.Popen(
        command, env=clean | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True
    )
    out, _ = process.communicate(timeout=600)
    assert process.returncode == 0
    assert "GLIBC_TUNABLES=glibc.malloc.hugetlb=1" in out
    assert f" {process.pid} " in out, "one process, for those who send it signals"


# The other commands


def test_check_tells_where_each_leaf_lives(capsys: pytest.CaptureFixture[str]) -> None:
    mesh_file = mesh(8, fsdp=4, tensor=2)
    assert cli.main(["check", write(), "--mesh", mesh_file, "--json"]) == 0
    said = capsys.readouterr()
    table, found = said.err.splitlines(), json.loads(said.out)["bytes_per_device"]
    assert found["total"] == sum(v for k, v in found.items() if k != "total")
    # embed 8 over fsdp=4, vocabulary 16 over tensor=2, in fp32
    assert any("embedding" in row and row.endswith(f"{16 * 8 * 4 // 8}") for row in table)
    assert cli.main(["check", write(mlp=17, heads=6), "--mesh", mesh_file]) == 2
    told = capsys.readouterr().err
    assert "heads=6 is not a multiple of kv_heads=4" in told


def test_check_refuses_what_no_run_directory_could_record(
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = Path(write())
    local = "\n\nwhole = experiment\n\ndef experiment():\n    class Chain(BigramChain): ...\n"
    local += "    return replace(whole(), data=Chain(vocab=16, seq=8))\n"
    file.write_text("from dataclasses import replace\n" + file.read_text() + local)
    for command in ("check", "train"):
        assert cli.main([command, str(file)]) == cli.REFUSED
        said = capsys.readouterr().err
        assert "experiment.data is of experiment.<locals>.Chain: classes within a func" in said


def test_check_looks_for_the_data_unless_it_is_elsewhere(
    capsys: pytest.CaptureFixture[str],
) -> None:
    files = [
        "check",
        str(ROOT / "experiments/llama3_1b.py"),
        "--mesh",
        str(ROOT / "meshes/h100_1.toml"),
    ]
    assert cli.main(files) == 2
    assert "no file matches 'data/llama3/*.tokens'" in capsys.readouterr().err
    assert cli.main([*files, "--data-elsewhere"]) == 0


@pytest.mark.parametrize("passed", [True, False])
def test_certify_exits_with_1_when_a_layout_failed(
    passed: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = certify_module.Layout((("data", 8),))
    loss = 0.0 if passed else 1.0
    difference = certify_module.Difference(layout, loss, 0.0, 0.0, True, "a", 0.0, 0.0, "params a")

    def certify(experiment: Any, **options: Any) -> Any:
        assert options == {"devices": 8, "which": "all", "full": False}
        yield difference, certify_module.Certificate(1, [difference])

    monkeypatch.setattr(certify_module, "certify", certify)
    code = cli.main(["certify", write(), "--layouts", "all", "--json"])
    assert code == (0 if passed else 1)
    said = capsys.readouterr()
    assert "1 layouts run of 1 due" in said.err.splitlines()[-1]
    found = json.loads(said.out)
    assert found["failed"] == (0 if passed else 1)
    assert {"layouts", "failed", "worst_loss_rel", "worst_grad_rel"} <= set(found)
    assert {"worst_eval_rel", "worst_state_rel"} <= set(found)


BENCH = ["bench", "collectives", "--mesh", str(ROOT / "meshes" / "cpu_8.toml")]


def test_bench_collectives_measures_what_is_asked_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every flag reaches the function; the JSON stands alone on the standard output."""
    from jaxtrain.bench import collectives as bench

    row = bench.AlgorithmRow("all_reduce", "ring_1", 2, 65536, 1.0, 2.0, 7.0, None)
    calls: list[dict[str, Any]] = []

    def measured(spec: Any, *, progress: Callable[[str], None], **chosen: Any) -> Any:
        calls.append({"devices": spec.devices, **chosen})
        progress("a line")
        return bench.CollectivesReport("cpu_8", 8, (row,))

    monkeypatch.setattr(bench, "bench_collectives", measured)
    flags = ["--collectives", "all_reduce, scatter", "--algorithms", "all"]
    flags += ["--sizes", "64KiB,1MiB", "--processes", "2,4"]
    assert cli.main([*BENCH, *flags, "--json"]) == 0
    said = capsys.readouterr()
    assert said.err.splitlines() == ["a line", "across 2 processes, faster than lax: ring_1 1 of 1"]
    (found,) = json.loads(said.out)["rows"]
    keys = {"collective", "algorithm", "processes", "bytes", "seconds", "lax_seconds", "ratio"}
    assert found.keys() >= keys | {"sent_bytes"}
    assert cli.main(BENCH) == 0
    assert "{" not in capsys.readouterr().out
    asked = {
        "collectives": ["all_reduce", "scatter"],
        "algorithms": bench.OURS,
        "sizes": [2**16, 2**20],
        "processes": [2, 4],
    }
    assert calls == [{"devices": 8} | asked, {"devices": 8}]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--collectives", "all_reduc"], "did you mean 'all_reduce'?"),
        (["--algorithms", "ring"], "algorithms: 'ring' is not known"),
        (["--sizes", "1MB"], "write 65536, 64KiB or 1MiB"),
        (["--processes", "3"], "use 1, 2, 4, 8"),
        (["--processes", "two"], "'two' is no whole number"),
    ],
)
def test_bench_collectives_refuses_with_code_2(
    flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*BENCH, *flags]) == 2
    assert said in capsys.readouterr().err


def test_bench_collectives_exits_with_1_when_a_process_failed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_no_such_flag=1")  # a process of JAX's does not start
    flags = ["--collectives", "all_reduce", "--sizes", "4KiB", "--processes", "1"]
    assert cli.main([*BENCH, *flags]) == 1
    told = capsys.readouterr().err
    assert "ended with" in told and "xla_no_such_flag" in told and "Traceback" not in told


@pytest.mark.parametrize("tokenizer", ["ByteTokenizer()", "BpeTokenizer(vocab=270)"])
def test_what_tokenize_says_trains(tokenizer: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It counts the tokens, and prints the data value that reads them."""
    for number in range(6):
        Path(f"{number}.txt").write_text(f"text {number} of a small corpus. " * 20)
    data = f"TextData(TextFiles('*.txt', held_out=0.4), {tokenizer}, seq=8)"
    name = write(vocab=300, data=data)
    assert cli.main(["tokenize", name, "--out", "tokens"]) == 0
    out = capsys.readouterr().out.splitlines()
    counts = [int(n.replace(",", "")) for n in re.findall(r"([0-9,]+) tokens", "\n".join(out))]
    value = out[-1].removeprefix("train on them: ")
    data = eval(value, vars(jaxtrain.data) | {"TextData": jaxtrain.TextData})
    cache = Path("cache")
    opened = [data.open(split, seed=0, cache_dir=cache) for split in ("train", "held_out")]
    assert [d.tokens for d in opened] == counts and sum(counts) > 100
    again = Path(write(vocab=300, data=value, steps=2))
    again.write_text(again.read_text().replace("evaluation=None", "evaluation=Evaluation(2)"))
    assert cli.main(["train", str(again), "--mesh", mesh()]) == 0
    assert "bits_per_byte" in capsys.readouterr().out


def test_an_unknown_flag_is_refused_with_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["train", write(), "--batch", "8"])
    assert stopped.value.code == 2
    assert "--batch" in capsys.readouterr().err


def test_schedule_prints_draws_saves_and_reads(tmp_path, capsys) -> None:
    chart, table = tmp_path / "chart.svg", tmp_path / "mine.csv"
    asked = ["schedule", "--kind", "interleaved", "--stages", "4", "--microbatches", "8"]
    asked += ["--chunks", "2", "--svg", str(chart), "--save", str(table)]
    assert cli.main(asked) == 0
    shown = capsys.readouterr().out
    assert "F7.1" in shown and "= 28.5" in shown
    assert chart.read_text().startswith("<svg") and table.read_text().startswith("# interleaved")
    assert cli.main(["schedule", "--table", str(table), "--head", "0.5", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["cost"] == 28.5 + 8 * 0.5 and found["slots"] == {"inputs": 11, "cotangents": 1}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--kind", "gpipe"], "needs --microbatches and --stages"),
        (["--kind", "gpipe", "--stages", "2", "--microbatches", "0"], "microbatches=0"),
        (["--table", "mine.csv", "--stages", "2"], "leave out --stages"),
        (["--table", "nowhere.csv"], "No such file"),
        (["--kind", "gpipe", "--stages", "2", "--microbatches", "2", "--head", "-1"], "head=-1.0"),
    ],
)
def test_schedule_refuses(arguments, words, capsys) -> None:
    assert cli.main(["schedule", *arguments]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("ignored", [False, True])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_asks_a_command_to_save_but_not_where_it_is_ignored(
    ignored: bool, number: signal.Signals
) -> None:
    """nohup starts a command with SIGHUP ignored."""
    asked: list[int] = []
    outside: list[int] = []
    handler = signal.SIG_IGN if ignored else lambda *_: outside.append(1)
    before = signal.signal(number, handler)
    try:
        with signals_to(lambda: asked.append(1)):
            signal.raise_signal(number)
        assert signal.getsignal(number) is handler
        signal.raise_signal(number)
    finally:
        signal.signal(number, before)
    assert (asked, outside) == (([], []) if ignored else ([1], [1]))
