"""Groups of processes on this machine: each runs the same script, told where they meet."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxtrain.cluster.join import free_port

ROOT = Path(__file__).parents[1]
Arguments = Callable[[int, int], Sequence[object]]
"""Of the process `index`, to Python; they meet at `port`."""


def bare_environment(home: Path, *more_modules: Path) -> dict[str, str]:
    """An environment with nothing of ours in it but where the package and `more_modules` are, and
    that programs are compiled cheaply, as in this process, and once for all starts of a `home`."""
    cheap = "JAX_DISABLE_MOST_OPTIMIZATIONS"
    modules = ":".join(map(str, (ROOT, *more_modules)))
    return {
        "PYTHONPATH": modules,
        "HOME": str(home),
        "PATH": os.environ["PATH"],
        cheap: os.environ[cheap],
        **one_cache(home),
    }


def one_cache(home: Path) -> dict[str, str]:
    """Variables by which processes that are started one after the other compile a program once."""
    return {
        "JAX_COMPILATION_CACHE_DIR": str(home / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


def start(
    folder: Path,
    processes: int,
    arguments: Arguments,
    *,
    modules: Path | None = None,
    out: Any = subprocess.PIPE,
) -> list[subprocess.Popen[str]]:
    """Begins them in `folder`; they say what they have to say to `out`, a pipe each by default.
    modules: a folder they import from beside the package."""
    port = free_port()
    more = () if modules is None else (modules,)
    return [
        subprocess.Popen(
            [sys.executable, *map(str, arguments(index, port))],
            cwd=folder,
            env=bare_environment(folder, *more),
            stdout=out,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index in range(processes)
    ]


def run(
    folder: Path,
    processes: int,
    arguments: Arguments,
    *,
    modules: Path | None = None,
    seconds: float = 900,
) -> list[str]:
    """As `start`, until all have ended well; what each has said."""
    return finish(start(folder, processes, arguments, modules=modules), seconds)


def finish(started: Sequence[subprocess.Popen[str]], seconds: float = 900) -> list[str]:
    """Waits until those that were started have ended well; returns what each has said."""
    try:
        said = [process.communicate(timeout=seconds)[0] for process in started]
    finally:
        for process in started:  # one that waits for a dead peer would wait for ever
            process.kill()
            process.communicate()
    assert [process.returncode for process in started] == [0] * len(started), "\n".join(said)
    return said
