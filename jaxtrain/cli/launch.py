"""`jaxtrain launch`: supervises several processes of one run on this machine."""

from __future__ import annotations

import argparse
import json
import os
import secrets
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path
from typing import Any

from jaxtrain.cli.shared import (
    experiment_arguments,
    mesh_of,
    run_dir_of,
    seconds_violations,
    signals_to,
)
from jaxtrain.cli.submit import add_job_options, job_violations, refuse_absent, submit
from jaxtrain.cluster.exit_codes import FAILED
from jaxtrain.cluster.join import TLS_FILES, uses_tls
from jaxtrain.fault_tolerance.beginning import Beginning
from jaxtrain.fault_tolerance.deadlines import Deadlines
from jaxtrain.fault_tolerance.faults import Fault, read_fault
from jaxtrain.fault_tolerance.restarts import Restarts
from jaxtrain.fault_tolerance.supervisor import Supervisor, own_command
from jaxtrain.files.temporary import temporary_folder
from jaxtrain.machines.agents import Agents
from jaxtrain.machines.channel import read_address, read_key
from jaxtrain.machines.layouts import MachineLayout, read_layouts
from jaxtrain.machines.machine import LocalMachines, Machines, slots_of
from jaxtrain.machines.roster import REJOIN_S, Roster
from jaxtrain.notices import Tell
from jaxtrain.violations import raise_violations

WAIT_S, LISTEN = 300.0, "0.0.0.0:7000"


def add_options(launch: argparse.ArgumentParser) -> None:
    places = launch.add_mutually_exclusive_group(required=True)
    places.add_argument("--processes", type=int, help="how many to run on this machine, watched")
    text = "how many there are, each with a jaxtrain agent, which runs one process there, watched"
    places.add_argument("--machines", type=int, help=text)
    for name, program in (("slurm", "sbatch"), ("k8s", "kubectl, as a JobSet"), ("ray", "Ray")):
        text = f"one on each host of the mesh, started by {program}"
        places.add_argument(
            f"--{name}", action="store_const", dest="scheduler", const=name, help=text
        )
    add_job_options(launch)
    text = "HOST:PORT at which the agents of --machines are waited for; default 0.0.0.0:7000"
    launch.add_argument("--listen", help=text)
    text = "go on with fewer where a machine is missing or computes wrongly, and with all again"
    launch.add_argument("--elastic", action="store_true", help=text)
    text = (
        "seconds that the first start waits for all machines, and later ones where the run cannot "
        "go on without a missing one; default 300"
    )
    launch.add_argument("--wait", type=float, default=WAIT_S, help=text)
    text = (
        "seconds that a lost machine is waited for where the run can go on without it, and that "
        "one must be back before the run takes it in again; default 10"
    )
    launch.add_argument("--rejoin", type=float, default=REJOIN_S, help=text)
    text = "how often all may be started again within --within seconds; default 10"
    launch.add_argument("--restarts", type=int, default=Restarts.most, help=text)
    text = "seconds in which --restarts are counted; default 3600"
    launch.add_argument("--within", type=float, default=Restarts.within_s, help=text)
    text = "one on purpose, KIND@STEP.PHASE:PROCESS, such as kill@20 or stop@12.load:1"
    launch.add_argument("--fault", action="append", default=[], dest="faults", help=text)
    for field in fields(Deadlines):
        flag, default = field.name.replace("_", "-"), field.default
        phase = {
            "silence": "without a sign of life",
            "step": "in a step, a wait for data or a callback",
            "step_times": "the same as medians of a step, where that is longer",
        }.get(field.name, f"in the phase {field.name.replace('_', ' ')}")
        text = f"seconds {phase}, after which a process hangs; default {default}"
        launch.add_argument(f"--deadline-{flag}", type=float, default=default, help=text)
    launch.add_argument("command", nargs=argparse.REMAINDER, help="-- train EXPERIMENT ...")


def _for_starts(command: list[str], train: argparse.Namespace) -> list[str]:
    """Returns the command of every start: with --fresh the first begins anew, and later ones go on
    with that run, by a text, which `train` gets too. Raises ValueError where each would take
    another directory."""
    if train.numbered:
        raise ValueError(
            "launch starts a run again and again, and --numbered would take another directory each "
            "time; give it another --name or --run-dir"
        )
    if not train.fresh or train.fresh_once is not None:
        return command
    train.fresh_once = secrets.token_hex(8)
    return [*command, "--fresh-once", train.fresh_once]


def launch_command(options: argparse.Namespace, parse: Callable[[list[str]], Any]) -> int:
    """Runs `launch`. parse: the command line's own parser, which refuses what `train` refuses."""
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if command[:1] != ["train"]:
        raise ValueError(
            f"launch runs `train`, and was given {' '.join(command) or 'nothing'}; write "
            "jaxtrain launch --processes 2 -- train EXPERIMENT --mesh MESH"
        )
    train = parse(command)
    if train.coordinator or train.processes or train.process is not None:
        raise ValueError(
            "launch tells its processes where they meet and which they are; leave out "
            "--coordinator, --processes and --process"
        )
    again = train.fresh and train.fresh_once is None
    command = _for_starts(command, train)
    beginning = Beginning(train.fresh_once, again)
    raise_violations(
        [
            *_idle(options),
            *seconds_violations("--wait", options.wait),
            *seconds_violations("--rejoin", options.rejoin),
        ]
    )
    if options.scheduler:
        return submit(options, train, command)
    count = options.processes or options.machines or 0
    _refuse(train, count)
    faults = _faults(options, count)
    seconds = {
        field.name: getattr(options, f"deadline_{field.name}") for field in fields(Deadlines)
    }
    deadlines = Deadlines(**seconds)
    restarts = Restarts(most=options.restarts, within_s=options.within)
    run_dir, tell = run_dir_of(train), _teller()
    plans = _plans(train, count) if options.elastic else None
    with ExitStack() as stack:
        machines, folder = _machines(
            options, run_dir, tell, stack, anew=train.fresh_once is not None
        )
        layouts = {count: MachineLayout(count)}
        if plans is not None:
            layouts = read_layouts(plans, mesh_of(train), folder / "elastic")
        roster = Roster(machines, layouts, options.wait, tell, options.rejoin)
        details: Any = dict(
            deadlines=deadlines, restarts=restarts, faults=faults, beginning=beginning
        )
        supervisor = Supervisor(command, roster, tell, run_dir, folder, **details)
        code = FAILED
        try:
            refuse_absent(train.experiment)
            with signals_to(supervisor.stop):
                code = supervisor.run()
        finally:
            machines.close(code)
        return code


def _faults(options: argparse.Namespace, count: int) -> list[Fault]:
    """Returns the faults to inject. Raises ValueError for those of what is not there."""
    faults = [read_fault(text) for text in options.faults]
    raise_violations(
        f"--fault {fault} is of no process; there are 0 to {count - 1}"
        for fault in faults
        if fault.process >= count
    )
    raise_violations(
        f"--fault {fault} is of a machine's agent; use --machines"
        for fault in faults
        if fault.kind == "lose" and options.machines is None
    )
    return faults


def _machines(
    options: argparse.Namespace, run_dir: Path, tell: Tell, stack: ExitStack, *, anew: bool
) -> tuple[Machines, Path]:
    """Returns the machines that start the processes, and a folder that all of them and this one
    share. anew: a run that is in the directory may be moved."""
    if options.machines is None:
        folder = stack.enter_context(temporary_folder("launch"))
        return LocalMachines(slots_of(options.processes, folder, own_command(), os.environ)), folder
    key, is_closed = read_key(os.environ), uses_tls(os.environ)
    address = options.listen or LISTEN
    try:
        agents = Agents(read_address(address, "--listen"), key, tell)
    except OSError as error:
        raise ValueError(
            f"--listen {address}: {error.strerror}; use another port, and an address of this "
            "machine or 0.0.0.0"
        ) from error
    place, prefix = (run_dir.parent, f".{run_dir.name}.launch-") if anew else (run_dir, "launch-")
    place.mkdir(parents=True, exist_ok=True)
    shared = tempfile.TemporaryDirectory(prefix=prefix, dir=place)
    host, port = agents.address
    tell(
        f"launch: waits {options.wait:g} s for {options.machines} machines at {host}:{port}; run "
        "jaxtrain agent there"
    )
    if not is_closed:
        tell(
            "launch: JAX's coordination service is open to all who reach the machine of process 0, "
            f"unless the machines name {', '.join(TLS_FILES)} (docs/processes.md)"
        )
    return agents, Path(stack.enter_context(shared))


def _plans(train: argparse.Namespace, count: int) -> dict[str, Any]:
    """Returns the run's layouts on up to `count` machines, as `read_layouts` takes them. A separate
    process computes them, because this one has no JAX. Raises ValueError where there are none."""
    command = own_command(
        "elastic",
        *experiment_arguments(train),
        f"--machines={count}",
        "--json",
        *["--simulate"] * train.simulate,
    )
    completed = subprocess.run(command, stdout=subprocess.PIPE, check=False, text=True)
    if completed.returncode:
        raise ValueError("the run cannot stand on fewer machines, as said above")
    return json.loads(completed.stdout)


def _idle(options: argparse.Namespace) -> list[str]:
    """Returns violations for options that would have no effect."""
    several = {
        "--listen": options.listen,
        "--elastic": options.elastic,
        "--wait": options.wait != WAIT_S,
        "--rejoin": options.rejoin != REJOIN_S,
    }
    violations = job_violations(options)
    if not options.scheduler:
        if options.machines is None:
            violations += [
                f"{flag} is for --machines; leave it out" for flag, on in several.items() if on
            ]
        elif several["--rejoin"] and not options.elastic:
            violations.append("--rejoin is for --elastic; add it, or leave --rejoin out")
        return violations
    watched = {
        **several,
        "--restarts": options.restarts != Restarts.most,
        "--within": options.within != Restarts.within_s,
        "--fault": options.faults,
        **{
            f"--deadline-{field.name.replace('_', '-')}":
            getattr(options, f"deadline_{field.name}") != field.default
            for field in fields(Deadlines)
        },
    }  # fmt: skip
    violations += [
        f"{flag} is for --processes and --machines; leave it out"
        for flag, on in watched.items()
        if on
    ]
    return violations


def _refuse(train: argparse.Namespace, processes: int) -> None:
    """Raises ValueError for a run that cannot start, before any process is started."""
    if processes < 1:
        raise ValueError(f"{processes} processes or machines; use 1 or more")
    spec = mesh_of(train)
    if spec.devices % processes:
        raise ValueError(
            f"{spec.where} has {spec.devices} devices, of which {processes} processes cannot have "
            f"as many each; use a number of them that divides {spec.devices}, or another --mesh"
        )


def _teller() -> Tell:
    """Returns a function that prints lines from several threads without mixing them."""
    lock = threading.Lock()

    def tell(text: str) -> None:
        with lock:
            try:
                print(text, flush=True)
            except OSError:  # the reader has gone; the run continues
                sys.stdout = open("/dev/null", "w")  # noqa: SIM115 (for the rest of the process)

    return tell
