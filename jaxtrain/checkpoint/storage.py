"""The directory of a run's checkpoints: committed steps, free space, failures."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from jaxtrain.cluster.agreement import FailedTogether
from jaxtrain.state_format.manifest import (
    ITEM,
    Manifest,
    other_steps,
    read_failure,
    read_manifest,
)
from jaxtrain.state_format.manifest import NAME as MANIFEST

# A step to remove. Removing a directory tree is not atomic, renaming it is: a kill in between must
# not leave half a step that looks newest.
DISCARDED = ".discarded"
# A damaged step that was skipped: kept for inspection.
DAMAGED = ".damaged"
# A step that was committed though some process could not write its part.
REFUSED = ".failed"
# Orbax's name of a step that is being written.
UNFINISHED = "*.orbax-checkpoint-tmp*"


class CheckpointError(ValueError):
    """Storage failed, or would have lost data: step, directory, cause, and the last good step.

    Attributes:
        step: the step that was being saved or restored.
        directory: the directory of the checkpoints.
        problem: what failed, and why.
        last_good: the newest step that is committed there (older than a damaged one); None if
            there is none, or none can be seen.
    """

    def __init__(
        self, problem: str, *, step: int, directory: Path, remedy: str, damaged: bool = False
    ) -> None:
        self.step = step
        self.directory = directory
        self.problem = problem
        self.last_good: int | None = None
        try:
            good_steps = [s for s in committed_steps(directory) if not (damaged and s >= step)]
        except OSError as error:  # the same trouble, or another
            safe = f"what is committed there cannot be seen ({error.strerror})"
        else:
            self.last_good = newest(good_steps)
            safe = (
                f"no {'older ' * damaged}checkpoint is committed there"
                if self.last_good is None
                else f"step {self.last_good} is committed there"
            )
        super().__init__(f"checkpoint step {step} in {directory}: {problem}; {safe}; {remedy}")


class FailedStorage(CheckpointError):
    """Reading or writing failed, of what may be in order: another try may succeed."""

    refusal = False  # for `violations.refuses`


class FailedSave(FailedStorage):
    """A step was not saved."""


class DamagedCheckpoint(CheckpointError):
    """A committed step is damaged. damages: a line for each damage."""

    def __init__(self, damages: list[str], *, step: int, directory: Path, remedy: str) -> None:
        self.damages = damages
        shown = "; ".join(damages[:5]) + (f"; and {len(damages) - 5} more" * (len(damages) > 5))
        place = {"step": step, "directory": directory, "remedy": remedy}
        super().__init__(f"damaged: {shown}", damaged=True, **place)


def committed_steps(directory: Path) -> list[int]:
    """Returns the committed steps in ascending order, without a check of their files.

    Orbax writes into `STEP.orbax-checkpoint-tmp` and renames it to `STEP` when every byte of every
    process is there, so the name is the commit. A path that cannot be listed has none.
    """
    if not directory.is_dir():
        return []
    names = [entry.name for entry in directory.iterdir() if entry.name.isdecimal()]
    return sorted(step for step in map(int, names) if str(step) in names)  # 007 is not ours


def newest(steps: list[int]) -> int | None:
    """Returns the last of ascending steps, or None."""
    return steps[-1] if steps else None


def whole_manifest(directory: Path, step: int) -> Manifest:
    """Returns the manifest of a committed step whose packs exist in full length. Their bytes are
    verified when they are read.

    Raises DamagedCheckpoint where the manifest cannot be read, packs are missing or cut, or the
    directory has the name of another step (renamed, or another's files put into it). Raises
    CheckpointError where there is no such step.
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
        manifest = read_manifest(directory / str(step))
    except ValueError as error:
        damages = [str(error)]
    else:
        damages = _misnamed(manifest, step) + list(_cut_packs(manifest))
        if not damages:
            return manifest
    raise DamagedCheckpoint(damages, step=step, directory=directory, remedy="restore an older step")


def _misnamed(manifest: Manifest, step: int) -> list[str]:
    conflicts = other_steps(manifest, step)
    if not conflicts:
        return []
    return [
        f"the directory is named {step}, but {' and '.join(conflicts)}: it was renamed, or holds "
        "another step's files"
    ]


def _cut_packs(manifest: Manifest) -> Iterator[str]:
    for pack, size in manifest.sizes.items():
        path = manifest.directory / pack
        is_pack = path.is_file() and not path.is_symlink()  # steps share packs by hard links
        length = path.stat().st_size if is_pack else None
        if length == size:
            continue
        chunks = [
            c for leaf_chunks in manifest.chunks.values() for c in leaf_chunks if c.pack == pack
        ]
        lost = sorted({c.leaf for c in chunks if length is None or c.offset + c.size > length})
        problem = "is missing" if length is None else f"has {length:,} bytes of {size:,}"
        yield f"{pack} {problem}, with chunks of {', '.join(lost) or 'nothing'}"


def discard_steps(directory: Path, steps: list[int]) -> None:
    """Removes `steps`, each atomically, and what an interrupted call left behind."""
    # Newest first: after a kill, what is left is still an unbroken history.
    for step in sorted(steps, reverse=True):
        (directory / str(step)).rename(directory / f"{step}{DISCARDED}")
    for leftover in directory.glob(f"*{DISCARDED}"):
        if leftover.is_symlink():  # its target belongs to someone else
            leftover.unlink()
        else:
            shutil.rmtree(leftover)


def set_aside(directory: Path, step: int) -> Path:
    """Renames a damaged step, so that its name is free. Returns its new path."""
    path = directory / f"{step}{DAMAGED}"
    number = 1
    while path.exists():
        number += 1
        path = directory / f"{step}{DAMAGED}.{number}"
    (directory / str(step)).rename(path)
    return path


def steps_aside(directory: Path) -> list[str]:
    """Returns the names of damaged steps that were set aside."""
    return sorted(path.name for path in directory.glob(f"*{DAMAGED}*"))


def refuse_to_begin_again(directory: Path, damaged: Mapping[int, DamagedCheckpoint]) -> None:
    """Raises DamagedCheckpoint where steps are damaged or set aside, and none is intact."""
    aside = steps_aside(directory)
    if not damaged and not aside:
        return
    step, error = max(damaged.items(), default=(0, None))
    damages = [f"steps set aside: {', '.join(aside)}"] if aside else []
    raise DamagedCheckpoint(
        (error.damages if error else []) + damages,
        step=step,
        directory=directory,
        remedy="no step there is whole and of this experiment: bring a copy of one back, or use a "
        "new --run-dir to begin again",
    )


def failure_of(directory: Path, step: int) -> str | None:
    """Returns why processes could not write their parts of a step that was nevertheless committed;
    None where they could. Another process may set it aside meanwhile. Raises ValueError where it
    cannot be read."""
    problem = read_failure(directory / str(step))
    if problem is not None:
        return problem
    if (directory / str(step)).exists():
        if (directory / str(step) / ITEM / MANIFEST).exists():
            return None
        return "its manifest could not be written, nor the reason"
    return read_failure(directory / f"{step}{REFUSED}")


def refuse_step(directory: Path, step: int) -> None:
    """Removes a failed step from the committed ones and frees its space. The reason stays for
    processes that have not read it yet, until `forget_refused`."""
    aside = directory / f"{step}{REFUSED}"
    (directory / str(step)).rename(aside)
    for pack in (aside / ITEM).glob("*.pack"):
        pack.unlink()


def forget_refused(directory: Path) -> None:
    """Removes what `refuse_step` left, once all processes have read it."""
    for aside in directory.glob(f"*{REFUSED}"):
        shutil.rmtree(aside, ignore_errors=True)


def remove_unfinished(directory: Path) -> None:
    """Frees the space of failed saves, as far as possible."""
    with suppress(OSError):
        for leftover in directory.glob(UNFINISHED):
            shutil.rmtree(leftover, ignore_errors=True)


def unfinished_bytes(directory: Path) -> int:
    """Returns the bytes that `remove_unfinished` would free."""
    files = (p for left in directory.glob(UNFINISHED) for p in left.rglob("*") if p.is_file())
    return sum(p.stat().st_size for p in files if p.stat().st_nlink == 1)


def freed_bytes(directory: Path, steps: Iterable[int]) -> int:
    """Returns the bytes that removing all of these committed steps would free. A pack that several
    steps share counts once; one that another file shares too (of a step that stays, or was set
    aside) does not count."""
    packs: dict[tuple[int, int], list[os.stat_result]] = {}
    for step in steps:
        for pack in (directory / str(step) / ITEM).glob("*.pack"):
            with suppress(OSError):  # gone since
                status = pack.stat()
                packs.setdefault((status.st_dev, status.st_ino), []).append(status)
    return sum(links[0].st_size for links in packs.values() if links[0].st_nlink <= len(links))


def check_writable(
    directory: Path, bytes_needed: int, *, instead: str = "another --run-dir"
) -> None:
    """Refuses, before a run, a directory without `bytes_needed` free bytes. instead: what the user
    may give, for the message.

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
            f"give {instead}, or make room and permission there"
        ) from error
    if free < bytes_needed:
        raise ValueError(
            f"No space left for checkpoints in {directory}: they need {bytes_needed:,} bytes, and "
            f"{free:,} are free; free {bytes_needed - free:,} bytes, keep fewer checkpoints, or "
            f"give {instead}"
        )


def make_and_remove(directory: Path) -> None:
    """Makes and removes a directory in `directory`. Raises OSError where it cannot be made:
    read-only, no inode left."""
    directory.mkdir(parents=True, exist_ok=True)
    try:
        os.rmdir(tempfile.mkdtemp(dir=directory, prefix=".writable-"))
    except OSError as error:  # its name is drawn, and tells nothing
        raise OSError(error.errno, error.strerror, str(directory)) from None


def json_text(value: object, *, name: str, indent: int | None = None) -> str:
    """Returns `value` as JSON text. Raises ValueError that names the value `name`."""
    try:
        return json.dumps(value, indent=indent)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{name} is not JSON: {error}; hold only dicts, lists, strings, numbers, booleans, None"
        ) from error


def describe(error: BaseException) -> str:
    """Returns an exception in one line: its type and its message, the middle of a long text cut."""
    text = " ".join(str(error).split())
    if len(text) > 400:
        # TensorStore nests its messages and puts what the system said ("no space left") last.
        text = f"{text[:180]} ... {text[-200:]}"
    # The errors of all processes tell their own types where that helps.
    return text if isinstance(error, FailedTogether) else f"{type(error).__name__}: {text}"
