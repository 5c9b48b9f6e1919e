"""A process that only tells what it is at, and does what a test has written in it; at its end the
run is done."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]

WORKER = """
import os, signal, subprocess, sys, time
from pathlib import Path
from jaxtrain.cluster import sampler
from jaxtrain.cluster.phases import Phases
from jaxtrain.cluster.sampler import SAMPLE_FILE, Sampler, end_with_parent

sampler.EVERY_S = 0.3
end_with_parent(int(os.environ["JAXTRAIN_SUPERVISOR"]))
process, folder = int(sys.argv[sys.argv.index("--process") + 1]), Path(sys.argv[1])
phases = Phases()
writes = Sampler(Path(os.environ[SAMPLE_FILE]), phases)
(folder / f"pid{process}").write_text(str(os.getpid()))
start = len(list(folder.glob(f"start{process}.*")))
(folder / f"start{process}.{start}").touch()
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
print("begins", start, flush=True)
phases.enter("step")
"""
DONE = "\nphases.enter('exit')\n"
"""`start` counts from 0."""


def alive(pid: int) -> bool:
    state = Path(f"/proc/{pid}/stat")
    return state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z"
