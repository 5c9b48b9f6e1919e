"""Runs of a drill that stand on something of their own: a small disk, a network that can be cut."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from jaxtrain.drill.namespaces import MAPPED, Network, network, why_not
from jaxtrain.fault_tolerance.faults import Fault
from jaxtrain.fault_tolerance.machine_faults import run_command

SMALL = "64m"
"""Of the disk that is filled: some checkpoints of a drilled experiment."""


class NotHere(Exception):
    """Why this machine does not have what a run stands on."""


class Apart(NamedTuple):
    """One such run. faults: on it; steps: it takes; told: what must be said. stands_on: given its
    folder and the number of processes; raises NotHere. processes: it is on so many, and held
    against an undisturbed run on as many. as_command: by `jaxtrain launch`, a process of its own.
    """

    run: str
    faults: tuple[Fault, ...]
    steps: int
    told: tuple[str, ...]
    stands_on: Callable[[Path, int], AbstractContextManager[Network | None]]
    processes: int | None = None
    as_command: bool = False


def apart(processes: int) -> list[Apart]:
    """Saves are 5 steps apart: of a disk that is full for 8 one fails at least, and the run goes
    on; a kill while it is full has it begin again from the save before."""
    last = processes - 1
    full = (Fault("full", 9), Fault("full", 29), Fault("kill", 33, "step", last))
    refused = tuple(f"NOT SAVED checkpoint step {step} " for step in (10, 15, 30))
    hangs = tuple(f"process {each} of {processes} has not moved" for each in range(processes))
    readonly = (Fault("readonly", 9), Fault("readonly", 29), Fault("kill", 33, "step", last))
    errors = (Fault("raise", 12, "load"), Fault("raise", 20, "callback"))
    paused = ("launch: stood still itself for",)
    return [
        Apart("full disk", full, 44, refused, small_disk),
        Apart("read-only directory", readonly, 44, refused, small_disk),
        Apart("cut network", (Fault("cut", 9, "step", last),), 24, hangs, cut_network),
        Apart("one process", errors, 28, (), nothing_special, processes=1),
        Apart("paused launch", (Fault("pause", 9),), 24, paused, nothing_special, as_command=True),
    ]


@contextmanager
def nothing_special(folder: Path, processes: int) -> Iterator[None]:
    """A folder as any other."""
    yield


@contextmanager
def small_disk(folder: Path, processes: int) -> Iterator[None]:
    """A file system in memory, at `folder` until the end of the block."""
    if os.geteuid() != 0:
        raise NotHere(f"a file system of its own wants root; {MAPPED} COMMAND may give it")
    folder.mkdir()
    try:
        run_command("mount", "-t", "tmpfs", "-o", f"size={SMALL}", "tmpfs", str(folder))
    except OSError as error:
        raise NotHere(str(error)) from error
    try:
        yield
    finally:
        while os.path.ismount(folder):  # once more where it was made read-only
            run_command("umount", "--lazy", str(folder))


@contextmanager
def cut_network(folder: Path, processes: int) -> Iterator[Network]:
    """One of its own for so many processes."""
    if reason := why_not():
        raise NotHere(reason)
    with ExitStack() as stack:
        try:
            made = stack.enter_context(network(processes))
        except OSError as error:
            raise NotHere(str(error)) from error
        yield made
