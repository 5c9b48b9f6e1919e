"""The processes of one machine: started, listened to, ended."""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from jaxtrain.cluster.phases import Now
from jaxtrain.cluster.sampler import SAMPLE_FILE, SUPERVISOR, Sample, SampleFile

CHATTER = re.compile(rb"\[Gloo\] Rank \d+ is connected|number of connected peer ranks is : \d+$")
"""What XLA's CPU collectives print on the standard output, in threads that may break a line."""

Tell = Callable[[str], None]
"""Takes a line."""

LOST = "Terminating process because the JAX distributed service detected fatal errors"


class Worker:
    """One process of this machine (`machines.Running`)."""

    def __init__(
        self,
        process: int,
        command: Sequence[str],
        environ: Mapping[str, str],
        file: Path,
        *,
        folder: Path | None = None,
    ) -> None:
        """file: where it says what it is at, made anew. folder: in which it works, this process's
        where it is None. Raises OSError where it cannot be started."""
        self.process, self._said = process, SampleFile(file, create=True)
        # By its descriptor: whoever removes old files may remove this one before it is opened.
        file = Path(f"/dev/fd/{self._said.descriptor}")
        # A group of its own: a terminal's Ctrl-C is the supervisor's to pass on, and whatever the
        # process starts ends with it.
        try:
            self._popen = subprocess.Popen(
                command,
                cwd=folder,
                env={**environ, SAMPLE_FILE: str(file), SUPERVISOR: str(os.getpid())},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=(self._said.descriptor,),
            )
        finally:
            self._said.close_descriptor()
        self._reader: threading.Thread | None = None
        self.last_line, self.lost_another = "", False
        """What it printed last; whether JAX ended it for the loss of another."""
        self._began = time.monotonic()
        self.ended_at = math.inf
        """When it ended, by the monotonic clock: which of several was first."""
        threading.Thread(target=self._await_end, name=f"end {process}", daemon=True).start()

    def _await_end(self) -> None:
        self._popen.wait()
        self.ended_at = time.monotonic()

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def code(self) -> int | None:
        """Its exit code, minus the signal where one ended it; None while it runs."""
        return self._popen.poll()

    @property
    def ending(self) -> str:
        """How it ended, in words: `exit code 3`, `SIGKILL`."""
        return ending(self.code or 0)

    @property
    def kind(self) -> str:
        """How it ended, as `Failure.kind` has it."""
        return kind_of(self.code or 0)

    def sample(self) -> Sample:
        """The last that it said of itself; that it starts, before it has said anything."""
        return self._said.sample() or Sample(Now("start", 0, self._began))

    def read(self, tell: Tell) -> None:
        """Give every line that it prints to `tell`, from a thread."""

        def lines() -> None:
            assert self._popen.stdout is not None
            with self._popen.stdout as output:
                for line in output:
                    if not CHATTER.search(line.rstrip()):
                        text = line.decode(errors="replace").rstrip()
                        self.last_line = text.strip() or self.last_line
                        self.lost_another |= LOST in text
                        tell(text)

        self._reader = threading.Thread(target=lines, name=f"output {self.process}", daemon=True)
        self._reader.start()

    def send(self, number: int) -> None:
        """A signal, if it still runs."""
        if self.code is None:
            with suppress(ProcessLookupError):
                self._popen.send_signal(number)

    def kill(self) -> None:
        """End it and all that it started, at once."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._popen.pid, signal.SIGKILL)

    def join(self) -> None:
        """Until it has ended, after `kill`."""
        self._popen.wait()
        if self._reader is not None:
            self._reader.join(2)  # its last words; a stranger that holds the pipe is not waited for

    def state(self) -> str:
        """Of the kernel's scheduler, in words; "" where it is not told."""
        words = {"T": "stopped by a signal", "t": "stopped by a debugger", "D": "in the kernel"}
        with suppress(OSError, IndexError):
            text = Path(f"/proc/{self.pid}/stat").read_text()
            return words.get(text.rpartition(")")[2].split()[0], "")
        return ""


def kind_of(code: int) -> str:
    """Of an exit code, as `Failure.kind` has it."""
    return "killed" if code == -signal.SIGKILL else "crashed"


def ending(code: int) -> str:
    """An exit code in words: `exit code 3`, `SIGKILL`."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
