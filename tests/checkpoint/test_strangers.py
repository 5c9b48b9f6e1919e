"""A run directory that somebody else made: nothing outside of it is written, read or waited for."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain import cli
from jaxtrain.checkpoint import CheckpointManager, DamagedCheckpoint, SavePolicy
from jaxtrain.checkpoint.manifest import HEAD, NAME, text_digest
from jaxtrain.checkpoint.run_config import read_config
from jaxtrain.checkpoint.run_lock import refuse_held, sole_run
from jaxtrain.checkpoint.storage import whole_manifest
from jaxtrain.checkpoint.verify import verify
from jaxtrain.telemetry.metrics import MetricsWriter, read_metrics
from jaxtrain.train import loop

SECRET = '{"step": 0}\n'
"""The user's own; it would do as metrics, too."""


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """A file beside the run directory."""
    (tmp_path / "keys").write_text(SECRET)
    return tmp_path / "keys"


WRITERS: dict[str, Callable[[Path], object]] = {
    ".lock": lambda run: sole_run(run).__enter__(),
    "metrics.jsonl": lambda run: MetricsWriter(run, start=1, tensorboard=False),
}
READERS = {".lock": refuse_held, "metrics.jsonl": read_metrics}


@pytest.mark.parametrize("name", WRITERS)
def test_no_file_is_written_through_a_link(name: str, keys: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / name).symlink_to("../keys")
    with pytest.raises(ValueError, match=f"{name} is a symbolic link to ../keys, which would be"):
        WRITERS[name](run)
    assert keys.read_text() == SECRET
    (run / name).unlink()
    os.mkfifo(run / name)
    with pytest.raises(ValueError, match=f"{name} is a named pipe, and a file is expected there"):
        WRITERS[name](run)
    with pytest.raises(ValueError, match="is a named pipe"):
        READERS[name](run)


def test_a_config_that_is_a_link_or_a_pipe_or_deep_is_refused(keys: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").symlink_to("../keys")
    with pytest.raises(ValueError, match=r"config.json is a symbolic link out of its folder, to"):
        read_config(run)
    (run / "config.json").unlink()
    os.mkfifo(run / "config.json")
    with pytest.raises(ValueError, match=r"config.json is a named pipe"):
        read_config(run)
    (run / "config.json").unlink()
    (run / "config.json").write_text('{"a":' * 5000 + "1" + "}" * 5000)
    with pytest.raises(ValueError, match="nests more than 100 levels deep; mend it or use a new"):
        read_config(run)


@pytest.mark.parametrize(
    "name", [".lock", "config.json", "checkpoints", "events", "tokenizer.json"]
)
def test_every_command_refuses_a_run_directory_that_leads_out(
    name: str,
    keys: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    monkeypatch.setattr(loop, "open_session", pytest.fail)
    if name == "checkpoints":
        (run / "checkpoints").rmdir()
    (tmp_path / "folder").mkdir()
    (run / name).symlink_to("../folder" if name in ("checkpoints", "events") else "../keys")
    for command in (
        ["train", "experiments/stdlib_lm.py", "--mesh", "meshes/cpu_8.toml", "--run-dir"],
        ["generate", "--prompt", "a"],
        ["export", "--out", str(tmp_path / "out")],
        ["verify"],
    ):
        assert cli.main([*command, str(run)]) == cli.REFUSED
        said = capsys.readouterr().err
        assert f"run/{name} is a symbolic link" in said, said
    assert keys.read_text() == SECRET and not any((tmp_path / "folder").iterdir())


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    whole = NamedSharding(Mesh(jax.devices()[:1], "a"), P())
    state = {
        "w": jax.device_put(jnp.arange(6.0), whole),
        "step": jax.device_put(jnp.int32(1), whole),
    }
    with CheckpointManager(tmp_path / "run" / "checkpoints", SavePolicy(every=1)) as manager:
        manager.save(1, state, {"step": 1})
    return tmp_path / "run" / "checkpoints" / "1" / "state"


@pytest.mark.parametrize("path", ["../../../keys", "absolute", ".."])
def test_a_manifest_names_packs_of_its_own_directory(path: str, saved: Path, keys: Path) -> None:
    """Whoever writes a manifest can write its digest too."""
    body = json.loads((saved / NAME).read_bytes().partition(b"\n")[2])
    (pack,) = body["packs"]
    path = str(keys) if path == "absolute" else path
    for packs in ({path: body["packs"][pack]}, body["packs"]):
        chunks = {k: [[*row[:3], path, *row[4:]] for row in v] for k, v in body["chunks"].items()}
        text = json.dumps({**body, "packs": packs, "chunks": chunks}).encode()
        (saved / NAME).write_bytes(f"{HEAD} {text_digest(text)}\n".encode() + text)
        with pytest.raises(DamagedCheckpoint, match="which is no file of its directory"):
            whole_manifest(saved.parents[1], 1)


def test_a_pack_that_is_a_link_is_missing(saved: Path, tmp_path: Path) -> None:
    (pack,) = saved.glob("*.pack")
    assert not verify(tmp_path / "run")[0].damages
    shutil.move(pack, tmp_path / "elsewhere")
    pack.symlink_to(tmp_path / "elsewhere")
    (found,) = verify(tmp_path / "run")
    assert f"{pack.name} is missing" in found.damages[0]
