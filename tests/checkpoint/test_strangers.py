"""A run directory that somebody else made: nothing outside of it is written, read or waited for."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain import cli
from jaxtrain.checkpoint import (
    CheckpointManager,
    DamagedCheckpoint,
    LocalTier,
    SavePolicy,
    exchange,
)
from jaxtrain.checkpoint.exchange import PartId, Peers
from jaxtrain.checkpoint.local_tier import LocalSteps
from jaxtrain.checkpoint.run_config import read_config
from jaxtrain.checkpoint.storage import whole_manifest
from jaxtrain.checkpoint.tiers import Checkpoints
from jaxtrain.cluster import run_lock
from jaxtrain.cluster.run_lock import refuse_held, sole_run
from jaxtrain.cluster.sampler import STARTED_BY
from jaxtrain.files.store import put
from jaxtrain.inspection.verify import verify
from jaxtrain.run import loop
from jaxtrain.state_format.chunks import Box, Chunk, Part
from jaxtrain.state_format.leaves import LeafRecord
from jaxtrain.state_format.manifest import FAILED, HEAD, NAME, text_digest
from jaxtrain.state_format.pack import read_chunk, write_chunks
from jaxtrain.state_format.parts import OwnedParts
from jaxtrain.state_format.slots import BoxPiece
from jaxtrain.telemetry.metrics import MetricsWriter, read_metrics

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


def test_a_directory_has_one_run_at_a_time(tmp_path: Path) -> None:
    told = f"run directory .* is in use by process {os.getpid()}; wait for it, stop it, or"
    with sole_run(tmp_path):
        with pytest.raises(ValueError, match=told), sole_run(tmp_path):
            pass
        with pytest.raises(ValueError, match=told):
            refuse_held(tmp_path)
    refuse_held(tmp_path)
    with sole_run(tmp_path):
        pass


def test_who_starts_a_run_again_is_named_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(STARTED_BY, "41")
    told = (
        f"in use by process {os.getpid()}, which process 41 (of a launch or an agent) starts again"
    )
    with sole_run(tmp_path), pytest.raises(ValueError, match=re.escape(told)):
        refuse_held(tmp_path)
    assert STARTED_BY not in os.environ, "what this run starts is nobody's to start again"


def test_a_run_between_the_look_and_the_lock_is_noticed(tmp_path: Path) -> None:
    """While a start compiled another may have trained to its end: what was read is old."""
    told = "was used by another run while this one compiled; the same command goes on from what"
    for _ in range(2):  # where there was no run, and where there was one
        looked = refuse_held(tmp_path)
        with sole_run(tmp_path, looked):
            pass
        with pytest.raises(ValueError, match=told), sole_run(tmp_path, looked):
            pass
        with sole_run(tmp_path, refuse_held(tmp_path)):
            pass
    with sole_run(tmp_path):  # that of a run which had it before, and writes it again
        pass


def test_a_directory_that_cannot_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one in which a run has been, such as on a file system that is read-only by now."""
    with sole_run(tmp_path):
        pass

    def refuse(path: Path, mode: str) -> Any:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    monkeypatch.setattr(run_lock, "open_regular", refuse)
    says = f"{tmp_path} cannot be written: Read-only file system; give another --run-dir"
    with pytest.raises(ValueError, match=says):
        refuse_held(tmp_path)
    with pytest.raises(ValueError, match=says), sole_run(tmp_path):
        pass


def test_who_only_looks_whether_it_is_held_refuses_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the lock for a moment. Nor is it an error where there is none."""
    assert not run_lock.is_held(tmp_path)
    with sole_run(tmp_path):
        assert run_lock.is_held(tmp_path)
    assert not run_lock.is_held(tmp_path)
    looks = (tmp_path / ".lock").open("r+b")
    fcntl.flock(looks, fcntl.LOCK_EX)
    monkeypatch.setattr(run_lock.time, "sleep", lambda seconds: looks.close())
    with sole_run(tmp_path):
        pass
    (tmp_path / ".lock").unlink()
    (tmp_path / ".lock").symlink_to("/dev/null")
    assert not run_lock.is_held(tmp_path)


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


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("two") / "run"
    with CheckpointManager(run / "checkpoints", SavePolicy(keep=2)) as manager:
        for step in (1, 2):
            manager.save(step, {"w": jnp.arange(6.0) + step}, {"step": step})
    return run


def only_the_older_is_whole(run: Path, said: str) -> None:
    """`verify` says why the newer is not; a resume takes the older one."""
    older, newer = verify(run)
    assert not older.damages
    assert said in newer.damages[0], newer.damages
    with CheckpointManager(run / "checkpoints", SavePolicy()) as manager:
        assert manager.newest_whole() == 1 and [*manager.damaged] == [2]


def a_pipe(state: Path) -> None:
    (state / NAME).unlink()
    os.mkfifo(state / NAME)


def a_device(state: Path) -> None:
    (state / NAME).unlink()
    (state / NAME).symlink_to("/dev/zero")


def a_failure_that_is_a_pipe(state: Path) -> None:
    (state / NAME).unlink()
    os.mkfifo(state / FAILED)


def a_link(path: Path) -> None:
    """To what was there, now beside the run directory."""
    run = next(above for above in path.parents if above.name == "run")
    path.rename(run.with_name("victim"))
    path.symlink_to(run.with_name("victim"))


PLACES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a pipe": (a_pipe, f"{NAME} is a named pipe, and a file is expected there"),
    "a device": (a_device, f"{NAME} is a symbolic link out of its folder, to /dev/zero"),
    "a pipe for a failure": (a_failure_that_is_a_pipe, f"{FAILED} is a named pipe"),
    "a step that leads out": (lambda state: a_link(state.parent), "2 is a symbolic link to"),
    "an item that leads out": (a_link, "state is a symbolic link to"),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_step_of_pipes_devices_and_links_is_damaged(
    place: str, two_steps: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(two_steps, tmp_path / "run")
    make, said = PLACES[place]
    make(run / "checkpoints" / "2" / "state")
    only_the_older_is_whole(run, said)


def test_what_a_link_leads_to_is_not_removed_with_it(two_steps: Path, tmp_path: Path) -> None:
    run = shutil.copytree(two_steps, tmp_path / "run")
    a_link(run / "checkpoints" / "2")
    with CheckpointManager(run / "checkpoints", SavePolicy()) as manager:
        assert manager.discard_after(1) == [2]
    assert os.listdir(run / "checkpoints") == ["1"]
    assert (tmp_path / "victim" / "state" / NAME).is_file()


def set_chunk(body: dict[str, Any], at: int, value: object) -> None:
    body["chunks"]["w"][0][at] = value


def large(body: dict[str, Any]) -> None:
    """One chunk of 4 TiB, in a pack that is not as long."""
    body["leaves"]["w"][0] = [2**40]
    body["chunks"]["w"][0] = [[0], [2**40], *body["chunks"]["w"][0][2:5], 2**42]


def large_pack(body: dict[str, Any]) -> None:
    large(body)
    body["packs"] = dict.fromkeys(body["packs"], 2**42)


def set_dtype(body: dict[str, Any], dtype: object) -> None:
    body["leaves"]["w"][1] = dtype


FORGED: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "no leaves": (lambda b: b.pop("leaves"), "KeyError: 'leaves'"),
    "no packs": (lambda b: b.pop("packs"), "KeyError: 'packs'"),
    "leaves a list": (lambda b: b.update(leaves=[]), "AttributeError"),
    "metadata a list": (lambda b: b.update(metadata=[1]), "its metadata is a list"),
    "a dtype that is none": (lambda b: set_dtype(b, "nonsense"), "TypeError"),
    "a dtype of objects": (lambda b: set_dtype(b, "O"), "the dtype of w is 'O'"),
    "a shape of text": (lambda b: b["leaves"].update(w=[["6"], "float32", None]), "the shape of w"),
    "a digest that is a number": (lambda b: set_chunk(b, 2, 7), "no chunk of an array"),
    "a chunk before its pack": (lambda b: set_chunk(b, 4, -24), "no chunk of an array"),
    "a chunk beyond its pack": (lambda b: set_chunk(b, 4, 8), "ends beyond its pack"),
    "a chunk outside its leaf": (lambda b: set_chunk(b, 0, [3]), "no chunk of an array"),
    "a chunk of no leaf": (lambda b: b["chunks"].update(v=[]), "chunks of 'v', which is no leaf"),
    "a chunk of 4 TiB": (large, "ends beyond its pack"),
    "a pack of 4 TiB": (large_pack, "bytes of 4,398,046,511,104"),
    "a pack as long as text": (
        lambda b: b["packs"].update({"other.pack": "long"}),
        "the size of a pack is 'long'",
    ),
}


def forge(run: Path, text: str) -> None:
    path = run / "checkpoints" / "2" / "state" / NAME
    path.write_text(f"{HEAD} {text_digest(text.encode())}\n{text}")


@pytest.mark.parametrize("forged", FORGED)
def test_a_forged_manifest_is_damage(forged: str, two_steps: Path, tmp_path: Path) -> None:
    """Its digest is the right one: anybody can take it."""
    run = shutil.copytree(two_steps, tmp_path / "run")
    path = run / "checkpoints" / "2" / "state" / NAME
    body = json.loads(path.read_text().partition("\n")[2])
    change, said = FORGED[forged]
    change(body)
    forge(run, json.dumps(body))
    only_the_older_is_whole(run, said)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[]", "is no manifest: TypeError"),
        ("7", "is no manifest: TypeError"),
        ("{", "is no manifest: Expecting"),
        ("[" * 100_000, "is no manifest: it nests more than 100 levels deep"),
        ("1" * 5000, "is no manifest: Exceeds the limit"),
    ],
    ids=["a list", "a number", "cut", "deep", "long"],
)
def test_a_manifest_of_other_json_is_damage(
    text: str, said: str, two_steps: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(two_steps, tmp_path / "run")
    forge(run, text)
    only_the_older_is_whole(run, said)


def test_a_chunk_is_measured_before_memory_is_taken_for_it(tmp_path: Path) -> None:
    (tmp_path / "a.pack").write_bytes(bytes(8))
    chunk = Chunk("w", Box((0,), (2**42,)), "", "a.pack", 0, 2**42)
    with pytest.raises(ValueError, match=r"a.pack ends at byte 8, too early"):
        read_chunk(tmp_path / "a.pack", chunk, np.dtype(np.uint8))


def write_through_the_local_tier(directory: Path, parts: list[Part], name: str) -> None:
    """Where its step's `name` is a link beforehand."""
    steps = LocalSteps(LocalTier(every=1, directory=str(directory)), "run")
    place = steps.directory / "1"
    place.mkdir(parents=True)
    (place / f"0.{steps.start}.{name}").symlink_to(directory / "link")
    records = {part.leaf: LeafRecord(part.box.shape, "uint8", None) for part in parts}
    owned = OwnedParts([(p.leaf, [BoxPiece(p.box, (slice(None),))], p.data) for p in parts])
    steps.save(1, owned, records, {})
    try:
        steps.wait()
    finally:
        steps.close()


def take_from_another(directory: Path, name: str) -> None:
    """A part that another process sends, where `name` is a link beforehand."""
    peers = Peers(directory, directory / "0")
    (directory / "0" / "1").mkdir(parents=True)
    (directory / "0" / "1" / f"0.a.{name}").symlink_to(directory / "link")
    problem = peers._put(MagicMock(), PartId(1, 0, "a"), "{}", 0)
    peers.close()
    if problem:
        raise ValueError(problem)


PART = Part("w", Box((0,), (3,)), np.arange(3, dtype=np.uint8))
THROUGH: dict[str, Callable[[Path], object]] = {
    "a pack": lambda d: write_chunks(d, "link", [PART]),
    "a manifest": lambda d: put(d / "link", b"{}"),
    "a local pack": lambda d: write_through_the_local_tier(d, [PART], "pack"),
    "a local pack of nothing": lambda d: write_through_the_local_tier(d, [], "pack"),
    "a local record": lambda d: write_through_the_local_tier(d, [PART], "tmp"),
    "a part that was sent": lambda d: take_from_another(d, "pack"),
    "a record that was sent": lambda d: take_from_another(d, "json"),
}


@pytest.mark.parametrize("through", THROUGH)
@pytest.mark.parametrize("there", [True, False])
def test_no_part_of_a_step_is_written_through_a_link(
    through: str, there: bool, tmp_path: Path
) -> None:
    (tmp_path / "tier").mkdir()
    (tmp_path / "tier" / "link").symlink_to(tmp_path / "keys")
    if there:
        (tmp_path / "keys").write_text(SECRET)
    with pytest.raises(ValueError, match=r"is a symbolic link to .*, which would be written"):
        THROUGH[through](tmp_path / "tier")
    assert (tmp_path / "keys").exists() == there
    assert not there or (tmp_path / "keys").read_text() == SECRET


@pytest.mark.parametrize("full_at", [0, 1, 2, None])
def test_a_copy_that_a_full_disk_cuts_has_no_record(
    full_at: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it counts as none; all of it is received, since the next message stands behind it."""
    pieces = [b"one", b"two", b"three"]
    connection, write, written = MagicMock(), exchange.write_all, list[bytes]()
    connection.recv_bytes.side_effect = pieces

    def write_while_there_is_room(file: Any, piece: bytes) -> None:
        if len(written) == full_at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written.append(piece)
        write(file, piece)

    monkeypatch.setattr(exchange, "write_all", write_while_there_is_room)
    peers, part = Peers(tmp_path, tmp_path / "0"), PartId(1, 0, "a")
    problem = peers._put(connection, part, "{}", len(b"".join(pieces)))
    peers.close()
    assert connection.recv_bytes.call_count == 3
    assert (tmp_path / "0" / part.record).exists() is (full_at is None)
    if full_at is None:
        assert not problem and (tmp_path / "0" / part.pack).read_bytes() == b"onetwothree"
    else:
        assert "No space left on device" in str(problem)


RECORDS: dict[str, Callable[[Path], object]] = {
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
    "a device": lambda path: (path.unlink(), path.symlink_to("/dev/zero")),
    "deep": lambda path: write_record(path, "[" * 100_000),
    "a list": lambda path: write_record(path, "[]"),
    "no processes": lambda path: write_record(path, '{"leaves": {}, "chunks": []}'),
    "in a folder that is no step": lambda path: path.parent.rename(path.parents[1] / "x"),
}


def write_record(path: Path, text: str) -> None:
    path.write_text(f"{text_digest(text.encode())}\n{text}")


@pytest.mark.parametrize("how", RECORDS)
def test_a_forged_record_of_a_local_tier_is_passed_over(how: str, tmp_path: Path) -> None:
    policy = SavePolicy(every=9, local=LocalTier(every=1, directory=str(tmp_path / "memory")))
    with Checkpoints(tmp_path / "run" / "checkpoints", policy) as tiers:
        for step in (1, 2):
            tiers.save(step, {"w": jnp.arange(6.0) + step}, {"step": step}, durable=False)
    (path,) = (tmp_path / "memory").glob("*/0/2/*.json")
    RECORDS[how](path)
    with Checkpoints(tmp_path / "run" / "checkpoints", policy) as tiers:
        assert tiers.newest_whole() == 1
        (told,) = tiers.take_troubles()
        assert "is no record of a part" in told and "it is passed over" in told
        tiers.save(3, {"w": jnp.arange(6.0)}, {"step": 3}, durable=False)
        tiers.wait()
        assert not tiers.take_troubles()
