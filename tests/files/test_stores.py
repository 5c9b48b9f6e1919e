"""The address of an object store is refused wherever a path is needed: it would become a folder. A
run may be in one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import jaxtrain
from jaxtrain import cli
from jaxtrain.bench.checkpoint import bench_checkpoint
from jaxtrain.data import ByteTokenizer, StdlibSource, tokenize
from jaxtrain.files.stores import local_path, store_violations
from jaxtrain.huggingface import read_params, write_folder
from jaxtrain.huggingface.peft import huggingface_lora, read_adapters
from jaxtrain.huggingface.peft_write import write_adapters
from jaxtrain.weights.loading import load
from jaxtrain.weights.start import run_of
from jaxtrain.weights.start_digest import start_digest

BLOCK = jaxtrain.BlockConfig(jaxtrain.AttentionConfig(heads=2), jaxtrain.MlpConfig(hidden=8))
EXPERIMENT = jaxtrain.Experiment(
    model=jaxtrain.DecoderConfig(vocab=257, embed=8, layers=2, period=(BLOCK,)),
    data=jaxtrain.TextData(seq=8),
    optimizer=jaxtrain.AdamW(1e-3),
    steps=2,
    batch=8,
)
ONE = jaxtrain.mesh_from_axes(data=1)

FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "train, cache": lambda at: jaxtrain.train(EXPERIMENT, ONE, cache_dir=at),
    "train, experiment": lambda at: jaxtrain.train(at, ONE),
    "train, mesh": lambda at: jaxtrain.train(EXPERIMENT, at),
    "check, experiment": lambda at: jaxtrain.check(at, ONE),
    "check, mesh": lambda at: jaxtrain.check(EXPERIMENT, at),
    "certify": lambda at: next(jaxtrain.certify(at, devices=1)),
    "a local tier": lambda at: jaxtrain.checkpoint.LocalTier(directory=str(at)),
    "tokens": lambda at: tokenize(StdlibSource(), ByteTokenizer(), at),
    "data, cache": lambda at: EXPERIMENT.data.open("train", seed=0, cache_dir=at),
    "schedule": lambda at: jaxtrain.Pipeline(f"{at}/mine.csv"),
    "bench checkpoint": lambda at: bench_checkpoint(("1MiB",), directory=at),
}

RUNS: dict[str, Callable[[Any], Any]] = {
    "train, run directory": lambda at: jaxtrain.train(EXPERIMENT, ONE, run_dir=at),
    "generate": lambda at: jaxtrain.generate_text(at, "a"),
    "export, run": lambda at: jaxtrain.export(at, "out"),
    "load": load,
    "verify": jaxtrain.verify,
    "checkpoints": lambda at: jaxtrain.checkpoint.CheckpointManager(at, jaxtrain.SavePolicy()),
    "a branch": lambda at: jaxtrain.train(EXPERIMENT, ONE, run_dir="run", from_run=at),
    "evaluate": jaxtrain.evaluate,
    "a start from a run": lambda at: run_of(jaxtrain.FromRun(at)),
    "weights": jaxtrain.huggingface_config,
    "weights, read": lambda at: read_params(at, EXPERIMENT.model, {}),
    "a start from weights": lambda at: start_digest(jaxtrain.FromHuggingFace(at)),
    "a start with adapters": lambda at: start_digest(jaxtrain.FromHuggingFace(at, adapters=at)),
    "adapters": lambda at: huggingface_lora(at, EXPERIMENT.model),
    "adapters, read": lambda at: read_adapters(at, EXPERIMENT.model, {}),
    "export, folder": lambda at: jaxtrain.export("run", at),
    "weights, written": lambda at: write_folder(at, EXPERIMENT.model, {}),
    "adapters, written": lambda at: write_adapters(at, EXPERIMENT.model, {}, alpha=1.0),
    "text": lambda at: jaxtrain.TextFiles(str(at)).pieces("train"),
    "text, held out": lambda at: jaxtrain.TextFiles(
        __file__, held_out_patterns=(__file__, str(at))
    ).pieces("train"),
    "JSON lines": lambda at: jaxtrain.data.JsonLines((__file__, str(at))).pieces("train"),
    "Parquet": lambda at: jaxtrain.data.Parquet(str(at)).pieces("train"),
    "token files": lambda at: jaxtrain.data.TokenFiles(str(at)).files("train"),
    "token files, held out": lambda at: jaxtrain.data.TokenFiles(
        __file__, held_out_paths=str(at)
    ).files("train"),
    "tokenizer": lambda at: jaxtrain.data.TokenizerFile(str(at)).build(
        lambda: iter(()), corpus="", cache_dir=Path()
    ),
}
"""Functions of runs, models' folders and corpora, which may be in a store."""

SCHEDULE = ("schedule", "--kind=gpipe", "--stages=2", "--microbatches=2")

COMMANDS: dict[str, list[str]] = {
    "train, mesh": ["train", "experiments/stdlib_lm.py", "--mesh", "AT"],
    "train, experiment": ["train", "AT"],
    "compile": ["compile", "AT", "--mesh", "meshes/cpu_1.toml"],
    "tokenize": ["tokenize", "experiments/stdlib_lm.py", "--out", "AT"],
    "schedule": ["schedule", "--table", "AT"],
    "schedule, picture": [*SCHEDULE, "--svg", "AT"],
    "schedule, table": [*SCHEDULE, "--save", "AT"],
}

RUN_COMMANDS: dict[str, list[str]] = {
    "train": ["train", "experiments/stdlib_lm.py", "--run-dir", "AT"],
    "train, branch": ["train", "experiments/stdlib_lm.py", "--from", "AT"],
    "generate": ["generate", "AT", "--prompt", "a"],
    "export": ["export", "AT", "--out", "out"],
    "export, folder": ["export", "run", "--out", "AT"],
    "evaluate": ["evaluate", "AT"],
    "verify": ["verify", "AT"],
}

ADDRESSES = ("gs://bucket/run", "s3://bucket/run", Path("gs://bucket/run"))


@pytest.fixture(autouse=True)
def nothing_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    root = Path(jaxtrain.__file__).parents[1]
    for name in ("experiments", "meshes"):
        (tmp_path / name).symlink_to(root / name)
    monkeypatch.chdir(tmp_path)
    yield
    assert {path.name for path in tmp_path.iterdir()} == {"experiments", "meshes"}


@pytest.mark.parametrize("address", ADDRESSES, ids=repr)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_no_function_takes_the_address_of_a_store_for_a_path(name: str, address: Any) -> None:
    scheme = str(address)[:2]
    with pytest.raises(ValueError, match=f"is an address, and {scheme}:// is not read or"):
        FUNCTIONS[name](address)


@pytest.mark.parametrize("name", COMMANDS)
def test_no_command_takes_the_address_of_a_store_for_a_path(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [word.replace("AT", "gs://bucket/run") for word in COMMANDS[name]]
    assert cli.main(given) == cli.REFUSED
    said = capsys.readouterr()
    assert "is an address, and gs:// is not read or written here" in said.err and not said.out


@pytest.fixture
def no_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which no package reaches a store."""
    monkeypatch.setattr("jaxtrain.files.store.find_spec", lambda name: None)


@pytest.mark.parametrize("address", ADDRESSES, ids=repr)
@pytest.mark.parametrize("name", RUNS)
def test_a_run_in_a_store_names_the_package_that_is_missing(
    name: str, address: Any, no_packages: None
) -> None:
    package = {"gs": "gcsfs", "s3": "s3fs"}[str(address)[:2]]
    with pytest.raises(ValueError, match=f"is not installed: pip install {package}$"):
        RUNS[name](address)


@pytest.mark.parametrize("name", RUNS)
def test_a_run_in_a_store_of_another_kind_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="is an address, and hdfs:// is not read or"):
        RUNS[name]("hdfs://bucket/run")


@pytest.mark.parametrize("name", RUN_COMMANDS)
def test_a_command_names_the_package_that_is_missing(
    name: str, capsys: pytest.CaptureFixture[str], no_packages: None
) -> None:
    given = [word.replace("AT", "gs://bucket/run") for word in RUN_COMMANDS[name]]
    assert cli.main(given) == cli.REFUSED
    said = capsys.readouterr()
    assert "is not installed: pip install gcsfs" in said.err and not said.out


def test_paths_are_no_addresses() -> None:
    for path in ("runs/a", "/a:/b", "a:b", "a/gs://b", "./gs://b", "C:/a", "", "~/x", Path("a")):
        assert store_violations("path", path) == [] and local_path("path", path) == Path(path)
    assert store_violations("path", 3) == [] and store_violations("path", ("a", 3)) == []
    assert "without file://" in store_violations("path", "file:///a")[0]
    assert len(store_violations("path", ("gs://a", "b", "hdfs://c"))) == 2
