"""What somebody else may have put where a file is expected: links, pipes, paths, endless JSON."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxtrain.files import regular
from jaxtrain.files.folder import file_of, plain_name
from jaxtrain.files.json_text import DEEPEST, parse_json
from jaxtrain.files.regular import open_regular, read_text, refuse_links, write_text


@pytest.fixture(autouse=True)
def no_wait(answers_within: Any) -> Iterator[None]:
    """A pipe without a partner is waited for without end."""
    with answers_within(10):
        yield


MODES = ("rb", "wb", "ab", "r+b", "a+b")


@pytest.mark.parametrize("mode", MODES)
def test_a_regular_file_is_opened_as_open_does(mode: str, tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    for path in (ours, theirs):
        path.write_bytes(b"before")
    with open_regular(ours, mode) as a, theirs.open(mode, buffering=0) as b:
        if mode != "rb":
            assert a.write(b"now") == b.write(b"now")
        if mode in ("rb", "r+b", "a+b"):
            assert (a.seek(0), a.read()) == (b.seek(0), b.read())
    assert ours.read_bytes() == theirs.read_bytes()


@pytest.mark.parametrize("mode", MODES)
def test_what_is_no_file_is_refused_at_once(mode: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name, kind in (("pipe", "a named pipe"), ("folder", "a directory")):
        with pytest.raises(ValueError, match=f"{name} is {kind}, and a file is expected there"):
            open_regular(tmp_path / name, mode)
    with pytest.raises(ValueError, match="/dev/zero is a device"):
        open_regular(Path("/dev/zero"), mode)
    if mode in ("rb", "r+b"):
        with pytest.raises(FileNotFoundError):
            open_regular(tmp_path / "nothing", mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("there", [True, False])
def test_nothing_is_written_through_a_link(mode: str, there: bool, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    if there:
        keys.write_text("secret")
    (tmp_path / "link").symlink_to("keys")
    if mode == "rb":
        if there:
            assert read_text(tmp_path / "link") == "secret"
        return
    with pytest.raises(ValueError, match="link is a symbolic link to keys, which would be written"):
        open_regular(tmp_path / "link", mode)
    assert keys.exists() == there and (not there or keys.read_text() == "secret")


def test_texts_are_whole_and_have_a_largest_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, text = tmp_path / "text", "é\r\n\n" * 1000
    write_text(path, "longer than that" * 1000)
    write_text(path, text)
    assert read_text(path) == text
    monkeypatch.setattr(regular, "LARGEST_TEXT", 4999)
    with pytest.raises(ValueError, match="text has 5,000 bytes; a text here has at most 4,999"):
        read_text(path)


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "/etc/passwd", "a/b", "a\\b", "a\0"])
def test_a_path_is_no_name_of_a_file(name: str, tmp_path: Path) -> None:
    assert not plain_name(name)
    with pytest.raises(ValueError, match="is no name of a file in"):
        file_of(tmp_path, name)


def test_links_lead_within_a_folder_or_to_a_cache_that_folders_are_made_of(tmp_path: Path) -> None:
    cache = tmp_path / "hub" / "models--somebody--model"
    folder = cache / "snapshots" / "0f3a"
    for path in (folder, cache / "blobs"):
        path.mkdir(parents=True)
    (cache / "blobs" / "4be1").write_text("weights")
    (tmp_path / "outside").write_text("outside")
    (cache / "snapshots" / "0f3a-other").mkdir()
    (cache / "snapshots" / "0f3a-other" / "file").write_text("its name begins alike")
    links = {
        "model.safetensors": "../../blobs/4be1",
        "again": "model.safetensors",
        "own": "file",
        "out": "../../../../outside",
        "absolute": str(tmp_path / "outside"),
        "beside": "../0f3a-other/file",
        "nowhere": "../nothing",
        "round": "round",
    }
    for name, target in links.items():
        (folder / name).symlink_to(target)
    (folder / "file").write_text("own")
    for name, text in {"model.safetensors": "weights", "again": "weights", "own": "own"}.items():
        assert file_of(folder, name).read_text() == text
    for name in ("out", "absolute", "beside", "nowhere"):
        with pytest.raises(ValueError, match=f"{name} is a symbolic link out of its folder, to"):
            file_of(folder, name)
    with pytest.raises(ValueError, match="round"):
        read_text(file_of(folder, "round"))
    assert file_of(folder, "not_there") == folder.resolve() / "not_there"
    (tmp_path / "short").symlink_to(folder)  # the folder itself may be one
    assert read_text(file_of(tmp_path / "short", "own")) == "own"


def test_a_directory_that_leads_out_is_refused_with_all_that_does(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "folder").mkdir(parents=True)
    (run / "inner").symlink_to("folder")
    refuse_links(run)
    refuse_links(tmp_path / "nothing")
    (run / "checkpoints").symlink_to("../elsewhere")
    (run / ".lock").symlink_to("../keys")
    os.mkfifo(run / "metrics.jsonl")
    with pytest.raises(ValueError) as caught:
        refuse_links(run)
    said = str(caught.value)
    for part in (
        ".lock is a symbolic link to ../keys",
        "checkpoints is a symbolic link to ../elsewhere",
        "metrics.jsonl is a named pipe",
        "or make the directory itself one",
    ):
        assert part in said
    assert "inner" not in said


DEEP: dict[str, Callable[[int], str]] = {
    "lists": lambda n: "[" * n + "]" * n,
    "objects": lambda n: '{"a":' * n + "1" + "}" * n,
    "both": lambda n: '[{"a":' * (n // 2) + "1" + "}]" * (n // 2),
}


@pytest.mark.parametrize("kind", DEEP)
def test_json_nests_so_deep_and_no_deeper(kind: str) -> None:
    make = DEEP[kind]
    assert parse_json(make(DEEPEST)) == json.loads(make(DEEPEST))
    for depth in (DEEPEST + 2, sys.getrecursionlimit() - 50, 10**6):
        with pytest.raises(ValueError, match="nests more than 100 levels deep"):
            parse_json(make(depth))
    with pytest.raises(ValueError, match="Expecting value"):
        parse_json("")
    with pytest.raises(ValueError, match="for integer string conversion"):
        parse_json("1" * 5000)
