"""A folder of weights is written into an object store whole, or not at all."""

from __future__ import annotations

import json
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from object_store import ObjectStore, object_store
from tiny_adapters import adapters_of, shapes
from tiny_families import LLAMA, random_params, template

from jaxtrain.huggingface import read_config, read_params, write_folder
from jaxtrain.huggingface.peft import read_adapters
from jaxtrain.huggingface.peft_write import write_adapters
from jaxtrain.huggingface.write import refuse_unwritable

ADDRESS = "s3://bucket/out"
PARAMS = random_params(LLAMA, template(LLAMA))


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[ObjectStore]]:
    """A store, and a machine whose temporary files are seen."""
    monkeypatch.setenv("JAXTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with object_store() as store:
        yield store
    assert {path.name for path in tmp_path.iterdir()} <= {"cache", "local"}


def write(**more: Any) -> None:
    write_folder(ADDRESS, LLAMA, PARAMS, shard_bytes=2**12, texts={"notes.json": "{}"}, **more)


def equal(a: Any, b: Any) -> bool:
    return a.keys() == b.keys() and all((np.asarray(a[k]) == np.asarray(b[k])).all() for k in a)


def test_the_files_are_those_of_a_disk_and_the_config_is_last(
    store: type[ObjectStore], tmp_path: Path
) -> None:
    write()
    local = tmp_path / "local"
    write_folder(local, LLAMA, PARAMS, shard_bytes=2**12, texts={"notes.json": "{}"})
    expected = {f"bucket/out/{path.name}": path.read_bytes() for path in local.iterdir()}
    assert len(expected) > 4 and store.files == expected
    assert store.changes[-1][0] == "bucket/out/config.json"
    assert read_config(ADDRESS) == read_config(local)
    assert equal(read_params(ADDRESS, LLAMA, template(LLAMA)), PARAMS)


def test_one_file_at_a_time_is_on_the_disk(
    store: type[ObjectStore], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which needs room for the largest of them alone."""
    counts = []

    def counted(kind: str, name: str) -> None:
        counts.append(len(list(tmp_path.glob("jaxtrain-*/*"))))

    store.request = staticmethod(counted)
    usage = namedtuple("usage", "free")
    for free, fits in ((2**13, True), (2**11, False)):
        monkeypatch.setattr("shutil.disk_usage", lambda path, free=free: usage(free))
        store.files.clear()
        if fits:
            write()
        else:
            with pytest.raises(ValueError, match=r"needs .* free in .*set TMPDIR to"):
                write()
    assert max(counts) == 1


def test_adapters_are_written(store: type[ObjectStore]) -> None:
    params = adapters_of(LLAMA, ("period.0.attention.query",))
    write_adapters(ADDRESS, LLAMA, params, alpha=6.0)
    assert store.changes[-1][0] == "bucket/out/adapter_config.json"
    assert equal(read_adapters(ADDRESS, LLAMA, shapes(params)), params)


def test_a_folder_that_is_there_is_kept(store: type[ObjectStore]) -> None:
    store.files["bucket/out/a.txt"] = b"mine"
    for refused in (write, lambda: refuse_unwritable(ADDRESS, LLAMA, "float32")):
        with pytest.raises(ValueError, match=f"{ADDRESS} is there already; remove it or give a"):
            refused()
    assert store.files == {"bucket/out/a.txt": b"mine"}


def test_what_cannot_be_written_whole_is_removed(store: type[ObjectStore]) -> None:
    """At whichever file the store refuses; the folder can be written then."""
    write()
    total = len([name for name, _ in store.changes])
    for last in range(total):
        store.files.clear()
        writes = []

        def refuses(kind: str, name: str, writes: list[str] = writes, last: int = last) -> None:
            writes += [name] * (kind == "write")
            if kind == "write" and len(writes) > last:
                raise ConnectionError("no route")

        store.request = staticmethod(refuses)
        message = f"{ADDRESS} could not be written, and what was written of it is removed.*no route"
        with pytest.raises(ValueError, match=message):
            write()
        assert store.files == {}, last
    store.request = staticmethod(lambda kind, name: None)
    write()


def test_a_folder_that_two_write_is_told(store: type[ObjectStore]) -> None:
    """To the one that would end later; nothing of either is removed."""

    def other(kind: str, name: str) -> None:
        if kind == "write":
            store.files["bucket/out/config.json"] = b"{}"

    store.request = staticmethod(other)
    with pytest.raises(ValueError, match=f"{ADDRESS} is being written by another process too"):
        write()
    assert store.files["bucket/out/config.json"] == b"{}" and len(store.files) > 2


def test_the_config_is_removed_first(store: type[ObjectStore]) -> None:
    """Of a write that failed and took effect, in a store that then answers once."""
    removed: list[str] = []

    def fails(kind: str, name: str) -> None:
        if kind == "write" and name.endswith("config.json"):
            store.files[name] = b"{}"
            raise ConnectionError("no answer")
        if kind == "remove":
            removed.append(name)
            if len(removed) > 1:
                raise ConnectionError("no answer")

    store.request = staticmethod(fails)
    with pytest.raises(ValueError, match="could not be written"):
        write()
    assert "bucket/out/config.json" not in store.files and store.files


def test_an_object_of_that_name_is_in_the_way(store: type[ObjectStore]) -> None:
    store.files["bucket/out"] = b"mine"
    with pytest.raises(ValueError, match=f"{ADDRESS} is there already"):
        write()


def test_weights_beyond_float16_leave_nothing(store: type[ObjectStore]) -> None:
    name = max(PARAMS)
    params = {**PARAMS, name: PARAMS[name] * 1e30}
    with pytest.raises(ValueError, match="has weights beyond float16"):
        write_folder(ADDRESS, LLAMA, params, dtype="float16", shard_bytes=2**12)
    assert store.files == {}


def test_a_store_that_does_not_answer_is_told_before_a_weight_is_read(
    store: type[ObjectStore],
) -> None:
    def no_answer(kind: str, name: str) -> None:
        raise ConnectionError("no route")

    store.request = staticmethod(no_answer)
    with pytest.raises(ValueError, match=f"{ADDRESS} cannot be read: .*try again, or give another"):
        refuse_unwritable(ADDRESS, LLAMA, "float32")
    with pytest.raises(ValueError, match=f"{ADDRESS} could not be written, .*no route"):
        write()


def test_a_folder_that_is_being_written_is_no_model(store: type[ObjectStore]) -> None:
    """Until its config.json is there."""
    write()
    config = json.loads(store.files.pop("bucket/out/config.json"))
    assert config["model_type"] == "llama"
    with pytest.raises(ValueError, match=f"{ADDRESS}/config.json is not a model that can be read"):
        read_config(ADDRESS)
