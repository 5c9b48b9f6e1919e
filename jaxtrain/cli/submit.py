"""`jaxtrain launch` with a scheduler, which is given the job that starts the processes."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from jaxtrain.cli.shared import experiment_arguments, mesh_of, run_dir_of
from jaxtrain.cluster.exit_codes import REFUSED
from jaxtrain.fault_tolerance.schedulers import SCHEDULERS, Job, job_name, submission
from jaxtrain.fault_tolerance.supervisor import own_command
from jaxtrain.files.stores import is_address
from jaxtrain.files.temporary import temporary_folder
from jaxtrain.machines.workers import ending

FOR = {
    "image": ("k8s", "slurm"),
    "claim": ("k8s",),
    "partition": ("slurm",),
    "account": ("slurm",),
    "time": ("slurm",),
    "sbatch": ("slurm",),
    "setup": ("slurm",),
}
"""Option of a job -> the schedulers that have a use for it."""

SBATCH_EXAMPLES = {"partition": "gpu", "account": "lab", "time": "1-12:00:00"}
"""Option of sbatch that `launch` has under the same name -> an example of its value."""

NEEDED_BY_KUBERNETES = {
    "image": "the containers' --image, which has jaxtrain in it",
    "claim": "the --claim of a volume that all hosts write to, for the run directory",
}


def add_job_options(launch: argparse.ArgumentParser) -> None:
    text = "print what the scheduler would be given, and leave"
    launch.add_argument("--dry-run", action="store_true", help=text)
    text = "give it a run that `jaxtrain check` has not passed, such as one of an image's own files"
    launch.add_argument("--unchecked", action="store_true", help=text)
    text = "the container image of --k8s, or of --slurm where that has the plugin pyxis"
    launch.add_argument("--image", help=text)
    text = "the claim of a volume that all hosts write to; --k8s mounts it at the run directory"
    launch.add_argument("--claim", help=text)
    for name, example in SBATCH_EXAMPLES.items():
        launch.add_argument(f"--{name}", help=f"of the job of --slurm, such as {example}")
    text = "a further option of sbatch for --slurm, such as --sbatch=--qos=high; may be repeated"
    launch.add_argument("--sbatch", action="append", default=[], metavar="OPTION", help=text)
    text = (
        "a shell command before --slurm starts the processes, such as 'source venv/bin/activate'; "
        "may be repeated"
    )
    launch.add_argument("--setup", action="append", default=[], metavar="COMMAND", help=text)


def job_violations(options: argparse.Namespace) -> list[str]:
    """Returns violations for options of a job that would have no effect, or that are missing."""
    scheduler = options.scheduler
    names = [name for name in FOR if getattr(options, name)]
    if not scheduler:
        names += [name for name in ("dry_run", "unchecked") if getattr(options, name)]
        flags = (name.replace("_", "-") for name in names)
        return [f"--{flag} is for a scheduler; leave it out" for flag in flags]
    violations = [
        f"--{name} is for {' and '.join(f'--{other}' for other in FOR[name])}; leave it out"
        for name in names
        if scheduler not in FOR[name]
    ]
    if scheduler == "k8s" and not options.dry_run:
        missing = (text for name, text in NEEDED_BY_KUBERNETES.items() if name not in names)
        violations += [f"--k8s wants {text}" for text in missing]
    return violations


def _refuse_address(options: argparse.Namespace, train: argparse.Namespace) -> None:
    """Raises ValueError for a run in a store of pods, whose files are on the volume of --claim."""
    if options.scheduler == "k8s" and is_address(train.run_dir):
        raise ValueError(
            f"--run-dir {train.run_dir}: jobs of --k8s have runs on the volume of --claim; give a "
            "whole path there, or write a job that runs `jaxtrain train` with the address"
        )


def submit(options: argparse.Namespace, train: argparse.Namespace, command: list[str]) -> int:
    """Gives a scheduler the job that starts the processes; with --dry-run prints the job. Raises
    ValueError, before a job is written, for a run that `check` refuses."""
    _refuse_address(options, train)
    job = Job(
        job_name(train.experiment), mesh_of(train), command, run_dir_of(train),
        experiment=train.experiment, sbatch=_sbatch_options(options), setup=tuple(options.setup),
        **{name: value for name in ("image", "claim") if (value := getattr(options, name))},
    )  # fmt: skip
    text = SCHEDULERS[options.scheduler](job)
    if train.fresh or train.fresh_once is not None:
        _refuse_mounted(options, job)
    _refuse_unfit(options, train)
    if options.dry_run:
        print(text, end="")
        return 0
    with temporary_folder("schedule") as folder:
        file = folder / f"{job.name}.job"
        file.write_text(text)
        program = submission(options.scheduler, file)
        try:
            return subprocess.run(program, check=False).returncode
        except FileNotFoundError as error:
            raise ValueError(
                f"there is no {program[0]} here; --dry-run prints what it would be given"
            ) from error


def _refuse_mounted(options: argparse.Namespace, job: Job) -> None:
    """Raises ValueError for a run directory that a container has mounted: it cannot be moved."""
    outside = not job.run_dir.absolute().is_relative_to(Path.cwd())
    if options.scheduler == "k8s" or (job.image and outside):
        below = "" if options.scheduler == "k8s" else f", or one below {Path.cwd()}"
        raise ValueError(
            f"--fresh moves the run that is in {job.run_dir}, where the job's containers have a "
            f"volume mounted: leave it out, and give a new --run-dir{below}"
        )


def _sbatch_options(options: argparse.Namespace) -> tuple[str, ...]:
    values = {name: getattr(options, name) for name in SBATCH_EXAMPLES}
    return (*(f"--{name}={value}" for name, value in values.items() if value), *options.sbatch)


def refuse_absent(experiment: str) -> None:
    """Raises ValueError for a missing experiment file, before each process would after its
    imports."""
    if not Path(experiment).is_file():
        raise ValueError(f"there is no experiment file {experiment}; give the path of a .py file")


def _is_branch(train: argparse.Namespace) -> bool:
    """True if the run directory has a run that began as a branch."""
    from jaxtrain.checkpoint.run_config import BRANCH, read_config

    try:
        return BRANCH in (read_config(run_dir_of(train)) or {})
    except ValueError:  # `train` refuses that
        return False


def _refuse_unfit(options: argparse.Namespace, train: argparse.Namespace) -> None:
    """Raises ValueError for a run that `jaxtrain check` refuses. It runs in a process of its own,
    because this one has no JAX. Data of containers is looked for there alone."""
    image = bool(options.image)
    if options.scheduler != "k8s" and not image:
        refuse_absent(train.experiment)
    if options.unchecked:
        return
    if not Path(train.experiment).is_file():
        print(f"launch: {train.experiment} is not here: it is not checked", file=sys.stderr)
        return
    elsewhere = image or options.scheduler == "k8s"
    # A branch that has begun does not need the other run.
    asks = train.from_run and not elsewhere and not (_is_branch(train) and not train.fresh)
    begins = ["--from", train.from_run] if asks else []
    more = [*begins, *["--data-elsewhere"] * elsewhere]
    command = own_command("check", *experiment_arguments(train), *more)
    checked = subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
    if checked.returncode == REFUSED:
        raise ValueError(
            "no job is written: `jaxtrain check` refuses the run, as said above; --unchecked "
            "writes it nevertheless"
        )
    if checked.returncode:
        raise ValueError(
            f"no job is written: `jaxtrain check` ended by {ending(checked.returncode)} here; "
            "--unchecked writes it nevertheless"
        )
