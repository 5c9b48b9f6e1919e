"""Where processes of a run can be started: on this machine, or by agents on others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from jaxtrain.cluster.join import free_port
from jaxtrain.cluster.sampler import Sample
from jaxtrain.machines.workers import Tell, Worker


class Running(Protocol):
    """One process, as its supervisor sees it."""

    process: int
    last_line: str
    lost_another: bool
    ended_at: float

    @property
    def code(self) -> int | None:
        """Its exit code, minus the signal where one ended it; None while it runs."""
        ...

    @property
    def ending(self) -> str:
        """How it ended, in words."""
        ...

    @property
    def kind(self) -> str:
        """How it ended, as `Failure.kind` has it."""
        ...

    def sample(self) -> Sample:
        """The last that it said of itself, by this machine's clock."""
        ...

    def send(self, number: int) -> None:
        """A signal, if it still runs."""
        ...

    def kill(self) -> None:
        """End it and all that it started; does not wait."""
        ...

    def join(self) -> None:
        """Until it has ended, after `kill`."""
        ...

    def state(self) -> str:
        """Of its kernel's scheduler, in words; "" where it is not told."""
        ...


class Machine(Protocol):
    """A place for one process."""

    name: str
    where: str
    """The same after the number of a process: " on node3"; "" where there is one machine."""

    leaving: bool
    """Whether it has asked its process to stop, and will take no other."""

    def meeting_point(self) -> str:
        """HOST:PORT at which a process there can listen for the others."""
        ...

    def start(
        self, process: int, command: Sequence[str], environ: Mapping[str, str], tell: Tell
    ) -> Running:
        """A process there. command: after that of jaxtrain itself. environ: beside the machine's
        own. tell: takes every line it prints."""
        ...


class Machines(Protocol):
    """Those of a run."""

    def present(self) -> list[Machine]:
        """Those that can take a process now."""
        ...

    @property
    def come_and_go(self) -> bool:
        """Whether others than those present may come."""
        ...

    def close(self, code: int) -> None:
        """After the run, which ended with that exit code."""
        ...


class Here:
    """This machine, with a slot for each process that it takes."""

    come_and_go = False

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._slots = list(slots)

    def present(self) -> list[Machine]:
        return [*self._slots]

    def close(self, code: int) -> None:
        """Nothing is left."""


@dataclass
class Slot:
    """Of this machine. file: where its process says what it is at. program: what is before each
    command. environ: of the process. host: at which the others reach it."""

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
    ) -> Running:
        command = [*self.program, *command]
        worker = Worker(process, command, {**self.environ, **environ}, self.file)
        worker.read(tell)
        return worker


def slots_of(
    processes: int, folder: Path, program: Sequence[str], environ: Mapping[str, str]
) -> list[Slot]:
    """So many. folder: for what their processes say of themselves."""
    return [
        Slot(f"slot {number}", folder / f"{number}.sample", program, environ)
        for number in range(processes)
    ]
