"""The directory a run's checkpoints live in: what is committed, what fits, what failed.

Nothing here imports Orbax, so that a fresh run learns that there is nothing to resume without
paying for it.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

# Where Orbax's JSON handler puts the item called `metadata` of a step.
RECORD = Path("metadata") / "metadata"
# Of the record: {"format", "leaves": {path: [shape, dtype, key generator]}, "metadata"}.
FORMAT = 1
# A step on its way out. Removing a directory tree is not atomic, renaming it is: a kill in between
# must not leave half a step that looks newest.
DISCARDED = ".discarded"


class CheckpointError(ValueError):
    """Storage failed, or would have lost something: step, directory, cause, and what is safe.

    Attributes:
        step: the step that was being saved or restored.
        directory: the directory of the checkpoints.
        last_good: the newest step that is committed there, or None.
    """

    def __init__(self, problem: str, *, step: int, directory: Path, remedy: str) -> None:
        self.step = step
        self.directory = directory
        self.last_good = newest(committed_steps(directory))
        safe = (
            "no checkpoint is committed there"
            if self.last_good is None
            else f"step {self.last_good} is committed there and safe"
        )
        super().__init__(f"checkpoint step {step} in {directory}: {problem}; {safe}; {remedy}")


def committed_steps(directory: Path) -> list[int]:
    """The steps that were saved whole, in ascending order.

    Orbax writes into `STEP.orbax-checkpoint-tmp` and renames it to `STEP` when every byte of every
    process is there, so the name is the commit. A directory without the record is not one of ours.
    A path that cannot be listed holds none.
    """
    if not directory.is_dir():
        return []
    names = [entry.name for entry in directory.iterdir() if entry.name.isdecimal()]
    steps = {int(name) for name in names}  # 007 is not how we spell 7
    return sorted(step for step in steps if (directory / str(step) / RECORD).is_file())


def newest(steps: list[int]) -> int | None:
    """The last of ascending steps, or None."""
    return steps[-1] if steps else None


def read_record(directory: Path, step: int) -> dict[str, Any]:
    """The record of a committed step: its leaves and metadata.

    Raises:
        CheckpointError: there is no such step, or its record cannot be read.
    """
    steps = committed_steps(directory)
    if step not in steps:
        raise CheckpointError(
            "no such step is committed",
            step=step,
            directory=directory,
            remedy=f"restore one of {steps}" if steps else "start from the beginning",
        )
    try:
        record = json.loads((directory / str(step) / RECORD).read_text())
        if record.get("format") != FORMAT:
            raise ValueError(f"format {record.get('format')}, and this version reads {FORMAT}")
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"its record cannot be read: {describe(error)}",
            step=step,
            directory=directory,
            remedy="restore an older step, or use the version that wrote it",
        ) from error
    return record


def discard_steps(directory: Path, steps: list[int]) -> None:
    """Remove `steps`, each atomically, and whatever an interrupted call left behind."""
    # Newest first: after a kill, what is left is still an unbroken history.
    for step in sorted(steps, reverse=True):
        (directory / str(step)).rename(directory / f"{step}{DISCARDED}")
    for leftover in directory.glob(f"*{DISCARDED}"):
        shutil.rmtree(leftover)


def check_writable(directory: Path, bytes_needed: int) -> None:
    """Refuse, before a run, a directory that cannot take `bytes_needed` bytes.

    Makes the directory, writes and removes one small file. Costs a few milliseconds.

    Raises:
        ValueError: the directory cannot be made or written, or has too little free space.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=directory, prefix=".writable-") as probe:
            probe.write(b"\0" * 4096)
            probe.flush()
            os.fsync(probe.fileno())
        free = shutil.disk_usage(directory).free
    except OSError as error:
        raise ValueError(
            f"{directory} cannot be written: {describe(error)}; "
            "give another --run-dir, or make room and permission there"
        ) from error
    if free < bytes_needed:
        raise ValueError(
            f"checkpoints need {bytes_needed:,} bytes in {directory}, which has {free:,} free; "
            f"free {bytes_needed - free:,} bytes, keep fewer checkpoints, or give another --run-dir"
        )


def json_text(value: object, *, what: str, indent: int | None = None) -> str:
    """`value` as JSON text, or ValueError that names what holds something else."""
    try:
        return json.dumps(value, indent=indent)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{what} is not JSON: {error}; hold only dicts, lists, strings, numbers, booleans, None"
        ) from error


def describe(error: BaseException) -> str:
    """An exception in one line: its type and its own words, the middle of a long text cut."""
    text = " ".join(str(error).split())
    if len(text) > 400:
        # TensorStore nests its messages and puts what the system said ("no space left") last.
        text = f"{text[:180]} ... {text[-200:]}"
    return f"{type(error).__name__}: {text}"
