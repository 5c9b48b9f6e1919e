"""A run is refused before it starts where its checkpoints would not fit."""

from __future__ import annotations

import errno
import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxtrain.checkpoint import check_writable, named_leaves, stored_bytes
from jaxtrain.checkpoint.storage import committed_steps, discard_steps


def test_a_directory_with_room_is_made_and_left_empty(tmp_path):
    check_writable(tmp_path / "a" / "b", shutil.disk_usage(tmp_path).free // 2)
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_too_little_room_says_free_and_needed(tmp_path):
    with pytest.raises(ValueError) as error:
        check_writable(tmp_path, 10**18)
    found = re.search(r"in (.*): they need ([\d,]+) bytes, and ([\d,]+) are free", str(error.value))
    assert found and int(found[2].replace(",", "")) == 10**18
    assert found[1] == str(tmp_path)
    free = int(found[3].replace(",", ""))
    assert abs(free - shutil.disk_usage(tmp_path).free) < 2**30
    assert f"free {10**18 - free:,} bytes" in str(error.value)


def test_a_path_through_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ValueError, match=r"cannot be written: \w+Error.*another --run-dir"):
            check_writable(path, 1)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_write_that_fails_is_refused_with_its_cause(tmp_path, monkeypatch, code):
    def fail(_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(ValueError, match=os.strerror(code)):
        check_writable(tmp_path, 1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("killed_after", range(6))
def test_of_discarded_steps_the_newest_goes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed_after: int
) -> None:
    """By number: whenever it is killed, what is left is the history up to a step."""
    steps, renames, rename = [1, 2, 9, 10, 30], [], Path.rename
    for step in steps:
        (tmp_path / str(step)).mkdir()

    def counted(path: Path, to: Path) -> Path:
        if len(renames) == killed_after:
            raise KeyboardInterrupt
        renames.append(path.name)
        return rename(path, to)

    monkeypatch.setattr(Path, "rename", counted)
    with suppress(KeyboardInterrupt):
        discard_steps(tmp_path, [9, 30, 2, 10])
    assert committed_steps(tmp_path) == steps[: 5 - min(killed_after, 4)]
    finished = killed_after >= 4
    assert bool(list(tmp_path.glob("*.discarded"))) is (killed_after > 0 and not finished)


def test_paths_are_the_keys_joined_by_dots_in_the_order_of_leaves():
    tree = {"b": [{"q": 1, "k": None}, (2,)], "a": {3: {"x": 4}}}
    assert named_leaves(tree) == {"a.3.x": 4, "b.0.q": 1, "b.1.0": 2}
    assert list(named_leaves(tree).values()) == jax.tree.leaves(tree)


def test_paths_do_not_depend_on_the_order_of_insertion():
    one, two = {"x": 1, "y": {"p": 2, "q": 3}}, {"y": {"q": 3, "p": 2}, "x": 1}
    assert list(named_leaves(one).items()) == list(named_leaves(two).items())


@pytest.mark.parametrize(
    "tree", [{"a.b": 1, "a": {"b": 2}}, {"a": {"": 1}, "a.": 2}, {"x.0": 1, "x": [2]}]
)
def test_paths_that_read_alike_are_refused(tree):
    with pytest.raises(ValueError, match="share the path"):
        named_leaves(tree)


@pytest.mark.parametrize(
    ("leaf", "size"),
    [
        (jnp.zeros((3, 5), jnp.bfloat16), 30),
        (jnp.int32(1), 4),
        (jnp.zeros((0, 7)), 0),
        (jax.random.key(0), 8),
        (jax.random.split(jax.random.key(0, impl="rbg"), 3), 48),
        (jax.ShapeDtypeStruct((2**20, 2**20), jnp.float32), 2**42),
    ],
    ids=["bf16", "scalar", "empty", "key", "rbg keys", "abstract"],
)
def test_stored_bytes_counts_what_is_written(leaf, size):
    assert stored_bytes({"a": leaf, "b": [leaf]}) == 2 * size
