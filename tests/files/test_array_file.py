"""The sealed file: what comes back is what was written, and damage never passes for content."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from jaxtrain.files.array_file import ArraySpec, DamagedFile, open_arrays, whole, write_arrays

ARRAYS = {
    "a": np.arange(1000, dtype=np.uint16),
    "empty": np.empty(0, dtype=np.int64),
    "matrix": np.arange(12, dtype=np.float32).reshape(3, 4),
}


def write(path: Path, **meta: object) -> None:
    write_arrays(
        path, kind="test", meta=meta, arrays={name: whole(a) for name, a in ARRAYS.items()}
    )


def test_arrays_come_back_equal_and_the_digest_names_the_content(tmp_path: Path) -> None:
    write(tmp_path / "x", colour="red")
    write(tmp_path / "y", colour="red")
    write(tmp_path / "z", colour="blue")
    opened = open_arrays(tmp_path / "x", kind="test")
    assert opened.meta == {"colour": "red"}
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(opened.arrays[name], array)
        assert opened.arrays[name].dtype == array.dtype
    assert opened.digest == open_arrays(tmp_path / "y", kind="test").digest
    assert opened.digest != open_arrays(tmp_path / "z", kind="test").digest


def test_chunks_give_the_same_file_as_the_whole(tmp_path: Path) -> None:
    array = ARRAYS["matrix"]
    chunked = ArraySpec("float32", array.shape, (array[:1], array[1:]))
    for name, spec in (("whole", whole(array)), ("chunks", chunked)):
        write_arrays(tmp_path / name, kind="test", meta={}, arrays={"m": spec})
    assert (tmp_path / "whole").read_bytes() == (tmp_path / "chunks").read_bytes()


def test_every_flipped_byte_is_found_or_harmless(tmp_path: Path) -> None:
    path = tmp_path / "x"
    write(path)
    good = path.read_bytes()
    harmless = 0
    for at in [*range(0, 1500, 7), *range(4096, len(good), 13)]:
        path.write_bytes(good[:at] + bytes([good[at] ^ 0x10]) + good[at + 1 :])
        try:
            opened = open_arrays(path, kind="test", verify=True)
        except DamagedFile:
            continue
        harmless += 1
        for name, array in ARRAYS.items():
            np.testing.assert_array_equal(opened.arrays[name], array)
    # Only padding may be flipped unseen: the header is under 700 bytes.
    assert 0 < harmless < 150


@pytest.mark.parametrize("keep", [0, 10, 30, 500, 4097, -1])
def test_a_file_cut_short_is_refused(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "x"
    write(path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DamagedFile, match="x is"):
        open_arrays(path, kind="test", verify=False)


def test_another_kind_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "x")
    with pytest.raises(DamagedFile, match="is a test file, not a tokens file"):
        open_arrays(tmp_path / "x", kind="tokens")


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_full_disk_is_named_and_the_old_file_stays(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x"
    write(path)
    before = path.read_bytes()

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, step, full)
        with pytest.raises(ValueError, match="x cannot be written: No space left"):
            write(path, colour="red")
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["x"]
    with pytest.raises(ValueError, match="cannot be written: File exists"):
        write(path / "below")


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "x"
    write(path)
    before = path.read_bytes()
    short = ArraySpec("int64", (5,), (np.zeros(4, np.int64),))
    with pytest.raises(ValueError, match="'a' of shape"):
        write_arrays(path, kind="test", meta={}, arrays={"a": short})
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["x"]
