"""The processes of one machine: started, listened to, ended."""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from jaxtrain.cluster.phases import Now
from jaxtrain.cluster.sampler import SAMPLE_FILE, SUPERVISOR, ProcessSample, SampleFile
from jaxtrain.notices import Tell

CHATTER = re.compile(rb"\[Gloo\] Rank \d+ is connected|number of connected peer ranks is : \d+$")
"""Output of XLA's CPU collectives, from threads that may write into one another's lines: what is
left of such a line follows, its last number or nothing."""


LOST = re.compile(
    "Terminating process because the JAX distributed service detected fatal errors"
    r"|Gloo [\w -]+ failed: .*(?:by peer|Broken pipe|Socket closed)"
    r"|NCCL .*remote process exited"
)
"""What a process prints that ends because another was lost: JAX's service, or a collective of a CPU
or a GPU whose connection to the other broke."""


class Worker:
    """One process of this machine (`machines.RunningProcess`)."""

    def __init__(
        self,
        process: int,
        command: Sequence[str],
        environ: Mapping[str, str],
        file: Path,
        *,
        folder: Path | None = None,
    ) -> None:
        """file: for its reports, created anew. folder: working directory, None for this process's.
        Raises OSError if it cannot be started."""
        self.process, self._reports = process, SampleFile(file, create=True)
        # By its descriptor: a cleaner of old files may remove the file before it is opened.
        file = Path(f"/dev/fd/{self._reports.descriptor}")
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
                pass_fds=(self._reports.descriptor,),
            )
        finally:
            self._reports.close_descriptor()
        self._reader: threading.Thread | None = None
        self.last_line, self.lost_another = "", False
        """Its last output; True if it said that another process was lost (`LOST`)."""
        self._began = time.monotonic()
        self.ended_at = math.inf
        """Monotonic time of its end, to find the first of several."""
        threading.Thread(target=self._await_end, name=f"end {process}", daemon=True).start()

    def _await_end(self) -> None:
        self._popen.wait()
        self.ended_at = time.monotonic()

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def code(self) -> int | None:
        """Exit code; minus the signal number if a signal ended it; None while it runs."""
        return self._popen.poll()

    @property
    def ending(self) -> str:
        """The end of the process as text: `exit code 3`, `SIGKILL`."""
        return ending(self.code or 0)

    @property
    def kind(self) -> str:
        """The end of the process as a `Failure.kind`."""
        return kind_of(self.code or 0)

    def sample(self) -> ProcessSample:
        """Its latest report on itself; phase "start" before its first report."""
        return self._reports.sample() or ProcessSample(Now("start", 0, self._began))

    def read(self, tell: Tell) -> None:
        """Passes every line that it prints to `tell`, from a thread."""

        def lines() -> None:
            assert self._popen.stdout is not None
            unfinished = 0  # lines of collectives, of which an end is still to come
            with self._popen.stdout as output:
                for line in output:
                    if CHATTER.search(line.rstrip()):
                        unfinished = max(unfinished + line.count(b"[Gloo] Rank") - 1, 0)
                    elif unfinished and re.fullmatch(rb"\d*", line.strip()):
                        unfinished -= 1
                    else:
                        unfinished = 0
                        text = line.decode(errors="replace").rstrip()
                        self.last_line = text.strip() or self.last_line
                        self.lost_another |= LOST.search(text) is not None
                        tell(text)

        self._reader = threading.Thread(target=lines, name=f"output {self.process}", daemon=True)
        self._reader.start()

    def send(self, number: int) -> None:
        """Sends a signal, if it still runs."""
        if self.code is None:
            with suppress(ProcessLookupError):
                self._popen.send_signal(number)

    def kill(self) -> None:
        """Ends it and all processes that it started, at once."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._popen.pid, signal.SIGKILL)

    def join(self) -> None:
        """Waits until it has ended, after `kill`."""
        self._popen.wait()
        reader, self._reader = self._reader, None
        if reader is not None:
            # Its last lines; no wait, and none again, for another process that holds the pipe.
            reader.join(2)

    def state(self) -> str:
        """Its state in the kernel's scheduler, as text; empty if unknown."""
        words = {"T": "stopped by a signal", "t": "stopped by a debugger", "D": "in the kernel"}
        with suppress(OSError, IndexError):
            text = Path(f"/proc/{self.pid}/stat").read_text()
            return words.get(text.rpartition(")")[2].split()[0], "")
        return ""


def kind_of(code: int) -> str:
    """The `Failure.kind` of an exit code."""
    return "killed" if code == -signal.SIGKILL else "crashed"


def ending(code: int) -> str:
    """An exit code in words: `exit code 3`, `SIGKILL`."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
