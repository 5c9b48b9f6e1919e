"""A directory on the disk and one in an object store answer alike."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
from object_store import ObjectStore, object_store, put_below, put_object

from jaxtrain.files import store
from jaxtrain.files.store import COMMITTED, AnyPath, any_path


@pytest.fixture(params=["disk", "store"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[AnyPath]:
    """An empty directory of either kind."""
    if request.param == "disk":
        yield tmp_path
        return
    with object_store():
        yield any_path("place", "s3://bucket/place")


@pytest.fixture
def bucket() -> Iterator[type[ObjectStore]]:
    with object_store() as files:
        yield files


def test_names_are_those_right_below(place: AnyPath) -> None:
    assert store.names_in(place) == [] == store.names_in(place / "none")
    for name in ("a", "ab", "b/c", "b/d/e", "bc/f"):
        put_below(place / name, name.encode())
    assert sorted(store.names_in(place)) == ["a", "ab", "b", "bc"]
    assert sorted(store.names_in(place / "b")) == ["c", "d"]
    assert store.names_in(place / "a") == [], "a file has none"


def test_a_size_is_a_files(place: AnyPath) -> None:
    put_below(place / "a" / "b", b"four")
    put_below(place / "empty")
    assert [store.size_of(place / name) for name in ("a/b", "empty", "a", "c")] == [
        4,
        0,
        None,
        None,
    ]
    assert [store.exists(place / name) for name in ("a/b", "empty", "a", "c")] == [True] * 3 + [
        False
    ]


@pytest.mark.parametrize(
    ("offset", "size", "expected"),
    [
        (0, 4, b"four"),
        (1, 2, b"ou"),
        (3, 1, b"r"),
        (4, 0, b""),
        (2, 0, b""),
        (0, 5, None),
        (3, 2, None),
        (9, 1, None),
    ],
)
def test_a_range_is_whole_or_none(
    place: AnyPath, offset: int, size: int, expected: bytes | None
) -> None:
    put_below(place / "a", b"four")
    with store.reading(place / "a", offset, size) as file:
        assert (None if file is None else file.read(size)) == expected
    with pytest.raises(FileNotFoundError), store.reading(place / "b", 0, 1):
        pass


def test_a_range_of_a_store_that_fails_is_an_error_and_not_the_end(
    bucket: type[ObjectStore],
) -> None:
    put_object("bucket/a", b"four")

    def refuses(kind: str, name: str) -> None:
        if kind == "read":
            raise PermissionError(name)

    bucket.request = refuses
    with pytest.raises(PermissionError), store.reading(any_path("a", "s3://bucket/a"), 0, 2):
        pass


def test_a_file_is_put_whole_and_removed(place: AnyPath) -> None:
    store.put(place / "a", b"first, and longer")
    store.put(place / "a", b"second")
    assert store.read_named(place, "a") == "second"
    with store.local_copy(place / "a") as path:
        assert path.read_bytes() == b"second" and path.name == "a"
    for _ in range(2):
        store.remove_file(place / "a")
    assert not store.exists(place / "a")
    with pytest.raises(FileNotFoundError):
        store.read_named(place, "a")


def test_a_file_that_is_written_half_is_as_it_was(bucket: type[ObjectStore]) -> None:
    """Also if it has sent some of it, and when what was written is collected."""
    path = any_path("path", "s3://bucket/a")
    store.put(path, b"first")
    with pytest.raises(RuntimeError), store.writing(path) as writer:
        writer.write(bytes(6 * 2**20))
        raise RuntimeError("lost")
    gc.collect()
    assert bucket.files == {"bucket/a": b"first"}


def test_a_shared_file_outlives_the_first_of_its_names(place: AnyPath) -> None:
    store.put(place / "a", b"data")
    store.share_file(place / "a", place / "b")
    store.remove_file(place / "a")
    assert store.read_named(place, "b") == "data"


def test_a_directory_is_moved_and_removed_with_all_below(place: AnyPath) -> None:
    for name in ("1/a", "1/b/c", f"1/{COMMITTED}", "10/a"):
        put_below(place / name, name.encode())
    store.move(place / "1", place / "2")
    assert sorted(store.names_in(place)) == ["10", "2"]
    assert store.read_named(place / "2" / "b", "c") == "1/b/c"
    store.remove(place / "2")
    assert store.names_in(place) == ["10"]


def test_a_step_of_a_store_is_committed_last_and_first_uncommitted(
    bucket: type[ObjectStore],
) -> None:
    """Between any two requests the old one is whole, or the new one, or both are not committed."""
    place = any_path("place", "s3://bucket/run")
    whole = {"a", "b/c", COMMITTED}
    for name in whole:
        put_below(place / "1" / name, b"x")
    bucket.changes.clear()
    store.move(place / "1", place / "2")
    store.remove(place / "2")
    names = {f"bucket/run/1/{name}" for name in whole}
    for name, data in bucket.changes:
        names = names - {name} if data is None else names | {name}
        for step in ("1", "2"):
            files = {other.partition(f"run/{step}/")[2] for other in names} - {""}
            assert COMMITTED not in files or files == whole
    assert not names


def test_files_of_another_machine_are_seen_at_once(bucket: type[ObjectStore]) -> None:
    place = any_path("place", "s3://bucket/run")
    put_object("bucket/run/a", b"")
    assert store.names_in(place) == ["a"]
    put_object("bucket/run/b", b"")
    assert store.names_in(place) == ["a", "b"]
