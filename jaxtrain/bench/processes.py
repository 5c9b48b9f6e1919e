"""Processes of a benchmark that run side by side and tell what they measure, a JSON line each."""

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

from jaxtrain.bench.step import Command

POLL_S = 0.1
LAST_LINES = 20


def answers(
    commands: Sequence[Command], *, silent_s: float, limit_s: float = math.inf
) -> Iterator[list[dict[str, Any]]]:
    """Start Python with each of the commands; whenever all have said one JSON line more, the lines.

    Ends when all processes have. Raises ValueError with what a process says under `refused`;
    RuntimeError, with its last words, for one that ends with another code than 0, when no line
    comes for `silent_s` seconds, and when they have not ended after `limit_s`. Whatever happens,
    none of them is left running.
    """
    with ExitStack() as stack:
        started = [stack.enter_context(Listened(*command)) for command in commands]
        began, count = time.monotonic(), 0
        heard = began
        while True:
            codes = [process.poll() for process in started]  # before reading: nothing is missed
            said = [process.lines() for process in started]
            for told in list(zip(*said, strict=False))[count:]:
                yield list(told)
                count, heard = count + 1, time.monotonic()
            if failed := [process for process, code in zip(started, codes, strict=True) if code]:
                raise RuntimeError(_last_words(failed))
            if None not in codes:
                return
            if time.monotonic() - heard > silent_s:
                late = [p for p, lines in zip(started, said, strict=True) if len(lines) == count]
                raise RuntimeError(f"no result for {silent_s:g} seconds\n{_last_words(late)}")
            if time.monotonic() - began > limit_s:
                raise RuntimeError(f"not done after {limit_s:g} seconds\n{_last_words(started)}")
            time.sleep(POLL_S)


def _last_words(processes: Sequence[Listened]) -> str:
    return "\n".join(process.last_words() for process in processes)


def end_with_parent() -> None:
    """Called in a process that `answers` started: it ends when the one that waits for it does,
    even killed. JAX takes SIGTERM for itself, and a peer that is gone is waited for."""

    def wait() -> None:
        os.read(sys.stdin.fileno(), 1)  # of sys.stdin itself the interpreter's end would wait
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


class Listened:
    """A Python process whose output goes to files, so that it never waits for a reader."""

    def __init__(self, arguments: Sequence[str], env: Mapping[str, str]) -> None:
        self._arguments, self._env = arguments, env
        self._rest, self._read, self._said = b"", 0, list[dict[str, Any]]()

    def __enter__(self) -> Listened:
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
        """The code it ended with, None while it is at work."""
        return self._process.poll()

    def lines(self) -> list[dict[str, Any]]:
        """The JSON lines so far; other lines are libraries talking."""
        fresh = _from(self._out.fileno(), self._read)
        self._read += len(fresh)
        *whole, self._rest = (self._rest + fresh).split(b"\n")
        for line in whole:
            if line.startswith(b"{"):
                self._said.append(json.loads(line))
                if "refused" in self._said[-1]:
                    raise ValueError(self._said[-1]["refused"])
        return self._said

    def last_words(self) -> str:
        code = self.poll()
        state = "was still at work" if code is None else f"ended with {code}"
        words = _from(self._err.fileno(), 0).decode(errors="replace").splitlines()[-LAST_LINES:]
        return "\n".join([f"process {self._process.pid} {state}:", *words])


def _from(descriptor: int, offset: int) -> bytes:
    """What a file holds from `offset` on. The process writes where this descriptor stands: reading
    must not move it."""
    return os.pread(descriptor, os.fstat(descriptor).st_size - offset, offset)
