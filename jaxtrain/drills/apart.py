"""Runs of a drill in an environment of their own: a small disk, a network that can be cut."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from jaxtrain.drills.namespaces import MAPPED, Network, network, why_not
from jaxtrain.fault_tolerance.faults import Fault
from jaxtrain.fault_tolerance.machine_faults import run_command

SMALL = "64m"
"""Size of the disk that is filled: a few checkpoints of a drilled experiment."""


class NotHere(Exception):
    """This machine cannot provide a run's environment; the message says why."""


class IsolatedRun(NamedTuple):
    """A run in its own environment. faults: on it; steps: it takes; expected: texts that must
    appear in its output. stands_on: provides the environment, from folder and number of processes;
    raises NotHere. processes: if not None, their number, and it is compared with an undisturbed run
    on as many. as_command: runs by `jaxtrain launch`, in a process of its own."""

    run: str
    faults: tuple[Fault, ...]
    steps: int
    expected: tuple[str, ...]
    stands_on: Callable[[Path, int], AbstractContextManager[Network | None]]
    processes: int | None = None
    as_command: bool = False


def isolated_runs(processes: int) -> list[IsolatedRun]:
    """The runs. Saves are 5 steps apart, so a disk that is full for 8 steps fails at least one, and
    the run goes on; after a kill while it is full, the run restarts from the save before."""
    last = processes - 1
    full = (Fault("full", 9), Fault("full", 29), Fault("kill", 33, "step", last))
    refused = tuple(f"NOT SAVED checkpoint step {step} " for step in (10, 15, 30))
    hangs = tuple(f"process {process} of {processes} has not moved" for process in range(processes))
    readonly = (Fault("readonly", 9), Fault("readonly", 29), Fault("kill", 33, "step", last))
    errors = (Fault("raise", 12, "load"), Fault("raise", 20, "callback"))
    paused = ("launch: stood still itself for",)
    return [
        IsolatedRun("full disk", full, 44, refused, small_disk),
        IsolatedRun("read-only directory", readonly, 44, refused, small_disk),
        IsolatedRun("cut network", (Fault("cut", 9, "step", last),), 24, hangs, cut_network),
        IsolatedRun("one process", errors, 28, (), nothing_special, processes=1),
        IsolatedRun(
            "paused launch", (Fault("pause", 9),), 24, paused, nothing_special, as_command=True
        ),
    ]


@contextmanager
def nothing_special(folder: Path, processes: int) -> Iterator[None]:
    """Changes nothing: the drill runs in an ordinary folder."""
    yield


@contextmanager
def small_disk(folder: Path, processes: int) -> Iterator[None]:
    """Makes `folder` a small file system in memory until the end of the block. Raises NotHere."""
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
        while os.path.ismount(folder):  # a second time if it was made read-only
            run_command("umount", "--lazy", str(folder))


@contextmanager
def cut_network(folder: Path, processes: int) -> Iterator[Network]:
    """Yields a network that `processes` processes have for themselves. Raises NotHere."""
    if reason := why_not():
        raise NotHere(reason)
    with ExitStack() as stack:
        try:
            created = stack.enter_context(network(processes))
        except OSError as error:
            raise NotHere(str(error)) from error
        yield created
