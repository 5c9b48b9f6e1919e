"""Lines of JSON: whatever is left of the last one, those before it are read and the next one is
whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxtrain.files.json_lines import add_line, read_lines

LINES = [{"step": 1, "who": "é"}, {"step": 2, "of": [1, None]}, {"step": 33}]


def test_every_cut_of_the_last_line_is_passed_over_and_written_behind(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "lines.jsonl"
    for each in LINES:
        add_line(path, each)
    assert read_lines(path) == LINES
    data = path.read_bytes()
    last = data.rstrip(b"\n").rfind(b"\n") + 1
    for cut in range(last, len(data)):
        path.write_bytes(data[:cut])
        left = LINES if cut == len(data) - 1 else LINES[:2]  # it lacks nothing but its end
        assert read_lines(path) == left
        add_line(path, {"next": 4})
        assert read_lines(path) == [*left, {"next": 4}]
    path.write_bytes(b'{"st')
    add_line(path, {"next": 4})
    assert path.read_bytes() == b'{"next": 4}\n'


@pytest.mark.parametrize("bad", [b"{torn", b"3", b"\xff", b""])
def test_a_bad_line_that_has_an_end_is_told(tmp_path: Path, bad: bytes) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'{"a": 1}\n' + bad + b"\n")
    add_line(path, {"b": 2})
    with pytest.raises(ValueError, match=r"lines\.jsonl, line 2 is no JSON object"):
        read_lines(path)
    assert path.read_bytes() == b'{"a": 1}\n' + bad + b'\n{"b": 2}\n', "nothing of it is lost"


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    (tmp_path / "lines.jsonl").symlink_to(tmp_path / "mine")
    with pytest.raises(ValueError, match="symbolic link"):
        add_line(tmp_path / "lines.jsonl", {"a": 1})
    assert not (tmp_path / "mine").read_bytes()
