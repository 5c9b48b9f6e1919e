"""Managers that are closed at the end, and a state small enough to save many times."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import pytest
from object_store import object_store

from jaxtrain.checkpoint import CheckpointManager, SavePolicy
from jaxtrain.files.store import AnyPath, any_path

Make = Callable[..., CheckpointManager]


def managers_of(place: AnyPath) -> Iterator[Make]:
    """Yields a function that makes managers of one directory; closes all of them at the end."""
    made = []

    def build(*, every: int = 1, keep: int = 3, directory: AnyPath = place) -> CheckpointManager:
        made.append(CheckpointManager(directory, SavePolicy(every=every, keep=keep)))
        return made[-1]

    yield build
    for manager in made:
        manager.close()


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Managers of one directory on the disk."""
    yield from managers_of(tmp_path / "checkpoints")


@pytest.fixture(params=["disk", "store"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[AnyPath]:
    """A directory for checkpoints, on the disk and in an object store."""
    if request.param == "disk":
        yield tmp_path / "checkpoints"
        return
    with object_store():
        yield any_path("place", "s3://bucket/run/checkpoints")


@pytest.fixture
def make_anywhere(place: AnyPath) -> Iterator[Make]:
    """Managers of `place`."""
    yield from managers_of(place)


@pytest.fixture
def small():
    return {"w": jax.random.normal(jax.random.key(1), (8, 16))}
