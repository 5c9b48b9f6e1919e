"""SLURM on this machine: its controller, one node and their authentication, for a test."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jaxtrain.cluster.join import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol")

CONFIG = """
ClusterName=here
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
SlurmctldPort={port}
SlurmdPort={other}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
MinJobAge=300
SchedulerParameters=requeue_setup_env_fail
SelectType=select/cons_tres
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
"""

ONE = "NodeName=localhost NodeHostname={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN"
"""The node that runs jobs here."""

MANY = """ResumeProgram=/bin/true
SuspendProgram=/bin/true
SuspendTime=600
TreeWidth=128
GresTypes=gpu
NodeName=n[0-127] NodeAddr=127.0.0.1 CPUs=16 Gres=gpu:8 State=CLOUD"""
"""Nodes that would be there if a job wanted them, which is all that is looked at for a test of it;
nothing runs on them."""


def why_not() -> str:
    """Why it cannot be started here; "" where it can."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]
    if missing:
        return f"there is no {', '.join(missing)} here"
    return "" if os.geteuid() == 0 else "its daemons want root"


def _path() -> str:
    return f"{os.environ['PATH']}:/usr/sbin"


@contextmanager
def cluster(folder: Path, nodes: str = ONE) -> Iterator[dict[str, str]]:
    """Its environment. Everything it writes is in `folder`, whose path must be short."""
    for name in ("state", "spool"):
        (folder / name).mkdir()
    folder.chmod(0o755)
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o600)
    given = {
        "folder": folder, "host": socket.gethostname().partition(".")[0], "port": free_port(),
        "other": free_port(), "cpus": os.cpu_count(),
    }  # fmt: skip
    given["nodes"] = nodes.format(**given)
    (folder / "slurm.conf").write_text(CONFIG.format(**given))
    environ = {**os.environ, "PATH": _path(), "SLURM_CONF": str(folder / "slurm.conf")}
    munged = [
        *("munged", "--foreground", "--force", f"--key-file={key}"),
        *(f"--socket={folder}/munge.socket", f"--log-file={folder}/munge.log"),
        *(f"--pid-file={folder}/munge.pid", f"--seed-file={folder}/munge.seed"),
    ]
    started = []
    try:
        for command in (munged, ["slurmctld", "-D"], *([["slurmd", "-D"]] if nodes == ONE else [])):
            out = (folder / f"{command[0]}.out").open("wb")
            with out:
                started.append(subprocess.Popen(command, env=environ, stdout=out, stderr=out))
            if command is munged:
                _await_socket(folder / "munge.socket")
        _await(environ, folder, "idle" if nodes == ONE else "")
        yield environ
    finally:
        for process in reversed(started):
            process.terminate()
            try:
                process.wait(120)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _await_socket(path: Path) -> None:
    for _ in range(600):
        if path.exists():
            return
        time.sleep(0.05)
    raise AssertionError(f"there is no {path.name} after 30 s")


def _await(environ: dict[str, str], folder: Path, state: str) -> None:
    """Until the controller says so of its nodes; it hides those that are in a cloud."""
    for _ in range(600):
        found = subprocess.run(
            ["sinfo", "-h", "-o", "%t"], env=environ, capture_output=True, text=True, check=False
        )
        if found.returncode == 0 and found.stdout.strip() == state:
            return
        time.sleep(0.1)
    logs = [path.read_text()[-1500:] for path in folder.glob("slurm*.log")]
    raise AssertionError("\n".join([found.stdout, found.stderr, *logs]))
