"""Runs that real schedulers start on this machine: SLURM and Ray with a fault, and Open MPI."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import slurm_cluster
from process_group import ROOT, one_cache
from test_launch import EXPERIMENT, losses

from jaxtrain.cluster.join import free_port
from jaxtrain.fault_tolerance.faults import faults_variable, read_fault
from jaxtrain.fault_tolerance.schedulers import Job, slurm
from jaxtrain.mesh.mesh import load_mesh

MESH = 'chip = "cpu"\ndevices = 4\ndevices_per_host = 2\n[axes]\ndata = 2\nfsdp = 2\n'

RAY = os.environ.get("JAXTRAIN_RAY_PYTHON")
"""The interpreter of an environment with Ray, which is none of our dependencies."""


PATIENCE_S, LOOKS = 900, 1800
"""A scheduler may take its time: on a busy machine ten times as long as on a quiet one. A look at a
job is half a second after the one before."""


@pytest.fixture
def folder() -> Iterator[Path]:
    """Of a short path, for sockets; with a `jaxtrain` to call."""
    with tempfile.TemporaryDirectory(prefix="jt", dir="/tmp") as name:
        found = Path(name)
        (found / "experiment.py").write_text(EXPERIMENT)
        (found / "mesh.toml").write_text(MESH)
        text = f'#!/bin/bash\nPYTHONPATH={ROOT} exec {sys.executable} -P -m jaxtrain "$@"\n'
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
    mesh, more = load_mesh(folder / "mesh.toml"), ("--partition=all", "--time=30")
    setup = ("export PYTHONUNBUFFERED=1",)
    job = Job("experiment", mesh, train("run"), Path("run"), sbatch=more, setup=setup)
    (folder / "job").write_text(slurm(job))
    on_one = ["--nodes=1", "--ntasks-per-node=2", "--overcommit", "--output=out"]
    marks = folder / "marks"
    marks.mkdir()
    with slurm_cluster.cluster(folder) as environ:
        given = {**environ, **faults_variable([read_fault("kill@20:1")], marks)}
        given |= {"PATH": f"{folder}/bin:{environ['PATH']}", **one_cache(folder)}
        ran = subprocess.run(
            ["sbatch", *on_one, "job"], cwd=folder, env=given, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        assert ran.returncode == 0, ran.stderr
        (number,) = re.findall(r"\d+", ran.stdout)
        failed, since = 0, 0
        for _ in range(LOOKS):
            show = ["scontrol", "show", "job", number]
            shown = subprocess.run(show, env=environ, capture_output=True, text=True, check=False)
            waits = "JobState=PENDING" in shown.stdout and "Restarts=1" in shown.stdout
            since = since or waits * int(time.time())
            if waits and int(time.time()) > since:
                # SLURM waits two minutes before it takes a job again. A node refuses it, which ends
                # the job, in the second of the clock in which it ended there.
                now = ["scontrol", "update", f"JobId={number}", "StartTime=now"]
                subprocess.run(now, env=environ, check=False)
            # On its way back into the queue a job may be seen in a state that looks like its end.
            failed = failed + 1 if re.search(r"JobState=(FAILED|CANCELLED)", shown.stdout) else 0
            if "JobState=COMPLETED" in shown.stdout or failed > 60:
                break
            time.sleep(0.5)
    said = (folder / "out").read_text()
    stands = re.findall(r"(?:JobState|Restarts|Reason|ExitCode)=\S+", shown.stdout)
    assert {"JobState=COMPLETED", "Restarts=1"} <= {*stands}, f"{stands}\n{said}"
    assert said.count("done: 48 steps") == 1 and re.search(r"resuming at step (8|16)\b", said)
    assert sorted(losses(folder, "run")) == list(range(1, 49))


@pytest.mark.slow
def test_slurm_takes_the_scripts_of_large_meshes(folder: Path) -> None:
    """Of 8 and 128 hosts of GPUs, and 128 of TPUs, on as many nodes that could be there."""
    if reason := slurm_cluster.why_not():
        pytest.skip(reason)
    with slurm_cluster.cluster(folder, slurm_cluster.MANY) as environ:
        for mesh, nodes in (
            ("h100_64", "n[0-7]"),
            ("h100_1024", "n[0-127]"),
            ("v5p_512", "n[0-127]"),
        ):
            (folder / "job").write_text(slurm(Job("e", load_mesh(mesh), train("run"), Path("run"))))
            ran = subprocess.run(
                ["sbatch", "--test-only", "job"], cwd=folder, env=environ, capture_output=True,
                text=True, check=False,
            )  # fmt: skip
            assert ran.returncode == 0 and f"on nodes {nodes} in" in ran.stderr, ran.stderr


@pytest.mark.slow
@pytest.mark.skipif(
    RAY is None,
    reason="JAXTRAIN_RAY_PYTHON names no interpreter of an environment with ray[default]",
)
def test_ray_runs_the_script_which_starts_both_again(folder: Path) -> None:
    """On two nodes of a cluster on this machine, one of two processes is killed."""
    (folder / "marks").mkdir()
    ((name, value),) = faults_variable([read_fault("kill@20:1")], folder / "marks").items()
    shim = folder / "bin" / "jaxtrain"
    shim.write_text(shim.read_text().replace("\n", f"\nexport {name}={shlex.quote(value)}\n", 1))
    assert RAY is not None
    path = f"{folder}/bin:{Path(RAY).parent}:{os.environ['PATH']}"
    # Ray runs what it starts at nice 15: beside two busy tests it would wait for their end.
    no_nice = {"RAY_worker_niceness": "0"}
    port, environ = free_port(), {**os.environ, **no_nice, "PATH": path, **one_cache(folder)}
    nodes = subprocess.Popen(
        [RAY, str(Path(__file__).with_name("ray_cluster.py")), str(port)],
        env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert nodes.stdout is not None
        assert any(line == "ready\n" for line in nodes.stdout)
        ran = subprocess.run(
            ["jaxtrain", "launch", "--ray", "--", *train("run")],
            cwd=folder, env={**environ, "RAY_ADDRESS": f"http://127.0.0.1:{port}"},
            capture_output=True, text=True, timeout=PATIENCE_S, check=False,
        )  # fmt: skip
    finally:
        nodes.communicate(timeout=PATIENCE_S)  # its input ends, and with it the cluster
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "attempt 1 ended with exit codes [-9]" in ran.stdout
    assert "attempt 2 ended with exit codes [0, 0]" in ran.stdout
    assert re.search(r"resuming at step (8|16)\b", ran.stdout)
    assert ran.stdout.count("done: 48 steps") == 1
    assert sorted(losses(folder, "run")) == list(range(1, 49))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="there is no mpirun here")
def test_open_mpi_starts_processes_that_find_each_other(folder: Path) -> None:
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    ran = subprocess.run(
        ["mpirun", *root, "-n", "2", "--oversubscribe", "jaxtrain", *train("run")],
        cwd=folder, env={**os.environ, "PATH": f"{folder}/bin:{os.environ['PATH']}"},
        capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.count("done: 48 steps") == 1
    assert sorted(losses(folder, "run")) == list(range(1, 49))
