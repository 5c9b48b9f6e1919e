"""The directory of a run's checkpoints: committed steps, free space, failures."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import jax

from jaxtrain.cluster.agreement import FailedTogether
from jaxtrain.files.store import (
    COMMITTED,
    AnyPath,
    exists,
    is_committed,
    is_local,
    move,
    names_in,
    put,
    remove,
    remove_file,
    remove_what_can_be,
    size_of,
)
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
# In Orbax's name of a step that is being written.
UNFINISHED = ".orbax-checkpoint-tmp"


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
        self, problem: str, *, step: int, directory: AnyPath, remedy: str, damaged: bool = False
    ) -> None:
        self.step = step
        self.directory = directory
        self.problem = problem
        self.last_good: int | None = None
        try:
            good_steps = [s for s in committed_steps(directory) if not (damaged and s >= step)]
        except OSError as error:  # the same trouble, or another
            safe = f"what is committed there cannot be seen ({error.strerror or error})"
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

    def __init__(self, damages: list[str], *, step: int, directory: AnyPath, remedy: str) -> None:
        self.damages = damages
        shown = "; ".join(damages[:5]) + (f"; and {len(damages) - 5} more" * (len(damages) > 5))
        place = {"step": step, "directory": directory, "remedy": remedy}
        super().__init__(f"damaged: {shown}", damaged=True, **place)


def committed_steps(directory: AnyPath) -> list[int]:
    """Returns the committed steps in ascending order, without a check of their files.

    Orbax writes into `STEP.orbax-checkpoint-tmp` and renames it to `STEP` when every byte of every
    process is there, so the name is the commit. In a store it writes into `STEP`, and one more file
    is the commit. A path that is no directory has none. Raises OSError.
    """
    return [step for step in _steps_by_name(directory) if is_committed(directory / str(step))]


def _steps_by_name(directory: AnyPath) -> list[int]:
    names = [name for name in names_in(directory) if name.isdecimal()]
    return sorted(step for step in map(int, names) if str(step) in names)  # 007 is not ours


def uncommitted_steps(directory: AnyPath) -> list[int]:
    """Returns the steps in a store that are being saved, or were cut short; [] on a disk."""
    return [step for step in _steps_by_name(directory) if not is_committed(directory / str(step))]


def newest(steps: list[int]) -> int | None:
    """Returns the last of ascending steps, or None."""
    return steps[-1] if steps else None


def whole_manifest(directory: AnyPath, step: int) -> Manifest:
    """Returns the manifest of a committed step whose packs exist in full length. Their bytes are
    verified when they are read.

    Raises DamagedCheckpoint where the manifest cannot be read, packs are missing or cut, or the
    directory has the name of another step (renamed, or another's files put into it). Raises
    CheckpointError where there is no such step, FailedStorage where a store does not answer.
    """
    with answering(directory, step):
        return _whole_manifest(directory, step)


@contextmanager
def answering(directory: AnyPath, step: int) -> Iterator[None]:
    """Raises FailedStorage for an OSError of a store, which is no damage."""
    try:
        yield
    except OSError as error:
        if is_local(directory):
            raise
        raise FailedStorage(
            f"could not be read: {describe(error)}",
            step=step,
            directory=directory,
            remedy="start again when the store answers",
        ) from error


def _whole_manifest(directory: AnyPath, step: int) -> Manifest:
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
        length = size_of(manifest.directory / pack)  # steps share packs by hard links
        if length == size:
            continue
        chunks = [
            c for leaf_chunks in manifest.chunks.values() for c in leaf_chunks if c.pack == pack
        ]
        lost = sorted({c.leaf for c in chunks if length is None or c.offset + c.size > length})
        problem = "is missing" if length is None else f"has {length:,} bytes of {size:,}"
        yield f"{pack} {problem}, with chunks of {', '.join(lost) or 'nothing'}"


def discard_steps(directory: AnyPath, steps: list[int]) -> None:
    """Removes `steps`, each atomically, and what an interrupted call left behind."""
    # Newest first: after a kill, what is left is still an unbroken history.
    for step in sorted(steps, reverse=True):
        if isinstance(directory, Path):
            (directory / str(step)).rename(directory / f"{step}{DISCARDED}")
        else:
            remove(directory / str(step), early=f"{ITEM}/{MANIFEST}")
    for leftover in _entries(directory, DISCARDED):
        if isinstance(leftover, Path) and leftover.is_symlink():  # its target belongs to others
            leftover.unlink()
        else:
            remove(leftover)


def set_aside(directory: AnyPath, step: int) -> AnyPath:
    """Renames a damaged step, so that its name is free. Returns its new path."""
    path = directory / f"{step}{DAMAGED}"
    number = 1
    while exists(path):
        number += 1
        path = directory / f"{step}{DAMAGED}.{number}"
    move(directory / str(step), path)
    return path


def steps_aside(directory: AnyPath) -> list[str]:
    """Returns the names of damaged steps that were set aside."""
    return sorted(name for name in names_in(directory) if DAMAGED in name)


def refuse_to_begin_again(directory: AnyPath, damaged: Mapping[int, DamagedCheckpoint]) -> None:
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


def failure_of(directory: AnyPath, step: int) -> str | None:
    """Returns why processes could not write their parts of a step that was nevertheless committed;
    None where they could. Another process may set it aside meanwhile. Raises ValueError where it
    cannot be read."""
    problem = read_failure(directory / str(step))
    if problem is not None:
        return problem
    if exists(directory / str(step)):
        if exists(directory / str(step) / ITEM / MANIFEST):
            return None
        return "its manifest could not be written, nor the reason"
    return read_failure(directory / f"{step}{REFUSED}")


def refuse_step(directory: AnyPath, step: int) -> None:
    """Removes a failed step from the committed ones and frees its space. The reason stays for
    processes that have not read it yet, until `forget_refused`."""
    place, aside = directory / str(step), directory / f"{step}{REFUSED}"
    if is_local(directory):
        move(place, aside)
        place = aside
    for pack in _entries(place / ITEM, ".pack"):
        remove_file(pack)
    if place != aside:  # a store copies what is moved
        move(place, aside)


def forget_refused(directory: AnyPath) -> None:
    """Removes what `refuse_step` left, once all processes have read it."""
    for aside in _entries(directory, REFUSED):
        remove_what_can_be(aside)


def remove_unfinished(directory: AnyPath) -> None:
    """Frees the space of failed saves, as far as possible."""
    with suppress(OSError):
        leftovers = [directory / name for name in names_in(directory) if UNFINISHED in name]
        for leftover in leftovers:
            remove_what_can_be(leftover)
        for step in uncommitted_steps(directory):
            files = directory / str(step) / ITEM
            # Else a disk's step of an older Orbax, which wrote no such file, was copied here.
            if not exists(files / MANIFEST) or exists(files / COMMITTED):
                remove_uncommitted(directory, step)


def remove_uncommitted(directory: AnyPath, step: int) -> None:
    """Removes what a store has of a step that is not committed. Raises OSError."""
    place = directory / str(step)
    if not is_committed(place) and exists(place):
        remove(place, early=f"{ITEM}/{MANIFEST}")


def _entries(directory: AnyPath, ending: str) -> list[AnyPath]:
    return [directory / name for name in names_in(directory) if name.endswith(ending)]


def unfinished_bytes(directory: AnyPath) -> int:
    """Returns the bytes that `remove_unfinished` would free on a disk; a store has no limit."""
    if not isinstance(directory, Path):
        return 0
    files = (
        p for left in directory.glob(f"*{UNFINISHED}*") for p in left.rglob("*") if p.is_file()
    )
    return sum(p.stat().st_size for p in files if p.stat().st_nlink == 1)


def freed_bytes(directory: AnyPath, steps: Iterable[int]) -> int:
    """Returns the bytes that removing all of these committed steps would free, 0 in a store. A pack
    that several steps share counts once; one that another file shares too (of a step that stays,
    or was set aside) does not count."""
    if not isinstance(directory, Path):
        return 0
    packs: dict[tuple[int, int], list[os.stat_result]] = {}
    for step in steps:
        for pack in (directory / str(step) / ITEM).glob("*.pack"):
            with suppress(OSError):  # gone since
                status = pack.stat()
                packs.setdefault((status.st_dev, status.st_ino), []).append(status)
    return sum(links[0].st_size for links in packs.values() if links[0].st_nlink <= len(links))


def check_writable(
    directory: AnyPath, bytes_needed: int, *, instead: str = "another --run-dir"
) -> None:
    """Refuses, before a run, a directory without `bytes_needed` free bytes. instead: what the user
    may give, for the message.

    Makes the directory, writes and removes one small file. Costs a few milliseconds. A store has
    room.

    Raises:
        ValueError: the directory cannot be made or written, or has too little free space.
    """
    try:
        if not isinstance(directory, Path):
            make_and_remove(directory)
            return
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


def make_and_remove(directory: AnyPath) -> None:
    """Makes and removes a directory in `directory`, a file in a store. Raises OSError where it
    cannot be made: read-only, no inode left, no such bucket."""
    if not isinstance(directory, Path):
        # The next one removes it, if this process is killed. A store takes few writes of one name.
        probe = directory / f".writable-{jax.process_index()}"
        put(probe, b"")
        remove_file(probe)
        return
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
