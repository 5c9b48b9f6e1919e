"""A model's folder in an object store is read as one on the disk: what it says at once, and its
weights when they are needed."""

from __future__ import annotations

import contextvars
import errno
import fcntl
import io
import json
import os
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from object_store import ObjectStore, empty_cache, object_store, put_object
from tiny_adapters import RANK, adapters_of, shapes
from tiny_families import LLAMA, random_params, template

import jaxtrain
from jaxtrain import FineTuning, FromHuggingFace, FromRun, LoRA
from jaxtrain.data import ByteTokenizer, TokenizerFile
from jaxtrain.experiment.load import config_of
from jaxtrain.files.cache_entries import cache_contents
from jaxtrain.files.fetched import LOCK, fetched_folder
from jaxtrain.files.opened import open_folder
from jaxtrain.files.pointer import StoreFailed
from jaxtrain.files.stored_run import opened_for_reading
from jaxtrain.huggingface import (
    huggingface_lora,
    read_config,
    read_params,
    refuse_unfit,
    write_folder,
)
from jaxtrain.huggingface.folder import INDEX, SINGLE, Folder
from jaxtrain.huggingface.peft import read_adapters
from jaxtrain.huggingface.peft_write import write_adapters
from jaxtrain.notices import told_to
from jaxtrain.weights.loading import load
from jaxtrain.weights.start import OpenedStart
from jaxtrain.weights.start_digest import start_digest, start_problem
from jaxtrain.weights.tokenizer_files import ROWS, record_beginning, tokenizer_files

ADDRESS = "s3://bucket/models/llama"
BELOW = "bucket/models/llama/"
"""Of the names of its files."""


@pytest.fixture
def local(tmp_path: Path) -> Path:
    """A folder with weights in two files."""
    write_folder(
        tmp_path / "local", LLAMA, random_params(LLAMA, template(LLAMA)), shard_bytes=2**12
    )
    return tmp_path / "local"


@pytest.fixture(autouse=True)
def store(
    local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[type[ObjectStore]]:
    """A store that has the folder too, and is asked by a machine with an empty cache."""
    monkeypatch.setenv("JAXTRAIN_CACHE", str(tmp_path / "cache"))
    with object_store() as store:
        for path in local.iterdir():
            put_object(BELOW + path.name, path.read_bytes())
        yield store


def weights(store: type[ObjectStore]) -> set[str]:
    return {name for name in store.files if name.endswith(".safetensors")}


def bytes_read(store: type[ObjectStore], names: set[str]) -> int:
    return sum(end - start for name, start, end in store.reads if name in names)


def equal(a: Any, b: Any) -> bool:
    return a.keys() == b.keys() and all((np.asarray(a[k]) == np.asarray(b[k])).all() for k in a)


def test_weights_are_those_of_the_folder_and_are_fetched_once(
    local: Path, store: type[ObjectStore]
) -> None:
    assert len(weights(store)) > 1, "a folder of several files"
    assert read_config(ADDRESS) == read_config(local)
    assert bytes_read(store, weights(store)) == 0
    expected = read_params(local, LLAMA, template(LLAMA))
    assert equal(read_params(ADDRESS, LLAMA, template(LLAMA)), expected)
    once = sum(len(store.files[name]) for name in weights(store))
    assert bytes_read(store, weights(store)) == once + headers(store)
    store.reads.clear()
    assert equal(read_params(ADDRESS, LLAMA, template(LLAMA)), expected)
    assert not store.reads


def headers(store: type[ObjectStore]) -> int:
    """Bytes of all headers of tensors."""
    return sum(struct.unpack("<Q", store.files[name][:8])[0] + 8 for name in weights(store))


def test_a_file_that_changed_is_fetched_again_and_one_that_is_gone_is_gone(
    local: Path, store: type[ObjectStore]
) -> None:
    """A folder that was opened before stays as it was."""
    read_params(ADDRESS, LLAMA, template(LLAMA))
    before, digest = open_folder("folder", ADDRESS), start_digest(FromHuggingFace(ADDRESS))
    other = random_params(LLAMA, template(LLAMA), seed=7)
    write_folder(local / "new", LLAMA, other, shard_bytes=2**12)
    for path in (local / "new").iterdir():
        put_object(BELOW + path.name, path.read_bytes())
    put_object(BELOW + "generation_config.json", b"{}")
    assert equal(read_params(ADDRESS, LLAMA, template(LLAMA)), other)
    folder = open_folder("folder", ADDRESS).here
    assert (folder / "generation_config.json").read_text() == "{}"
    put_object(BELOW + "generation_config.json", None)
    assert not (open_folder("folder", ADDRESS).here / "generation_config.json").exists()
    with Folder(before) as files:
        assert files.digest() == digest
    assert start_digest(FromHuggingFace(ADDRESS)) != digest


@pytest.mark.parametrize("occasion", [1, 2, 3], ids=["header's length", "header", "pieces"])
def test_weights_that_are_written_while_they_are_read_are_refused(
    occasion: int, store: type[ObjectStore]
) -> None:
    """None of them stays in the cache, and the next try reads the new ones."""
    name, reads = min(weights(store)), []

    def written(kind: str, path: str) -> None:
        if kind == "read" and path == name:
            reads.append(path)
            if len(reads) == occasion:
                put_object(name, other_end(store.files[name]))

    store.request = staticmethod(written)
    with pytest.raises(StoreFailed, match=r"has been written again while it was read: .*; try"):
        if occasion < 3:
            refuse_unfit(ADDRESS, LLAMA)
        else:
            read_params(ADDRESS, LLAMA, template(LLAMA))
    assert not [entry for entry in cache_contents().entries if entry.about.endswith(name)]
    assert not list(cache_contents().directory.glob("*.stored-*"))
    store.request = staticmethod(lambda kind, name: None)
    read_params(ADDRESS, LLAMA, template(LLAMA))


def other_end(data: bytes) -> bytes:
    return data[:-4] + bytes(255 - byte for byte in data[-4:])


def test_a_digest_reads_rows_alone_and_is_that_of_the_folder(
    local: Path, store: type[ObjectStore]
) -> None:
    """Before and after the files are here; of rows that changed meanwhile it is refused."""
    expected = start_digest(FromHuggingFace(local))
    store.reads.clear()
    assert start_digest(FromHuggingFace(ADDRESS)) == expected
    once = sum(len(store.files[name]) for name in weights(store))
    assert headers(store) < bytes_read(store, weights(store)) < once
    read_params(ADDRESS, LLAMA, template(LLAMA))
    store.reads.clear()
    assert start_digest(FromHuggingFace(ADDRESS)) == expected and not store.reads
    empty_cache()
    name = min(weights(store))
    changed = other_end(store.files[name])

    def written(kind: str, path: str) -> None:
        if kind == "read" and path == name and store.files[name] != changed:
            put_object(name, changed)

    store.request = staticmethod(written)
    with pytest.raises(StoreFailed, match="has been written again while it was read"):
        start_digest(FromHuggingFace(ADDRESS))


def test_nothing_but_the_folders_own_texts_is_fetched_at_once(store: type[ObjectStore]) -> None:
    """Nor of a bucket that holds folders, or a name that is misspelt: the cache has no entry."""
    for name in ("original/params.json", "pytorch_model.bin", "README.md", "trainer_state.json"):
        put_object(BELOW + name, b"{}")
    folder = open_folder("folder", ADDRESS).here
    texts = {"config.json", "generation_config.json", INDEX}
    assert {path.name for path in folder.iterdir()} == {
        name for name in texts if BELOW + name in store.files
    }
    empty_cache()
    store.reads.clear()
    for address, inner in (
        ("s3://bucket", ", such as s3://bucket/models"),
        ("s3://bucket/models", ", such as s3://bucket/models/llama"),
        ("s3://bucket/models/lama", ""),
    ):
        for opened in (open_folder, opened_for_reading):
            with pytest.raises(ValueError, match=f"a model's folder, or of a run{inner}$"):
                opened("folder", address)
    assert not store.reads and not cache_contents().entries


def test_a_folder_beside_checkpoints_is_no_run(store: type[ObjectStore]) -> None:
    """Nothing below it is fetched."""
    put_object(BELOW + "checkpoints/1/x.json", b"{}")
    put_object(BELOW + "original/params.json", b"{}")
    here = opened_for_reading("folder", ADDRESS)
    assert here == open_folder("folder", ADDRESS).here and not (here / "original").exists()
    put_object("bucket/checkpoints/1/x.json", b"{}")
    with pytest.raises(ValueError, match=r"s3://bucket has no config.json"):
        opened_for_reading("run", "s3://bucket")


def test_two_at_once_fetch_a_file_once(
    store: type[ObjectStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In pieces, which are put together in order."""
    monkeypatch.setattr("jaxtrain.files.objects.PIECE", 100)
    folder = open_folder("folder", ADDRESS)
    (name, *_) = sorted(weights(store))
    store.reads.clear()
    with ThreadPoolExecutor(2) as pool:
        places = list(pool.map(lambda _: folder.whole(name.removeprefix(BELOW)), range(2)))
    assert places[0] == places[1] and places[0].read_bytes() == store.files[name]
    assert bytes_read(store, {name}) == len(store.files[name])
    assert len(store.reads) == -(-len(store.files[name]) // 100)


def test_an_answer_that_is_cut_short_is_told(
    store: type[ObjectStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, name = open_folder("folder", ADDRESS), min(weights(store)).removeprefix(BELOW)
    monkeypatch.setattr("jaxtrain.files.objects.read_range", lambda path, start, end: b"cut")
    with pytest.raises(StoreFailed, match=f"{ADDRESS}/{name} cannot be read: .*cut short"):
        folder.whole(name)


def of(start: FromHuggingFace, **more: Any) -> jaxtrain.Experiment:
    return jaxtrain.Experiment(
        model=LLAMA,
        data=jaxtrain.data.BigramChain(vocab=11, seq=8),
        optimizer=jaxtrain.AdamW(1e-2),
        steps=4,
        batch=8,
        evaluation=None,
        fine_tuning=FineTuning(start, **more),
        checkpoints=jaxtrain.SavePolicy(every=2),
        logging=jaxtrain.Logging(tensorboard=False),
    )


def trained(experiment: jaxtrain.Experiment, run: Path | None, **more: Any) -> list[float]:
    result = jaxtrain.train(experiment, "cpu_1", run_dir=run, stream=io.StringIO(), **more)
    return [line["loss"] for line in result.history]


def test_a_check_reads_no_weight_and_a_run_begins_with_them(
    local: Path, tmp_path: Path, store: type[ObjectStore]
) -> None:
    """It goes on without the store, and under the folder's other name."""
    jaxtrain.check(of(FromHuggingFace(ADDRESS)), "cpu_1")
    assert bytes_read(store, weights(store)) == headers(store)
    expected = trained(of(FromHuggingFace(local)), None)
    run = tmp_path / "run"
    assert trained(of(FromHuggingFace(ADDRESS)), run, steps=2) == expected[:2]

    def no_answer(kind: str, name: str) -> None:
        raise ConnectionError("no route")

    store.request = staticmethod(no_answer)
    assert trained(of(FromHuggingFace(ADDRESS)), run, steps=3) == expected[2:3]
    store.request = staticmethod(lambda kind, name: None)
    assert trained(of(FromHuggingFace(local)), run) == expected[3:]


def test_a_store_that_does_not_answer_is_told(store: type[ObjectStore]) -> None:
    def no_answer(kind: str, name: str) -> None:
        raise ConnectionError("no route")

    folder = open_folder("folder", ADDRESS)
    store.request = staticmethod(no_answer)
    for read in (read_config, start_digest_of, load):
        with pytest.raises(StoreFailed, match=f"^{ADDRESS} cannot be read: .*no route; try"):
            read(ADDRESS)
    with pytest.raises(StoreFailed, match="no route"), Folder(folder):
        raise AssertionError("its tensors are not known")
    (name, *_) = sorted(weights(store))
    with pytest.raises(StoreFailed, match=f"s3://{name} cannot be read: .*no route"):
        folder.whole(name.removeprefix(BELOW))
    with pytest.raises(ValueError, match=f"{ADDRESS} has no file 'other'"):
        folder.whole("other")


def start_digest_of(folder: str) -> str:
    return start_digest(FromHuggingFace(folder))


def headed(header: str, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(header)) + header.encode() + data


def one_tensor(shape: str, offsets: str = "[0, 4]") -> bytes:
    return headed(f'{{"a": {{"dtype": "F32", "shape": {shape}, "data_offsets": {offsets}}}}}')


HEADERS = {
    "short": (b"\x01", "ends before byte 8"),
    "cut": (struct.pack("<Q", 90) + b"{}", "ends before byte 98"),
    "long": (struct.pack("<Q", 2**40) + b"{}", "would have 1,099,511,627,776 bytes"),
    "no JSON": (headed("{]"), "not"),
    "no object": (headed("[]"), "names no tensors"),
    "no shape": (headed('{"a": {"dtype": "F32"}}'), "names no tensors"),
    "negative": (one_tensor("[-1]"), r"shape \[-1\]"),
    "a text": (one_tensor('"1"'), "shape 1,"),
    "infinite": (one_tensor("[1e999]"), r"shape \[inf\]"),
    "other bytes": (one_tensor("[2]"), r"4 bytes for shape \[2\] of F32"),
    "one offset": (one_tensor("[1]", "[4]"), "names no tensors"),
    "without its data": (one_tensor("[1]"), "it has 69 bytes, and by its header 73"),
    "with more than its data": (
        one_tensor("[1]") + b"12345",
        "it has 74 bytes, and by its header 73",
    ),
    "no UTF-8": (struct.pack("<Q", 2) + b"\xff\xff", "decode"),
}


@pytest.mark.parametrize("kind", HEADERS)
def test_a_file_that_is_none_of_tensors_is_refused_with_its_address(
    kind: str, store: type[ObjectStore]
) -> None:
    data, problem = HEADERS[kind]
    put_object(BELOW + INDEX, None)
    put_object(BELOW + SINGLE, data)
    folder = open_folder("folder", ADDRESS)
    with pytest.raises(ValueError, match=problem) as told, Folder(folder):
        raise AssertionError("it has no tensors")
    assert str(told.value).startswith(f"{ADDRESS}/{SINGLE} cannot be opened: ")


def test_an_index_names_files_of_the_folder_alone(store: type[ObjectStore]) -> None:
    put_object(BELOW + INDEX, json.dumps({"weight_map": {"a": "../other/x.safetensors"}}).encode())
    with (
        pytest.raises(ValueError, match=r"has no file '../other/x.safetensors'"),
        Folder(open_folder("folder", ADDRESS)),
    ):
        raise AssertionError("a file of another folder is read")


def test_other_weights_than_the_models_are_refused_with_the_address(
    store: type[ObjectStore],
) -> None:
    wide = replace(LLAMA, embed=2 * LLAMA.embed)
    with pytest.raises(ValueError, match=f"{ADDRESS} has not this model's weights"):
        read_params(ADDRESS, wide, template(wide))
    assert bytes_read(store, weights(store)) == headers(store)
    put_object(BELOW + INDEX, None)
    with pytest.raises(ValueError, match=rf"{ADDRESS} has neither model.safetensors nor "):
        read_params(ADDRESS, LLAMA, template(LLAMA))


def test_the_cache_lists_what_was_fetched_and_removes_it(store: type[ObjectStore]) -> None:
    read_params(ADDRESS, LLAMA, template(LLAMA))
    entries = {entry.about: entry for entry in cache_contents().entries}
    assert entries.keys() == {ADDRESS, *(f"s3://{name}" for name in weights(store))}
    assert entries[ADDRESS].kind == "texts of a store" and entries[ADDRESS].bytes > 0
    for name in weights(store):
        entry = entries[f"s3://{name}"]
        assert entry.kind == "file of a store" and entry.bytes == len(store.files[name])
    assert not cache_contents(trim_gb=0).removed, "a start may be reading them"
    for entry in cache_contents().entries:
        aged(entry.path)
    assert len(cache_contents(trim_gb=0).removed) == len(entries)
    assert not cache_contents().entries and os.listdir(cache_contents().directory) == [LOCK]
    assert read_config(ADDRESS).layers == LLAMA.layers


def test_adapters_are_read_from_an_address(
    local: Path, tmp_path: Path, store: type[ObjectStore]
) -> None:
    targets = ("period.0.attention.query",)
    params = adapters_of(LLAMA, targets)
    write_adapters(tmp_path / "lora", LLAMA, params, alpha=6.0)
    for path in (tmp_path / "lora").iterdir():
        put_object(f"bucket/lora/{path.name}", path.read_bytes())
    assert huggingface_lora("s3://bucket/lora", LLAMA) == LoRA(RANK, 6.0, targets)
    assert equal(read_adapters("s3://bucket/lora", LLAMA, shapes(params)), params)
    given, stored = (
        of(FromHuggingFace(folder, adapters=adapters), lora=LoRA(RANK, 6.0, targets))
        for folder, adapters in ((local, tmp_path / "lora"), (ADDRESS, "s3://bucket/lora"))
    )
    assert trained(stored, None, steps=2) == trained(given, None, steps=2)
    put_object("bucket/run/config.json", b'{"experiment": {}}')
    for address, message in (
        (ADDRESS, "it is a model's folder"),
        ("s3://bucket/run", "it is a run; `jaxtrain export RUN"),
        ("s3://bucket/none", "give the address of a model's folder, or of a run$"),
    ):
        with pytest.raises(ValueError, match=message):
            huggingface_lora(address, LLAMA)


TEXT = "a tokenizer of bytes"


def test_a_tokenizer_and_a_model_are_used_from_an_address(
    local: Path, store: type[ObjectStore]
) -> None:
    for name, text in tokenizer_files(ByteTokenizer(), None).items():
        put_object(BELOW + name, text.encode())
        (local / name).write_text(text)
    for path in (ADDRESS, f"{ADDRESS}/tokenizer.json", f"{ADDRESS}/"):
        tokenizer = TokenizerFile(path)
        assert tokenizer.absent() == []
        assert built(tokenizer).encode(TEXT) == built(TokenizerFile(str(local))).encode(TEXT)
    assert "nowhere" in TokenizerFile("s3://bucket/nowhere").absent()[0]
    assert "lacking.json" in TokenizerFile(f"{ADDRESS}/lacking.json").absent()[0]
    with pytest.raises(ValueError, match=r"chat_template='s3://bucket/x.jinja' is an address"):
        TokenizerFile(str(local), chat_template="s3://bucket/x.jinja")
    here, there = load(local), load(ADDRESS)
    assert there.config == here.config and equal(there.params, here.params)
    assert there.tokenizer is not None and here.tokenizer is not None
    assert there.tokenizer.vocabulary.encode(TEXT) == here.tokenizer.vocabulary.encode(TEXT)
    with pytest.raises(ValueError, match=f"^{ADDRESS}@3 is no run directory"):
        load(f"{ADDRESS}@3")
    with pytest.raises(ValueError, match=rf"^{ADDRESS} has no config.json of a run, so it is"):
        jaxtrain.check(of(FromRun(ADDRESS)), "cpu_1")
    put_object(BELOW + "tokenizer.json", b"{")
    with pytest.raises(ValueError, match=f"^{ADDRESS}/tokenizer.json cannot be used as a"):
        load(ADDRESS)
    put_object(BELOW + "config.json", b"\xff")
    with pytest.raises(ValueError, match=f"^{ADDRESS}/config.json is not UTF-8"):
        load(ADDRESS)


def built(tokenizer: TokenizerFile) -> Any:
    return tokenizer.build(lambda: iter(()), corpus="", cache_dir=Path())


def test_a_template_beside_the_tokenizer_is_fetched_and_a_file_of_another_name(
    store: type[ObjectStore],
) -> None:
    (files := tokenizer_files(ByteTokenizer(), None)).pop("generation_config.json")
    for name, text in files.items():
        put_object(f"bucket/tokenizer/{name}", text.encode())
    put_object("bucket/tokenizer/chat_template.jinja", b"{{ messages[0]['content'] }}")
    assert built(TokenizerFile("s3://bucket/tokenizer")).chat is not None
    put_object("bucket/other/mine.json", files["tokenizer.json"].encode())
    put_object("bucket/mine.json", files["tokenizer.json"].encode())
    paths = ("s3://bucket/other/mine.json", "s3://bucket/mine.json", "s3://bucket/mine.json/")
    for path in paths:
        assert built(TokenizerFile(path)).encode(TEXT) == built(TokenizerFile(path)).encode(TEXT)
    put_object("bucket/mine.json", b"{")
    with pytest.raises(ValueError, match=r"^s3://bucket/mine.json cannot be used as a tokenizer"):
        built(TokenizerFile("s3://bucket/mine.json"))


def aged(path: Path) -> None:
    """Makes an entry of the cache one that was not used for years."""
    for file in (*path.rglob("*"), path):
        os.utime(file, (0, 0))


def test_fetches_keep_the_cache_within_its_limit(
    store: type[ObjectStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what was not used for a month, also what a start that was killed has left."""
    read_params(ADDRESS, LLAMA, template(LLAMA))
    cache = cache_contents().directory
    killed = cache / f".{'a' * 24}.stored-{4 * '01'}"
    killed.write_bytes(b"half")
    (cache / f".store-{'b' * 24}-{4 * '01'}").mkdir()
    for path in cache.iterdir():
        aged(path)
    assert {"file, unfinished"} < {entry.kind for entry in cache_contents().entries}
    monkeypatch.setenv("JAXTRAIN_CACHE_GB", "0")
    put_object("bucket/other/model.safetensors", one_tensor("[1]") + bytes(4))
    other = open_folder("folder", "s3://bucket/other")
    assert [entry.about for entry in cache_contents().entries] == ["s3://bucket/other"]
    other.whole(SINGLE)
    about = [entry.about for entry in cache_contents().entries]
    assert sorted(about) == ["s3://bucket/other", "s3://bucket/other/model.safetensors"]


def test_other_users_can_read_what_was_fetched(store: type[ObjectStore]) -> None:
    (entry, *_) = weights(store)
    folder = open_folder("folder", ADDRESS)
    path = folder.whole(entry.removeprefix(BELOW))
    assert path.stat().st_mode & 0o044 == 0o044
    assert folder.here.stat().st_mode & 0o055 == 0o055
    assert (folder.here / "config.json").stat().st_mode & 0o044 == 0o044
    assert (path.parent / LOCK).stat().st_mode & 0o044 == 0o044


def test_a_file_system_without_locks_is_used(
    store: type[ObjectStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: Any) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.flock", no_locks)
    read_params(ADDRESS, LLAMA, template(LLAMA))


def test_texts_that_cannot_be_fetched_leave_nothing(store: type[ObjectStore]) -> None:
    def no_answer(kind: str, name: str) -> None:
        if name.endswith("config.json"):
            raise ConnectionError("no route")

    store.request = staticmethod(no_answer)
    with pytest.raises(StoreFailed, match="no route"):
        open_folder("folder", ADDRESS)
    store.request = staticmethod(lambda kind, name: None)
    assert not list(cache_contents().directory.iterdir())


def test_another_process_may_have_fetched_the_texts_meanwhile(store: type[ObjectStore]) -> None:
    folder = open_folder("folder", ADDRESS)
    texts = {k: file for k, file in (folder.stored or {}).items() if k == "config.json"}
    address = texts["config.json"].address.parent
    expected = {}

    def first(kind: str, name: str) -> None:
        if kind == "read" and not expected:
            expected["here"] = True  # of the second call, which is the other process
            expected["here"] = fetched_folder("store-x", address, texts, {})

    store.request = staticmethod(first)
    assert fetched_folder("store-x", address, texts, {}) == expected["here"]
    assert (expected["here"] / "config.json").is_file()
    assert not list(cache_contents().directory.glob(".store-*"))


def test_a_long_fetch_is_told(store: type[ObjectStore], monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    with told_to(told.append):
        folder, name = open_folder("folder", ADDRESS), min(weights(store))
        folder.whole(name.removeprefix(BELOW))
        assert not told
        empty_cache()
        monkeypatch.setattr("jaxtrain.files.fetched.LARGE", len(store.files[name]))
        folder.whole(name.removeprefix(BELOW))
    assert told == [f"fetching s3://{name}, 4.4 kB"]


def test_what_is_loaded_is_of_one_version(store: type[ObjectStore]) -> None:
    """Weights that were written since the config was read are refused."""
    loaded = load(ADDRESS)
    for name in weights(store):
        put_object(name, other_end(store.files[name]))
    with pytest.raises(StoreFailed, match="has been written again while it was read"):
        assert loaded.params


def test_the_recorded_digest_is_that_of_the_weights_that_were_read(
    store: type[ObjectStore], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is written again as soon as they are."""
    before = start_digest(FromHuggingFace(ADDRESS))

    def read_then_written(*given: Any) -> Any:
        params = read_params(*given)
        for name in weights(store):
            put_object(name, other_end(store.files[name]))
        return params

    monkeypatch.setattr("jaxtrain.weights.start.read_params", read_then_written)
    trained(of(FromHuggingFace(ADDRESS)), tmp_path / "run", steps=1)
    assert json.loads((tmp_path / "run/config.json").read_text())["start"] == before
    assert start_digest(FromHuggingFace(ADDRESS)) != before


def test_processes_that_saw_two_versions_do_not_begin(
    store: type[ObjectStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def gathered(text: str) -> list[str]:
        seen.append(text)
        return [text, "of another version"]

    monkeypatch.setattr("jaxtrain.weights.start.all_gather_text", gathered)
    with pytest.raises(ValueError, match=f"{ADDRESS} has been written while the processes looked"):
        trained(of(FromHuggingFace(ADDRESS)), None, steps=1)
    put_object(next(iter(weights(store))), b"x")
    with pytest.raises(ValueError, match="cannot be opened"):
        trained(of(FromHuggingFace(ADDRESS)), None, steps=1)
    assert len(seen) == 1 and seen[0] != OpenedStart("folder").version == ""
    assert OpenedStart(ADDRESS).version != seen[0]


def test_a_store_that_is_down_is_no_missing_tokenizer(
    store: type[ObjectStore], tmp_path: Path
) -> None:
    """Another start may succeed, and a run that goes on needs it no more."""
    for name, text in tokenizer_files(ByteTokenizer(), None).items():
        put_object(BELOW + name, text.encode())
    tokenizer = TokenizerFile(ADDRESS)
    data = jaxtrain.TextData(jaxtrain.data.StdlibSource(), tokenizer, seq=8)

    def no_answer(kind: str, name: str) -> None:
        raise ConnectionError("no route")

    store.request = staticmethod(no_answer)
    with pytest.raises(StoreFailed, match="no route"):
        jaxtrain.check(replace(of(FromHuggingFace(ADDRESS)), data=data), "cpu_1")
    with pytest.raises(StoreFailed, match="no route"):
        built(tokenizer)
    assert start_problem({}, FromHuggingFace(ADDRESS))
    with pytest.raises(StoreFailed, match="no route"):
        start_problem({"start": "x"}, FromHuggingFace(ADDRESS))
    dataset = type("Dataset", (), {"vocabulary": ByteTokenizer()})()
    config = config_of(of(FromHuggingFace(ADDRESS)))
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.json").write_text(json.dumps({"experiment": config}))
    with pytest.raises(StoreFailed, match="no route"):
        record_beginning(tmp_path / "run", dataset, is_new=True)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["config.json"]
    record_beginning(tmp_path / "run", dataset, is_new=False)
    assert (tmp_path / "run/tokenizer.json").is_file()


def test_a_run_that_has_all_asks_for_no_folder(store: type[ObjectStore], tmp_path: Path) -> None:
    """What it says of positions and of the tokenizer is recorded once."""
    config = json.loads(store.files[BELOW + "config.json"]) | {"max_position_embeddings": 7}
    put_object(BELOW + "config.json", json.dumps(config).encode())
    start = of(FromHuggingFace(ADDRESS))
    assert f"max_position_embeddings=7 of {ADDRESS}: its" in str(jaxtrain.check(start, "cpu_1"))
    trained(start, tmp_path / "run", steps=1)
    assert json.loads((tmp_path / "run/positions.json").read_text()) == {ROWS: 7}
    asked: list[str] = []
    store.request = staticmethod(lambda kind, name: asked.append(name))
    record_beginning(tmp_path / "run", None, is_new=False)
    assert not asked


def test_adapters_name_the_address_of_their_base(store: type[ObjectStore], tmp_path: Path) -> None:
    lora = LoRA(RANK, 6.0, ("period.0.attention.query",))
    trained(of(FromHuggingFace(Path(ADDRESS)), lora=lora), tmp_path / "run")
    out = jaxtrain.export(tmp_path / "run", "s3://bucket/adapters", adapters=True)
    assert os.fspath(out) == "s3://bucket/adapters"
    text = store.files["bucket/adapters/adapter_config.json"]
    assert json.loads(text)["base_model_name_or_path"] == ADDRESS


def test_an_entry_that_is_half_removed_is_none(store: type[ObjectStore]) -> None:
    def half(path: Path) -> None:
        (path / "config.json").unlink()
        raise KeyboardInterrupt

    open_folder("folder", ADDRESS)
    (entry,) = cache_contents().entries
    aged(entry.path)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("shutil.rmtree", half)
        cache_contents(trim_gb=0)
    assert [entry.kind for entry in cache_contents().entries] == ["file, unfinished"]


def test_a_cache_that_cannot_be_written_is_told(
    store: type[ObjectStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, name = open_folder("folder", ADDRESS), min(weights(store)).removeprefix(BELOW)

    for error in (
        OSError(errno.ENOSPC, "No space left on device"),
        PermissionError(errno.EACCES, "Permission denied", "/cache/x"),
    ):

        def refuses(path: Path, error: OSError = error) -> Any:
            raise error

        monkeypatch.setattr("jaxtrain.files.fetched.replacing", refuses)
        message = f"{name} cannot be read: .*{error.strerror}.* by JAXTRAIN_CACHE"
        with pytest.raises(StoreFailed, match=message):
            folder.whole(name)


def test_one_waits_for_another_and_says_so(store: type[ObjectStore]) -> None:
    folder, name = open_folder("folder", ADDRESS), min(weights(store)).removeprefix(BELOW)
    with open(cache_contents().directory / LOCK, "w") as held, ThreadPoolExecutor(1) as pool:
        fcntl.flock(held, fcntl.LOCK_EX)

        def tell(text: str) -> None:
            said.append(text)
            fcntl.flock(held, fcntl.LOCK_UN)

        said: list[str] = []
        with told_to(tell):
            fetch = pool.submit(contextvars.copy_context().run, folder.whole, name)
            try:
                assert fetch.result(timeout=60).is_file()
            finally:
                fcntl.flock(held, fcntl.LOCK_UN)
    assert said == [f"waiting until another process has fetched into {held.name[:-10]}"]
