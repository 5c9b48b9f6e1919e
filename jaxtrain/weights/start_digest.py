"""The identity of the weights that a run begins with, by which they are the same elsewhere.

A run reads them at its first start alone: so three rows of each tensor of a folder tell enough, and
take no time that grows with the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from hashlib import sha256
from typing import Any

from jaxtrain.checkpoint.storage import committed_steps
from jaxtrain.experiment import FromRun, Start
from jaxtrain.files.pointer import StoreFailed, checkpoints_in
from jaxtrain.huggingface.folder import Folder
from jaxtrain.huggingface.peft import WEIGHTS
from jaxtrain.weights.start import manifest_of, opened_start, run_of

ENTRY = "start"
"""The entry of a run's config.json with the digest of the weights that it began with."""
START_PATHS = tuple(
    f"experiment.fine_tuning.start.{name}" for name in ("folder", "adapters", "run_dir")
)
"""Fields that name a place, where the same weights may be under another name."""


def start_digest(start: Start, *, fetch: bool = False) -> str:
    """Returns a digest of weights: of a run's step those of its chunks, of a folder one of the
    names, shapes, dtypes and three rows of its tensors. fetch: as of `Folder.digest`.

    Raises ValueError where there are none, DamagedCheckpoint where files of the step are missing or
    cut.
    """
    if isinstance(start, FromRun):
        return manifest_of(run_of(start), start.step)[1].digest
    opened = opened_start(start)
    with Folder(opened.weights) as files:
        digest = files.digest(fetch=fetch)
    if opened.adapter_weights is not None:
        with Folder(opened.adapter_weights, WEIGHTS, index=None) as files:
            digest = sha256((digest + files.digest(fetch=fetch)).encode()).hexdigest()
    return digest


def start_problem(config: Mapping[str, Any], start: Start | None) -> str:
    """Returns why the weights to begin with are not known to be those with which the run of this
    config.json began, whatever their places are called; "" if they are."""
    recorded = config.get(ENTRY)
    if start is None or not isinstance(recorded, str):
        return "the run does not record which weights it began with"
    problems = []
    for one in _candidates(start):
        try:
            if start_digest(one) == recorded:
                return ""
        except StoreFailed:
            raise
        except (ValueError, OSError) as error:
            problems.append(f"its weights cannot be read: {error}")
    return problems[0] if problems else "its weights are not those that the run began with"


def _candidates(start: Start) -> list[Start]:
    """Returns the weights that are meant. Of a run without a step any may have been the newest when
    the other one began."""
    if not isinstance(start, FromRun) or start.step is not None:
        return [start]
    steps = committed_steps(checkpoints_in(run_of(start)))
    return [replace(start, step=step) for step in steps[::-1]] or [start]
