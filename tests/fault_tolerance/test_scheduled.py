"""Runs that real schedulers start on this machine: SLURM with a fault, and Open MPI."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import slurm_cluster
from test_launch import EXPERIMENT, ROOT, losses

from jaxtrain.fault_tolerance.faults import faults_variable, read_fault
from jaxtrain.fault_tolerance.schedulers import job_of, slurm
from jaxtrain.mesh.mesh import load_mesh

MESH = 'chip = "cpu"\ndevices = 4\ndevices_per_host = 2\n[axes]\ndata = 2\nfsdp = 2\n'


@pytest.fixture
def folder() -> Iterator[Path]:
    """Of a short path, for sockets; with a `jaxtrain` to call."""
    with tempfile.TemporaryDirectory(prefix="jt", dir="/tmp") as name:
        found = Path(name)
        (found / "experiment.py").write_text(EXPERIMENT)
        (found / "mesh.toml").write_text(MESH)
        text = f'#!/bin/bash\nPYTHONPATH={ROOT} exec {sys.executable} -P -m jaxtrain.cli "$@"\n'
        (found / "bin").mkdir()
        (found / "bin" / "jaxtrain").write_text(text)
        (found / "bin" / "jaxtrain").chmod(0o755)
        yield found


def train(run: str) -> list[str]:
    return ["train", "experiment.py", "--mesh", "mesh.toml", "--run-dir", run]


@pytest.mark.slow
def test_slurm_runs_the_script_and_starts_it_again(folder: Path) -> None:
    """One of two processes is killed: all end, the job is queued again, and goes on from the
    newest checkpoint. Both run on the one node there is."""
    if reason := slurm_cluster.why_not():
        pytest.skip(reason)
    job = job_of("experiment.py", load_mesh(folder / "mesh.toml"), train("run"), None)
    (folder / "job").write_text(slurm(job))
    on_one = ["--nodes=1", "--ntasks-per-node=2", "--overcommit", "--output=out"]
    marks = folder / "marks"
    marks.mkdir()
    with slurm_cluster.cluster(folder) as environ:
        given = {**environ, **faults_variable([read_fault("kill@20:1")], marks)}
        given["PATH"] = f"{folder}/bin:{environ['PATH']}"
        ran = subprocess.run(
            ["sbatch", *on_one, "job"], cwd=folder, env=given, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        assert ran.returncode == 0, ran.stderr
        (number,) = re.findall(r"\d+", ran.stdout)
        for _ in range(500):
            show = ["scontrol", "show", "job", number]
            shown = subprocess.run(show, env=environ, capture_output=True, text=True, check=False)
            if "JobState=PENDING" in shown.stdout and "Restarts=1" in shown.stdout:
                # SLURM waits two minutes before it takes a job again; a test does not.
                now = ["scontrol", "update", f"JobId={number}", "StartTime=now"]
                subprocess.run(now, env=environ, check=False)
            if re.search(r"JobState=(COMPLETED|FAILED|CANCELLED)", shown.stdout):
                break
            time.sleep(0.5)
    said = (folder / "out").read_text()
    assert "JobState=COMPLETED" in shown.stdout and "Restarts=1" in shown.stdout, said
    assert said.count("done: 48 steps") == 1 and re.search(r"resuming at step (8|16)\b", said)
    assert sorted(losses(folder, "run")) == list(range(1, 49))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="there is no mpirun here")
def test_open_mpi_starts_processes_that_find_each_other(folder: Path) -> None:
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    ran = subprocess.run(
        ["mpirun", *root, "-n", "2", "--oversubscribe", "jaxtrain", *train("run")],
        cwd=folder, env={**os.environ, "PATH": f"{folder}/bin:{os.environ['PATH']}"},
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.count("done: 48 steps") == 1
    assert sorted(losses(folder, "run")) == list(range(1, 49))
