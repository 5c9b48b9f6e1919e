"""Processes of a benchmark that run at the same time and report measurements as JSON lines."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from jaxtrain.bench.step import ProcessCommand

POLL_S = 0.1
LAST_LINES = 20


def answers(
    commands: Sequence[ProcessCommand], *, silent_s: float, limit_s: float = math.inf
) -> Iterator[list[dict[str, Any]]]:
    """Starts Python with each of the commands, and yields one JSON line of each whenever all have a
    new one.

    Ends when all processes have. Raises ValueError with a process's text under `refused`;
    RuntimeError, with its last output, for one that ends with another code than 0, when no line
    comes for `silent_s` seconds, and when they have not ended after `limit_s`. In every case all
    processes are ended.
    """
    with ExitStack() as stack:
        started = [stack.enter_context(ReportingProcess(*command)) for command in commands]
        start_s, count = time.monotonic(), 0
        last_line_s = start_s
        while True:
            codes = [process.poll() for process in started]  # before reading: nothing is missed
            lines_of = [process.lines() for process in started]
            for row in list(zip(*lines_of, strict=False))[count:]:
                yield list(row)
                count, last_line_s = count + 1, time.monotonic()
            if failed := [process for process, code in zip(started, codes, strict=True) if code]:
                raise RuntimeError(_last_words(failed))
            if None not in codes:
                return
            if time.monotonic() - last_line_s > silent_s:
                silent = [
                    p for p, lines in zip(started, lines_of, strict=True) if len(lines) == count
                ]
                raise RuntimeError(f"no result for {silent_s:g} seconds\n{_last_words(silent)}")
            if time.monotonic() - start_s > limit_s:
                raise RuntimeError(f"not done after {limit_s:g} seconds\n{_last_words(started)}")
            time.sleep(POLL_S)


def _last_words(processes: Sequence[ReportingProcess]) -> str:
    return "\n".join(process.last_words() for process in processes)


def end_with_parent() -> None:
    """Makes this process end when the one that started it by `answers` ends, even if that is
    killed. JAX takes SIGTERM for itself, and waits for a peer that is gone."""

    def wait() -> None:
        os.read(sys.stdin.fileno(), 1)  # of sys.stdin itself the interpreter's end would wait
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


class ReportingProcess:
    """A Python process whose output goes to files, so that it never waits for a reader."""

    def __init__(self, arguments: Sequence[str], env: Mapping[str, str]) -> None:
        self._arguments, self._env = arguments, env
        self._partial, self._read, self._lines = b"", 0, list[dict[str, Any]]()

    def __enter__(self) -> ReportingProcess:
        self._out, self._err = tempfile.TemporaryFile(), tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            [sys.executable, *self._arguments],
            stdin=subprocess.PIPE,  # closed when this process ends, however it does
            stdout=self._out,
            stderr=self._err,
            env=dict(self._env),
        )
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._out.close()
        self._err.close()

    def poll(self) -> int | None:
        """Returns its exit code, None while it runs."""
        return self._process.poll()

    def lines(self) -> list[dict[str, Any]]:
        """Returns the JSON lines so far; other lines are messages of libraries."""
        fresh = _read_from(self._out.fileno(), self._read)
        self._read += len(fresh)
        *complete, self._partial = (self._partial + fresh).split(b"\n")
        for line in complete:
            if line.startswith(b"{"):
                self._lines.append(json.loads(line))
                if "refused" in self._lines[-1]:
                    raise ValueError(self._lines[-1]["refused"])
        return self._lines

    def last_words(self) -> str:
        code = self.poll()
        state = "was still at work" if code is None else f"ended with {code}"
        words = (
            _read_from(self._err.fileno(), 0).decode(errors="replace").splitlines()[-LAST_LINES:]
        )
        return "\n".join([f"process {self._process.pid} {state}:", *words])


def _read_from(descriptor: int, offset: int) -> bytes:
    """Returns a file's bytes from `offset` on. Does not move the position of the descriptor, where
    the process writes."""
    return os.pread(descriptor, os.fstat(descriptor).st_size - offset, offset)
