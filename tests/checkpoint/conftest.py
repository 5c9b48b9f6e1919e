"""Managers that are closed at the end, and a state small enough to save many times."""

from __future__ import annotations

from pathlib import Path

import jax
import pytest

from jaxtrain.checkpoint import CheckpointManager, SavePolicy


@pytest.fixture
def make(tmp_path):
    """Managers of one directory, all closed at the end."""
    made = []

    def build(*, every: int = 1, keep: int = 3, directory: Path = tmp_path / "checkpoints"):
        made.append(CheckpointManager(directory, SavePolicy(every=every, keep=keep)))
        return made[-1]

    yield build
    for manager in made:
        manager.close()


@pytest.fixture
def small():
    return {"w": jax.random.normal(jax.random.key(1), (8, 16))}
