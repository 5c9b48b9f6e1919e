"""Job files for three schedulers, which start one process on each host of a mesh.

One process per host uses all its devices, and finds the others as each scheduler allows: `train`
reads SLURM's own variables, the other schedulers pass flags. A process that fails ends the job's
attempt; the scheduler restarts all of them, and they go on from the newest undamaged checkpoint.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxtrain.cluster.exit_codes import DONE, EXHAUSTED, PREEMPTED, REFUSED
from jaxtrain.cluster.sampler import SUPERVISOR
from jaxtrain.mesh.mesh import MeshSpec
from jaxtrain.violations import raise_violations

PORT = 8476
"""Port on which process 0 listens."""

WARNING_S = 300
"""Seconds of warning before a job's time limit, so that it saves."""

ATTEMPTS = 10


@dataclass(frozen=True)
class Job:
    """A run for a scheduler. name: letters, digits and dashes, a letter first, as Kubernetes
    requires. command: of each process, `train ...`. run_dir: its --run-dir. experiment: its file.

    image: of containers with jaxtrain installed; for Kubernetes, and for SLURM with its plugin
      pyxis. claim: for Kubernetes, of a volume that all hosts write to. sbatch: for SLURM, further
      options of sbatch. setup: for SLURM, shell commands before the processes start.
    """

    name: str
    spec: MeshSpec
    command: Sequence[str]
    run_dir: Path
    experiment: str = ""
    image: str = ""
    claim: str = "CLAIM-THAT-ALL-WRITE-TO"
    sbatch: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()

    @property
    def hosts(self) -> int:
        return self.spec.devices // self.spec.devices_per_host

    @property
    def gpus(self) -> int:
        """GPUs of each host."""
        return self.spec.devices_per_host if self.spec.chip.platform == "gpu" else 0

    @property
    def tpus(self) -> int:
        """TPU chips of each host."""
        chip = self.spec.chip
        return self.spec.devices_per_host // chip.devices_per_chip if chip.platform == "tpu" else 0


def job_name(experiment: str) -> str:
    """Name from the experiment's file, short enough to be part of a pod's name."""
    name = re.sub(r"[^a-z0-9]+", "-", Path(experiment).stem.lower()).strip("-")
    named = name if name[:1].isalpha() else f"run-{name}"
    return named[:40].strip("-")


NOT_FOR_SBATCH = (
    *("array", "gpus", "gpus-per-node", "gpus-per-socket", "gpus-per-task", "gres", "no-requeue"),
    *("nodes", "ntasks", "ntasks-per-core", "ntasks-per-gpu", "ntasks-per-node", "open-mode"),
    *("requeue", "signal", "tasks-per-node", "wrap"),
)
"""Options of sbatch by which a job would not be one process a host of the mesh, would not save
before its time is up, or not begin again."""

SHORT = {"-N": "nodes", "-n": "ntasks", "-G": "gpus", "-a": "array"}


def sbatch_violations(options: Sequence[str]) -> list[str]:
    """Returns a message for each option that cannot be a line `#SBATCH OPTION` of a job."""
    messages = []
    for option in options:
        flag = re.split(r"[=\s]", option)[0]
        name = SHORT.get(flag[:2], flag.removeprefix("--"))
        if not re.match("--?[a-zA-Z]", option) or not option.isprintable():
            messages.append(
                f"--sbatch={option!r}; use an option of sbatch, such as --sbatch=--qos=high"
            )
        elif any(other.startswith(name) for other in NOT_FOR_SBATCH):  # sbatch takes beginnings
            messages.append(f"--sbatch={option}: the mesh and the launch say that; leave it out")
    return messages


def slurm(job: Job) -> str:
    """A script for sbatch. Raises ValueError for options of sbatch that follow from the mesh."""
    raise_violations(sbatch_violations(job.sbatch))
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
        *(f"#SBATCH {option}" for option in job.sbatch),
        "",
        *(f"{{ {command}\n}} || exit {REFUSED}" for command in job.setup),  # not again then
        *([f"mkdir -p {shlex.quote(str(job.run_dir.absolute()))}"] if job.image else []),
        *(["export JAX_LOCAL_DEVICE_IDS=" + devices] if job.gpus else []),
        "# One process that fails ends all; they go on together from the newest whole checkpoint.",
        # Each has all cores of its host.
        shlex.join(["srun", *_SRUN, *_container(job), "jaxtrain", *job.command]),
        "code=$?",
        f"if ((code != {DONE} && code != {REFUSED}"
        f" && ${{SLURM_RESTART_COUNT:-0}} < {ATTEMPTS})); then",
        '    scontrol requeue "$SLURM_JOB_ID"',
        "fi",
        "exit $code",
    ]
    return "\n".join(lines) + "\n"


_SRUN = ("--kill-on-bad-exit=1", "--cpu-bind=none")


def _container(job: Job) -> list[str]:
    """Options of srun by which pyxis starts a container that sees the folder of submission, where
    experiment and mesh are, and the run directory."""
    if not job.image:
        return []
    here, run = Path.cwd(), job.run_dir.absolute()
    folders = [here] if run.is_relative_to(here) else [here, run]
    raise_violations(
        f"{folder}: pyxis splits mounts at : and ,; use --image from a folder without them"
        for folder in folders
        if {":", ","} & {*str(folder)}
    )
    return [
        f"--container-image={job.image}",
        f"--container-mounts={','.join(f'{folder}:{folder}' for folder in folders)}",
        f"--container-workdir={here}",
    ]


def kubernetes(job: Job) -> str:
    """A JobSet (jobset.x-k8s.io) as JSON, which kubectl reads like YAML.

    Raises ValueError for a run directory that is no absolute path, and for several TPU slices.
    """
    raise_violations(_unfit_for_kubernetes(job))
    jobs = {
        "parallelism": job.hosts,
        "completions": job.hosts,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {
            "rules": [
                {
                    "action": "FailJob",
                    "onExitCodes": {"containerName": TRAIN, "operator": "In", "values": [REFUSED]},
                }
            ]
        },
        "template": {"spec": _pod(job)},
    }
    # One slice is one pool of nodes; pods of it are not spread over two.
    pool = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}
    never = {"name": "refused", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    job_set = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {
            "name": job.name,
            "annotations": {
                "jaxtrain/experiment": f"{job.experiment} of the image",
                **(pool if job.tpus else {}),
            },
        },
        "spec": {
            # Input that was refused would be again. All else begins again, also what has saved and
            # left after a SIGTERM (75), by which Kubernetes takes a node back.
            "failurePolicy": {"maxRestarts": ATTEMPTS, "rules": [never]},
            "replicatedJobs": [{"name": "workers", "replicas": 1, "template": {"spec": jobs}}],
        },
    }
    return json.dumps(job_set, indent=2) + "\n"


TRAIN = "train"
"""The container's name."""

CACHE = "/jaxtrain-cache"
"""Where a container keeps tokenised data: on the claim's volume, so that the next start, and other
runs, have it too."""

ACCELERATORS = {
    "tpu_v4": "tpu-v4-podslice", "tpu_v5e": "tpu-v5-lite-podslice", "tpu_v5p": "tpu-v5p-slice",
    "tpu_v6e": "tpu-v6e-slice", "tpu7x": "tpu7x",
}  # fmt: skip
"""Chip -> label of its nodes (Google's table of TPUs in GKE)."""


def _pod(job: Job) -> dict[str, object]:
    place = [
        *("--coordinator", f"{job.name}-workers-0-0.{job.name}:{PORT}"),
        *("--processes", str(job.hosts), "--process", "$(JOB_COMPLETION_INDEX)"),
    ]
    # What a pod writes elsewhere is lost for the next one.
    mounts = [
        {"name": "run", "mountPath": str(job.run_dir), "subPath": str(job.run_dir).strip("/")},
        {"name": "run", "mountPath": CACHE, "subPath": "jaxtrain-cache"},
    ]
    volumes: list[object] = [
        {"name": "run", "persistentVolumeClaim": {"claimName": job.claim}},
    ]
    if job.gpus:  # for NCCL: a container's default of 64 MB is too small
        mounts.append({"name": "shm", "mountPath": "/dev/shm"})
        volumes.append({"name": "shm", "emptyDir": {"medium": "Memory"}})
    chips = {"nvidia.com/gpu": job.gpus, "google.com/tpu": job.tpus}
    counted = {name: count for name, count in chips.items() if count}
    container = {
        "name": TRAIN,
        "image": job.image or "IMAGE-WITH-JAXTRAIN",
        "command": ["jaxtrain", *job.command, *place],
        "env": [
            {"name": "JAXTRAIN_CACHE", "value": CACHE},
            # A user whom the image does not know has none that can be written.
            {"name": "HOME", "value": "/tmp"},
        ],
        "ports": [{"containerPort": PORT}],
        "volumeMounts": mounts,
        **({"resources": {"limits": counted}} if counted else {}),
    }
    nodes = {"cloud.google.com/gke-tpu-accelerator": ACCELERATORS.get(job.spec.chip.name, "")}
    if job.spec.topology:
        nodes["cloud.google.com/gke-tpu-topology"] = job.spec.topology
    return {
        "restartPolicy": "Never",
        # All save after the step they are at, and leave.
        "terminationGracePeriodSeconds": WARNING_S,
        **({"nodeSelector": nodes} if job.tpus else {}),
        # So that a user other than root may write to the volume, where its type allows that.
        "securityContext": {"fsGroup": 1000},
        "containers": [container],
        "volumes": volumes,
    }


def _unfit_for_kubernetes(job: Job) -> list[str]:
    violations = []
    if not job.run_dir.is_absolute():
        violations.append(
            f"--run-dir {job.run_dir}: a pod has the volume of --claim there; give a whole path, "
            f"such as /runs/{job.run_dir.name}"
        )
    if job.spec.topology:
        slice_ = math.prod(map(int, job.spec.topology.split("x"))) * job.spec.chip.devices_per_chip
        if slice_ != job.spec.devices:
            violations.append(
                f"{job.spec.where} has {job.spec.devices // slice_} slices of {job.spec.topology}, "
                "and a JobSet is written for one; use a mesh of one slice"
            )
    return violations


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
    """Command that submits the file; a scheduler may copy its folder, which has nothing else."""
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
