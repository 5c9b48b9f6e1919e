"""Groups of processes on this machine: each runs the same script, told where they meet."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxtrain.cluster.join import free_port

ROOT = Path(__file__).parents[1]
Arguments = Callable[[int, int], Sequence[object]]
"""Of the process `index`, to Python; they meet at `port`."""


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
    path = str(ROOT) if modules is None else f"{ROOT}:{modules}"
    return [
        subprocess.Popen(
            [sys.executable, *map(str, arguments(index, port))],
            cwd=folder,
            env={"PYTHONPATH": path, "HOME": str(folder), "PATH": "/usr/bin:/bin"},
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
    started = start(folder, processes, arguments, modules=modules)
    try:
        said = [process.communicate(timeout=seconds)[0] for process in started]
    finally:
        for process in started:  # one that waits for a dead peer would wait for ever
            process.kill()
            process.communicate()
    assert [process.returncode for process in started] == [0] * processes, "\n".join(said)
    return said
