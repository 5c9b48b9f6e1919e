"""What the cache holds, by name, size and last use; what is removed of it, and by whom."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxtrain import cli
from jaxtrain.data import Dataset, TextData, token_rows
from jaxtrain.files.cache import mark_used
from jaxtrain.files.cache_entries import DAY_S, UNUSED_DAYS, cache_contents, keep_within_limit
from jaxtrain.sources import TextFiles
from jaxtrain.tokenizers import BpeTokenizer

KEYS = [f"{number:024x}" for number in range(9)]


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """Five entries of 100 bytes, the last used an hour ago, each other one 20 days before the next;
    and two files of somebody else."""
    folder = tmp_path / "cache"
    (folder / f"{KEYS[1]}.tokens.parts").mkdir(parents=True)
    names = [f"{KEYS[0]}.tokens", f"{KEYS[1]}.tokens.parts/000000.tokens"]
    names += [f"packing-{16 * 'a'}-0-3.index", f"bpe-{KEYS[3]}.tokenizer"]
    names += [f".{KEYS[4]}.tokens.{32 * 'b'}.tmp"]
    for number, name in enumerate(names):
        used = time.time() - 3600 - (len(names) - 1 - number) * 20 * DAY_S
        (folder / name).write_bytes(bytes(100))
        os.utime(folder / name, (used, used))
        os.utime((folder / name).parent, (0, 0))
    (folder / f"{KEYS[0]}.tokens.about").write_text("books, once")
    for name in ("thesis.tokens", "notes.txt"):
        (folder / name).write_bytes(bytes(1000))
        os.utime(folder / name, (0, 0))
    return folder


KINDS = [
    "tokens",
    "tokens, unfinished",
    "packing index",
    "tokenizer",
    "file, unfinished",
]


def test_the_longest_unused_is_first_and_what_is_not_ours_is_no_entry(cache: Path) -> None:
    contents = cache_contents(cache)
    assert [entry.kind for entry in contents.entries] == KINDS and contents.bytes == 500
    assert contents.entries[0].about == "books, once" and not contents.removed
    shown = str(contents).splitlines()
    assert len(shown) == 1 + 5 + 1 and shown[1].endswith("tokens              100 B  books, once")
    assert shown[-1] == f"{cache}: 5 entries, 500 B; limit 100 GB (JAXTRAIN_CACHE_GB)"


@pytest.mark.parametrize(("limit", "removed"), [(1e-6, 0), (499e-9, 1), (300e-9, 2), (0, 5)])
def test_it_is_trimmed_to_a_size(limit: float, removed: int, cache: Path) -> None:
    contents = cache_contents(cache, trim_gb=limit)
    assert [entry.kind for entry in contents.removed] == KINDS[:removed]
    assert [entry.kind for entry in contents.entries] == KINDS[removed:]
    assert len([*cache.iterdir()]) == 5 - removed + 2 + (removed == 0), "its note goes with it"
    assert ("removed: " in str(contents)) == (removed > 0)


def test_what_is_being_written_and_what_another_user_uses_stay(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first for an hour; a mark beside an entry of another user is as good as its own time."""
    now = time.time()
    os.utime(cache / f".{KEYS[4]}.tokens.{32 * 'b'}.tmp", (now, now))
    refused, utime = cache / f"{KEYS[0]}.tokens", os.utime

    def of_another(path: Path, *times: Any) -> None:
        if path == refused:
            raise PermissionError
        utime(path, *times)

    monkeypatch.setattr(os, "utime", of_another)
    mark_used(refused)
    monkeypatch.setenv("JAXTRAIN_CACHE_GB", "0")
    keep_within_limit(cache)
    left = [entry.kind for entry in cache_contents(cache).entries]
    assert sorted(left) == sorted([KINDS[0], *KINDS[3:]])
    assert [e.kind for e in cache_contents(cache, trim_gb=0).entries] == [KINDS[4]]
    assert not [*cache.glob("*.used")]


def test_an_entry_that_cannot_be_removed_keeps_no_other(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor does one that another process removes meanwhile."""
    unlink = Path.unlink

    def stuck(path: Path, missing_ok: bool = False) -> None:
        if path.name == f"{KEYS[0]}.tokens":
            raise PermissionError(f"not {path.name}")
        if path.name.startswith("packing-"):
            unlink(path)
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", stuck)
    monkeypatch.setenv("JAXTRAIN_CACHE_GB", "0")
    keep_within_limit(cache)
    assert "1 entries cannot be removed; the first: not" in caplog.messages[0]
    assert [e.kind for e in cache_contents(cache).entries] == [KINDS[0], *KINDS[3:]]
    with pytest.raises(PermissionError, match="1 entries cannot be removed"):
        cache_contents(cache, trim_gb=0)
    assert [e.kind for e in cache_contents(cache).entries] == KINDS[:1]


def test_no_limit_is_null_in_json(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXTRAIN_CACHE_GB", "inf")
    assert cache_contents(cache).as_json()["limit_gb"] is None


@pytest.mark.parametrize(("limit", "removed"), [("450e-9", 1), ("0", 4), ("1", 0), ("inf", 0)])
def test_a_run_removes_what_was_unused_for_thirty_days(
    limit: str,
    removed: int,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """80, 60, 40 and 20 days ago and now, in that order; the fourth is a tokenizer, which stays."""
    monkeypatch.setenv("JAXTRAIN_CACHE_GB", limit)
    keep_within_limit(cache)
    old = min(removed, 3)
    assert [entry.kind for entry in cache_contents(cache).entries] == KINDS[old:]
    told = f"removed {100 * old} B that were not used for {UNUSED_DAYS} days ({old} entries)"
    assert [told in message for message in caplog.messages] == [True] * (old > 0)


@pytest.fixture
def corpus(tmp_path: Path) -> TextData:
    rng, path = np.random.default_rng(0), tmp_path / "books.txt"
    words = ["ab", "cde", "fghi", "j"]
    path.write_text("\n\n".join(" ".join(rng.choice(words, 40)) for _ in range(60)))
    source = TextFiles(str(path), separator="\n\n", held_out=0.2)
    return TextData(source, BpeTokenizer(270), seq=16)


def test_all_that_a_corpus_leaves_there_is_listed_with_what_it_is_of(
    tmp_path: Path, corpus: TextData
) -> None:
    folder = tmp_path / "made"
    for split in ("train", "held_out"):
        corpus.open(split, seed=3, cache_dir=folder).rows(np.arange(1))
    entries = cache_contents(folder).entries
    files = {path for path in folder.iterdir() if path.suffix != ".about"}
    assert {entry.path for entry in entries} == files
    assert sorted(entry.kind for entry in entries) == [
        *("packing index", "packing index", "tokenizer", "tokens", "tokens")
    ]
    about = {entry.about for entry in entries}
    assert {"epoch 0 by seed 3", "epoch 0 by seed 0", "BpeTokenizer(vocab=270)"} <= about
    assert any(text.startswith("held_out of TextFiles(patterns=") for text in about)


def test_what_is_opened_is_used_and_a_long_run_uses_what_it_reads(
    tmp_path: Path, corpus: TextData, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, clock = tmp_path / "made", SimpleNamespace(monotonic=lambda: 0.0)
    monkeypatch.setattr(token_rows, "time", clock)

    def age() -> None:
        for path in folder.iterdir():
            os.utime(path, (0, 0))

    def fresh() -> set[str]:
        return {e.kind for e in cache_contents(folder).entries if e.used > 1e9}

    corpus.open("train", seed=3, cache_dir=folder).rows(np.arange(2))
    age()
    dataset = corpus.open("train", seed=3, cache_dir=folder)
    assert fresh() == {"tokens", "tokenizer"}
    dataset.rows(np.arange(2))
    assert fresh() == {"tokens", "tokenizer", "packing index"}
    age()
    dataset.rows(np.arange(2))
    clock.monotonic = lambda: DAY_S - 1.0
    dataset.rows(np.arange(2))
    assert not fresh()
    clock.monotonic = lambda: DAY_S + 1.0
    dataset.rows(np.arange(2))
    assert fresh() == {"tokens", "packing index"}
    age()
    dataset.rows(np.arange(2))
    assert not fresh(), "once a day"


def test_what_is_new_makes_room(
    tmp_path: Path, corpus: TextData, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a corpus, and by the index of another seed."""
    folder, old = tmp_path / "made", tmp_path / "made" / f"{KEYS[0]}.tokens"
    monkeypatch.setenv("JAXTRAIN_CACHE_GB", "0")
    folder.mkdir()

    def still_there(act: Callable[[], object]) -> bool:
        old.write_bytes(b"a")
        os.utime(old, (0, 0))
        act()
        return old.exists()

    def opened(seed: int) -> Dataset:
        return corpus.open("train", seed=seed, cache_dir=folder)

    assert not still_there(lambda: opened(1))
    assert still_there(lambda: opened(1)), "nothing was tokenised the second time"
    assert not still_there(lambda: opened(1).rows(np.arange(1)))
    assert still_there(lambda: opened(1).rows(np.arange(1)))
    assert not still_there(lambda: opened(2).rows(np.arange(1)))


def test_the_command_lists_and_trims(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["cache", str(cache)]) == 0
    assert "books, once" in capsys.readouterr().out
    assert cli.main(["cache", str(cache), "--trim", "400e-9", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["bytes"], len(report["entries"]), report["limit_gb"]) == (400, 4, 100.0)
    assert report["removed"][0]["path"] == str(cache / f"{KEYS[0]}.tokens")


@pytest.mark.parametrize("trim", ["-1", "nan"])
def test_a_size_that_is_none_and_a_folder_that_is_none_are_refused(
    trim: str, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["cache", str(cache), f"--trim={trim}"]) == 2
    assert "trim_gb" in capsys.readouterr().err and len(cache_contents(cache).entries) == 5
    assert cli.main(["cache", str(cache / "absent")]) == 2
    assert f"there is no directory {cache / 'absent'}" in capsys.readouterr().err
