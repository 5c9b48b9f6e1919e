"""Interfaces of machines on which processes of a run start: this one, or others with agents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from jaxtrain.cluster.join import free_port
from jaxtrain.cluster.sampler import ProcessSample
from jaxtrain.machines.workers import Worker
from jaxtrain.notices import Tell


class RunningProcess(Protocol):
    """A process, as its supervisor sees it."""

    process: int
    last_line: str
    lost_another: bool
    ended_at: float

    @property
    def code(self) -> int | None:
        """Exit code; minus the signal number if a signal ended it; None while it runs."""
        ...

    @property
    def ending(self) -> str:
        """The end of the process as text."""
        ...

    @property
    def kind(self) -> str:
        """The end of the process as a `Failure.kind`."""
        ...

    def sample(self) -> ProcessSample:
        """Its latest report on itself, with times of this machine's clock."""
        ...

    def send(self, number: int) -> None:
        """Sends a signal, if it still runs."""
        ...

    def kill(self) -> None:
        """Ends it and all processes that it started; does not wait."""
        ...

    def join(self) -> None:
        """Waits until it has ended, after `kill`."""
        ...

    def state(self) -> str:
        """Its state in the kernel's scheduler, as text; empty if unknown."""
        ...


class Machine(Protocol):
    """A place for one process."""

    name: str
    where: str
    """Suffix of a process number in messages: " on node3"; empty with a single machine."""

    leaving: bool
    """True once it has asked its process to stop; it then takes no other."""

    def meeting_point(self) -> str:
        """HOST:PORT at which a process there can listen for the others."""
        ...

    def start(
        self, process: int, command: Sequence[str], environ: Mapping[str, str], tell: Tell
    ) -> RunningProcess:
        """Starts a process there. command: arguments of jaxtrain. environ: added to the machine's
        own. tell: gets every line that it prints."""
        ...


class Machines(Protocol):
    """The machines of a run."""

    def present(self) -> list[Machine]:
        """Machines that can take a process now."""
        ...

    @property
    def come_and_go(self) -> bool:
        """True if further machines may come."""
        ...

    def close(self, code: int) -> None:
        """Called after the run, which ended with exit code `code`."""
        ...


class LocalMachines:
    """This machine, with a slot for each process."""

    come_and_go = False

    def __init__(self, slots: Sequence[ProcessSlot]) -> None:
        self._slots = list(slots)

    def present(self) -> list[Machine]:
        return [*self._slots]

    def close(self, code: int) -> None:
        """Does nothing."""


@dataclass
class ProcessSlot:
    """One process of this machine. file: its reports on itself. program: prefix of each command.
    environ: of the process. host: address for the other processes."""

    name: str
    file: Path
    program: Sequence[str]
    environ: Mapping[str, str]
    host: str = "127.0.0.1"
    where: str = ""
    leaving: bool = False

    def meeting_point(self) -> str:
        return f"{self.host}:{free_port()}"

    def start(
        self, process: int, command: Sequence[str], environ: Mapping[str, str], tell: Tell
    ) -> RunningProcess:
        command = [*self.program, *command]
        worker = Worker(process, command, {**self.environ, **environ}, self.file)
        worker.read(tell)
        return worker


def slots_of(
    processes: int, folder: Path, program: Sequence[str], environ: Mapping[str, str]
) -> list[ProcessSlot]:
    """One local slot per process. folder: for the processes' reports."""
    return [
        ProcessSlot(f"slot {number}", folder / f"{number}.sample", program, environ)
        for number in range(processes)
    ]
