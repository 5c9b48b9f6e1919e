"""What a scheduler is given to start one process on each host of a mesh: texts, for three of them.

One process a host with all its devices, told where the others are as each scheduler can: `train`
reads SLURM's own variables, the others spell flags. A process that fails ends the job's attempt;
the scheduler starts all of them again, and they go on from the newest whole checkpoint.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxtrain.cluster.exit_codes import DONE, EXHAUSTED, PREEMPTED, REFUSED
from jaxtrain.cluster.sampler import SUPERVISOR
from jaxtrain.mesh.mesh import MeshSpec

PORT = 8476
"""Where process 0 listens."""

WARNING_S = 300
"""How long before its time is up a job is told, so that it saves."""

ATTEMPTS = 10


@dataclass(frozen=True)
class Job:
    """A run for a scheduler. name: of letters, digits and dashes, as Kubernetes wants it. command:
    of each process, `train ...`. image: of containers that have jaxtrain; Kubernetes alone asks for
    one."""

    name: str
    spec: MeshSpec
    command: Sequence[str]
    image: str = "IMAGE-WITH-JAXTRAIN"

    @property
    def hosts(self) -> int:
        return self.spec.devices // self.spec.devices_per_host

    @property
    def gpus(self) -> int:
        """Of each host."""
        return self.spec.devices_per_host if self.spec.chip.platform == "gpu" else 0

    @property
    def tpus(self) -> int:
        """Of each host."""
        return self.spec.devices_per_host if self.spec.chip.platform == "tpu" else 0


def job_of(experiment: str, spec: MeshSpec, command: Sequence[str], image: str | None) -> Job:
    """Named after the experiment's file."""
    name = re.sub(r"[^a-z0-9]+", "-", Path(experiment).stem.lower()).strip("-") or "jaxtrain"
    return Job(name, spec, command, image or Job.image)


def slurm(job: Job) -> str:
    """A script for sbatch."""
    devices = ",".join(map(str, range(job.gpus)))
    lines = [
        "#!/bin/bash",
        f"#SBATCH --job-name={job.name}",
        f"#SBATCH --nodes={job.hosts}",
        "#SBATCH --ntasks-per-node=1",
        *([f"#SBATCH --gpus-per-node={job.gpus}"] if job.gpus else []),
        "#SBATCH --exclusive",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        "# So long before its time is up every process gets SIGTERM: all save, and leave with 75.",
        f"#SBATCH --signal=TERM@{WARNING_S}",
        "",
        *(["export JAX_LOCAL_DEVICE_IDS=" + devices] if job.gpus else []),
        "# One process that fails ends all; they go on together from the newest whole checkpoint.",
        f"srun --kill-on-bad-exit=1 jaxtrain {shlex.join(job.command)}",
        "code=$?",
        f"if ((code != {DONE} && code != {REFUSED}"
        f" && ${{SLURM_RESTART_COUNT:-0}} < {ATTEMPTS})); then",
        '    scontrol requeue "$SLURM_JOB_ID"',
        "fi",
        "exit $code",
    ]
    return "\n".join(lines) + "\n"


def kubernetes(job: Job) -> str:
    """A JobSet (jobset.x-k8s.io), as JSON, which kubectl reads as it reads YAML."""
    chips = {"nvidia.com/gpu": job.gpus, "google.com/tpu": job.tpus}
    counted = {name: count for name, count in chips.items() if count}
    place = [
        *("--coordinator", f"{job.name}-workers-0-0.{job.name}:{PORT}"),
        *("--processes", str(job.hosts), "--process", "$(JOB_COMPLETION_INDEX)"),
    ]
    container = {
        "name": "train",
        "image": job.image,
        "command": ["jaxtrain", *job.command, *place],
        "ports": [{"containerPort": PORT}],
        **({"resources": {"limits": counted}} if counted else {}),
    }
    topology = {"cloud.google.com/gke-tpu-topology": job.spec.topology} if job.spec.topology else {}
    pod = {
        "restartPolicy": "Never",
        # All save after the step they are at, and leave.
        "terminationGracePeriodSeconds": WARNING_S,
        **({"nodeSelector": topology} if topology else {}),
        "containers": [container],
    }
    jobs = {
        "parallelism": job.hosts,
        "completions": job.hosts,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "template": {"spec": pod},
    }
    whole = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": job.name},
        "spec": {
            "failurePolicy": {"maxRestarts": ATTEMPTS},
            "replicatedJobs": [{"name": "workers", "replicas": 1, "template": {"spec": jobs}}],
        },
    }
    return json.dumps(whole, indent=2) + "\n"


def ray(job: Job) -> str:
    """A Python script for `ray job submit`."""
    bundle = {"GPU": job.gpus} if job.gpus else {"TPU": job.tpus} if job.tpus else {"CPU": 1}
    (resource,) = bundle
    takes = {"GPU": f"num_cpus=0, num_gpus={job.gpus}", "CPU": "num_cpus=1"}
    return _RAY.format(
        name=job.name, hosts=job.hosts, bundle=bundle, command=["jaxtrain", *job.command],
        folder=str(Path.cwd()), attempts=1 + ATTEMPTS, well=(DONE, PREEMPTED), refused=REFUSED,
        takes=takes.get(resource, f"num_cpus=0, resources={bundle}"), exhausted=EXHAUSTED,
        supervisor=SUPERVISOR,
    )  # fmt: skip


_RAY = '''"""{name}: one process on each of {hosts} hosts of a Ray cluster."""
import os
import socket
import subprocess

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

HOSTS, COMMAND = {hosts}, {command}
FOLDER = {folder!r}  # on a file system that all hosts share, where the run directory is too


@ray.remote({takes})
class Host:
    def address(self):
        with socket.socket() as free:
            free.bind(("", 0))
            return f"{{ray.util.get_node_ip_address()}}:{{free.getsockname()[1]}}"

    def run(self, coordinator, process):
        place = ["--coordinator", coordinator, "--processes", str(HOSTS), "--process", str(process)]
        # It ends with this actor, however that ends.
        environ = {{**os.environ, "{supervisor}": str(os.getpid())}}
        return subprocess.run([*COMMAND, *place], cwd=FOLDER, env=environ).returncode


def attempt(group):
    """The exit codes until one process fails, or all have ended well."""
    hosts = [
        Host.options(scheduling_strategy=PlacementGroupSchedulingStrategy(group, n)).remote()
        for n in range(HOSTS)
    ]
    codes = []
    try:
        coordinator = ray.get(hosts[0].address.remote())
        waiting = [host.run.remote(coordinator, n) for n, host in enumerate(hosts)]
        # One process that fails ends all; they go on together from the newest whole checkpoint.
        while waiting and all(code in {well} for code in codes):
            (ended,), waiting = ray.wait(waiting)
            codes.append(ray.get(ended))
    except ray.exceptions.RayError as error:
        print(error, flush=True)
        codes.append(1)
    for host in hosts:
        ray.kill(host)
    return codes


ray.init()
group = placement_group([{bundle}] * HOSTS, strategy="STRICT_SPREAD" if HOSTS > 1 else "PACK")
while not group.wait(60):
    print(f"waiting for {{HOSTS}} hosts that each have {bundle} free", flush=True)
for number in range({attempts}):
    codes = attempt(group)
    print(f"attempt {{number + 1}} ended with exit codes {{codes}}", flush=True)
    if {refused} in codes:
        raise SystemExit({refused})
    if all(code in {well} for code in codes):
        raise SystemExit(max(codes))
raise SystemExit({exhausted})
'''

SCHEDULERS = {"slurm": slurm, "k8s": kubernetes, "ray": ray}


def submission(scheduler: str, file: Path) -> list[str]:
    """The command that gives a scheduler its text, alone in the folder of `file`."""
    if scheduler == "ray":  # which copies the folder to wherever it runs the script
        return [
            "ray",
            "job",
            "submit",
            "--working-dir",
            str(file.parent),
            "--",
            "python",
            file.name,
        ]
    return {"slurm": ["sbatch"], "k8s": ["kubectl", "apply", "-f"]}[scheduler] + [str(file)]
