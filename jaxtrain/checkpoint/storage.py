"""The directory a run's checkpoints live in: what is committed, what fits, what failed."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from jaxtrain.state_format.manifest import (
    ITEM,
    Manifest,
    other_steps,
    read_failure,
    read_manifest,
)

# A step on its way out. Removing a directory tree is not atomic, renaming it is: a kill in between
# must not leave half a step that looks newest.
DISCARDED = ".discarded"
# A step that was found damaged and passed over: kept, for whoever wants to know why.
DAMAGED = ".damaged"
# A step that was committed though some process could not write its part.
REFUSED = ".failed"
# What Orbax calls a step that is being written.
UNFINISHED = "*.orbax-checkpoint-tmp*"


class CheckpointError(ValueError):
    """Storage failed, or would have lost something: step, directory, cause, and what is safe.

    Attributes:
        step: the step that was being saved or restored.
        directory: the directory of the checkpoints.
        last_good: the newest step that is committed there (older than a damaged one), or None.
    """

    def __init__(
        self, problem: str, *, step: int, directory: Path, remedy: str, damaged: bool = False
    ) -> None:
        self.step = step
        self.directory = directory
        others = [s for s in committed_steps(directory) if not (damaged and s >= step)]
        self.last_good = newest(others)
        safe = (
            f"no {'older ' * damaged}checkpoint is committed there"
            if self.last_good is None
            else f"step {self.last_good} is committed there"
        )
        super().__init__(f"checkpoint step {step} in {directory}: {problem}; {safe}; {remedy}")


class DamagedCheckpoint(CheckpointError):
    """A committed step is not as it was written. `damages`: a line for each, naming what."""

    def __init__(self, damages: list[str], *, step: int, directory: Path, remedy: str) -> None:
        self.damages = damages
        shown = "; ".join(damages[:5]) + (f"; and {len(damages) - 5} more" * (len(damages) > 5))
        where = {"step": step, "directory": directory, "remedy": remedy}
        super().__init__(f"damaged: {shown}", damaged=True, **where)


def committed_steps(directory: Path) -> list[int]:
    """The steps that were committed, in ascending order; what has become of them since is not
    looked at.

    Orbax writes into `STEP.orbax-checkpoint-tmp` and renames it to `STEP` when every byte of every
    process is there, so the name is the commit. A path that cannot be listed holds none.
    """
    if not directory.is_dir():
        return []
    names = [entry.name for entry in directory.iterdir() if entry.name.isdecimal()]
    return sorted(step for step in map(int, names) if str(step) in names)  # 007 is not ours


def newest(steps: list[int]) -> int | None:
    """The last of ascending steps, or None."""
    return steps[-1] if steps else None


def whole_manifest(directory: Path, step: int) -> Manifest:
    """The manifest of a committed step whose packs are there, in full length; their bytes are
    verified as they are read.

    Raises:
        DamagedCheckpoint: the manifest cannot be read, packs are missing or cut, or the directory
            has the name of another step (renamed, or another's files put into it).
        CheckpointError: there is no such step.
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
    others = other_steps(manifest, step)
    if not others:
        return []
    return [
        f"the directory is named {step}, but {' and '.join(others)}: it was renamed, or holds "
        "another step's files"
    ]


def _cut_packs(manifest: Manifest) -> Iterator[str]:
    for pack, size in manifest.sizes.items():
        path = manifest.directory / pack
        ours = path.is_file() and not path.is_symlink()  # steps share packs by hard links
        found = path.stat().st_size if ours else None
        if found == size:
            continue
        chunks = [c for held in manifest.chunks.values() for c in held if c.pack == pack]
        lost = sorted({c.leaf for c in chunks if found is None or c.offset + c.size > found})
        what = "is missing" if found is None else f"has {found:,} bytes of {size:,}"
        yield f"{pack} {what}, with chunks of {', '.join(lost) or 'nothing'}"


def discard_steps(directory: Path, steps: list[int]) -> None:
    """Remove `steps`, each atomically, and whatever an interrupted call left behind."""
    # Newest first: after a kill, what is left is still an unbroken history.
    for step in sorted(steps, reverse=True):
        (directory / str(step)).rename(directory / f"{step}{DISCARDED}")
    for leftover in directory.glob(f"*{DISCARDED}"):
        if leftover.is_symlink():  # what it leads to is somebody else's
            leftover.unlink()
        else:
            shutil.rmtree(leftover)


def set_aside(directory: Path, step: int) -> Path:
    """Rename a damaged step so that it stands in nobody's way; where it is then."""
    path = directory / f"{step}{DAMAGED}"
    number = 1
    while path.exists():
        number += 1
        path = directory / f"{step}{DAMAGED}.{number}"
    (directory / str(step)).rename(path)
    return path


def steps_aside(directory: Path) -> list[str]:
    """The names of damaged steps that were set aside."""
    return sorted(path.name for path in directory.glob(f"*{DAMAGED}*"))


def refuse_to_begin_again(directory: Path, damaged: Mapping[int, DamagedCheckpoint]) -> None:
    """Raise DamagedCheckpoint where steps are damaged, or were and are set aside, and none is
    whole."""
    aside = steps_aside(directory)
    if not damaged and not aside:
        return
    step, error = max(damaged.items(), default=(0, None))
    damages = [f"steps set aside: {', '.join(aside)}"] if aside else []
    raise DamagedCheckpoint(
        (error.damages if error else []) + damages,
        step=step,
        directory=directory,
        remedy="all steps there are damaged: bring a copy back, or use a new --run-dir to begin "
        "again",
    )


def failure_of(directory: Path, step: int) -> str | None:
    """Why processes could not write their parts of a step that was committed all the same; None
    where they could. Another process may be setting it aside meanwhile. Raises ValueError where it
    cannot be read."""
    problem = read_failure(directory / str(step))
    if problem is not None or (directory / str(step)).exists():
        return problem
    return read_failure(directory / f"{step}{REFUSED}")


def refuse_step(directory: Path, step: int) -> None:
    """Take a step that failed out of the committed ones and give its room back. Why it failed stays
    for processes that have not asked yet, until `forget_refused`."""
    aside = directory / f"{step}{REFUSED}"
    (directory / str(step)).rename(aside)
    for pack in (aside / ITEM).glob("*.pack"):
        pack.unlink()


def forget_refused(directory: Path) -> None:
    """Remove what `refuse_step` left, once all processes have asked."""
    for aside in directory.glob(f"*{REFUSED}"):
        shutil.rmtree(aside, ignore_errors=True)


def remove_unfinished(directory: Path) -> None:
    """Give back the room of saves that failed, as far as that can be done."""
    for leftover in directory.glob(UNFINISHED):
        shutil.rmtree(leftover, ignore_errors=True)


def unfinished_bytes(directory: Path) -> int:
    """What `remove_unfinished` would give back."""
    files = (p for left in directory.glob(UNFINISHED) for p in left.rglob("*") if p.is_file())
    return sum(p.stat().st_size for p in files if p.stat().st_nlink == 1)


def freed_bytes(directory: Path, steps: Iterable[int]) -> int:
    """What the disk has back when all of these committed steps are gone: a pack that several hold
    counts once, and one that something else holds too (a step that stays, or was set aside) not at
    all."""
    found: dict[tuple[int, int], list[os.stat_result]] = {}
    for step in steps:
        for pack in (directory / str(step) / ITEM).glob("*.pack"):
            with suppress(OSError):  # gone since
                at = pack.stat()
                found.setdefault((at.st_dev, at.st_ino), []).append(at)
    return sum(at[0].st_size for at in found.values() if at[0].st_nlink <= len(at))


def check_writable(
    directory: Path, bytes_needed: int, *, instead: str = "another --run-dir"
) -> None:
    """Refuse, before a run, a directory that cannot take `bytes_needed` bytes; `instead` is what
    the user may give.

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
            f"checkpoints need {bytes_needed:,} bytes in {directory}, which has {free:,} free; "
            f"free {bytes_needed - free:,} bytes, keep fewer checkpoints, or give {instead}"
        )


def make_and_remove(directory: Path) -> None:
    """Make a directory in `directory`, and remove it again. Raises OSError where it cannot be made:
    read-only, no inode left."""
    directory.mkdir(parents=True, exist_ok=True)
    os.rmdir(tempfile.mkdtemp(dir=directory, prefix=".writable-"))


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
