"""What schedulers are given: read by their own languages, for every mesh that comes along."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from jaxtrain import cli
from jaxtrain.cli import submit
from jaxtrain.fault_tolerance.schedulers import (
    ACCELERATORS,
    Job,
    job_name,
    kubernetes,
    ray,
    slurm,
)
from jaxtrain.mesh.hardware import CHIPS
from jaxtrain.mesh.mesh import load_mesh

MESHES = {"h100_64": (8, 8), "v5p_512": (128, 4), "cpu_8": (1, 8)}
"""Mesh -> hosts, and devices of each."""

COMMAND = ["train", "experiments/my run.py", "--mesh", "MESH", "--set", "optimizer=SGD(0.1)"]


def job(mesh: str) -> Job:
    file = "experiments/my run.py"
    return Job(job_name(file), load_mesh(mesh), COMMAND, Path("/runs/mine"), experiment=file)


@pytest.mark.parametrize("mesh", MESHES)
def test_a_slurm_script_starts_one_process_on_each_host(mesh: str, tmp_path: Path) -> None:
    """Its last lines in a shell, with `srun` played: what is requeued, and how often."""
    hosts, devices = MESHES[mesh]
    text = slurm(job(mesh))
    assert f"#SBATCH --nodes={hosts}\n" in text and "#SBATCH --ntasks-per-node=1\n" in text
    assert (f"--gpus-per-node={devices}" in text) == (mesh == "h100_64")
    assert ("JAX_LOCAL_DEVICE_IDS=0,1,2,3,4,5,6,7\n" in text) == (mesh == "h100_64")
    said = tmp_path / "said"
    for name, body in {
        "srun": f'printf "%s\\n" "$@" > {said}; exit $CODE',
        "scontrol": f'echo "$@" >> {said}',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    for code, restarts, requeued in (
        (0, 0, False), (2, 0, False), (75, 0, True), (1, 9, True), (1, 10, False),
    ):  # fmt: skip
        ran = subprocess.run(
            ["bash", "-c", text],
            env={
                "PATH": f"{tmp_path}:/usr/bin:/bin", "CODE": str(code), "SLURM_JOB_ID": "7",
                "SLURM_RESTART_COUNT": str(restarts),
            },
            check=False,
        )  # fmt: skip
        assert ran.returncode == code
        lines = said.read_text().splitlines()
        assert lines[:9] == ["--kill-on-bad-exit=1", "--cpu-bind=none", "jaxtrain", *COMMAND]
        assert (lines[9:] == ["requeue 7"]) == requeued, (code, restarts)


def test_a_slurm_script_has_the_options_and_the_setup_of_a_cluster(tmp_path: Path) -> None:
    """Options stand before the first command, where sbatch reads them; setup acts on processes."""
    options = ("--qos=high", "--constraint=h100&nvme", "-x bad[1-3]")
    setup = ("export MODULE=loaded", "cd .")
    text = slurm(replace(job("h100_64"), sbatch=options, setup=setup))
    lines = text.splitlines()
    commands = [n for n, line in enumerate(lines) if line and not line.startswith("#")]
    for option in options:
        assert lines.index(f"#SBATCH {option}") < commands[0]
    srun = tmp_path / "srun"
    srun.write_text('#!/bin/bash\nprintf "%s\\n" "$MODULE" "$@"\n')
    srun.chmod(0o755)

    def run(text: str) -> subprocess.CompletedProcess[str]:
        path = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
        return subprocess.run(
            ["bash", "-c", text], env=path, capture_output=True, text=True, check=False
        )

    here, away = Path.cwd(), tmp_path / "away" / "run"
    in_container = ["--container-image=me/mine:1", f"--container-workdir={here}"]
    for run_dir, mounts in (
        (Path("/dev/null/run"), ""),
        (away, f"{here}:{here},{away}:{away}"),
        (here / "runs", f"{here}:{here}"),
    ):
        image = "me/mine:1" if mounts else ""
        made = replace(job("h100_64"), setup=setup, image=image, run_dir=run_dir)
        words = [f"--container-mounts={mounts}", *in_container] if mounts else []
        done = run(slurm(made).replace(f"mkdir -p {here}", "true"))
        lines = done.stdout.splitlines()
        assert done.returncode == 0 and lines[-len(COMMAND) - 1 :] == ["jaxtrain", *COMMAND]
        first = ["loaded", "--kill-on-bad-exit=1", "--cpu-bind=none"]
        assert lines[:3] == first and sorted(lines[3 : -len(COMMAND) - 1]) == sorted(words)
    assert away.is_dir(), "a mount must be there"
    failed = run(slurm(replace(job("h100_64"), setup=("true; false",))))
    assert failed.returncode == 2 and not failed.stdout, "it is not begun, nor begun again"
    with pytest.raises(ValueError, match="pyxis splits mounts"):
        slurm(replace(made, run_dir=Path("/a,b")))


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--nodes=2", "the mesh and the launch say that"),
        ("-N2", "the mesh and the launch say that"),
        ("-n 4", "the mesh and the launch say that"),
        ("--gpus-per-node 4", "the mesh and the launch say that"),
        ("--signal=KILL@9", "the mesh and the launch say that"),
        ("--node=4", "the mesh and the launch say that"),
        ("--array=0-3", "the mesh and the launch say that"),
        ("--no-requeue", "the mesh and the launch say that"),
        ("-G4", "the mesh and the launch say that"),
        ("qos=high", "use an option of sbatch"),
        ("-", "use an option of sbatch"),
        ("--qos=a\nrm -r x", "use an option of sbatch"),
    ],
)
def test_options_that_a_slurm_script_cannot_have_are_refused(option: str, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        slurm(replace(job("h100_64"), sbatch=("--qos=high", option)))


@pytest.mark.parametrize("mesh", MESHES)
def test_a_jobset_has_an_indexed_job_of_one_pod_a_host(mesh: str) -> None:
    hosts, _ = MESHES[mesh]
    found = json.loads(kubernetes(job(mesh)))
    assert re.fullmatch(r"[a-z0-9-]+", found["metadata"]["name"]) and found["kind"] == "JobSet"
    (workers,) = found["spec"]["replicatedJobs"]
    spec = workers["template"]["spec"]
    assert spec["parallelism"] == spec["completions"] == hosts
    assert spec["completionMode"] == "Indexed"
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    said = container["command"]
    assert said[: len(COMMAND) + 1] == ["jaxtrain", *COMMAND]
    flags = dict(zip(said[-6::2], said[-5::2], strict=True))
    assert flags == {
        "--coordinator": "my-run-workers-0-0.my-run:8476",
        "--processes": str(hosts),
        "--process": "$(JOB_COMPLETION_INDEX)",
    }
    mounts = {each["mountPath"]: each for each in container["volumeMounts"]}
    environ = {each["name"]: each["value"] for each in container["env"]}
    cache = mounts[environ["JAXTRAIN_CACHE"]]
    assert cache["name"] == mounts["/runs/mine"]["name"] == "run"
    assert cache["subPath"] != mounts["/runs/mine"]["subPath"] == "runs/mine"
    assert environ["HOME"] == "/tmp"
    (place,) = (v for k, v in found["metadata"]["annotations"].items() if "jaxtrain" in k)
    assert place == "experiments/my run.py of the image"
    assert pod["securityContext"] == {"fsGroup": 1000}
    of_memory = {"name": "shm", "emptyDir": {"medium": "Memory"}}
    assert (of_memory in pod["volumes"]) == (mesh == "h100_64")
    assert {each["name"] for each in pod["volumes"]} == {
        each["name"] for each in container["volumeMounts"]
    }
    wanted = {"h100_64": {"nvidia.com/gpu": 8}, "v5p_512": {"google.com/tpu": 4}}.get(mesh)
    assert container.get("resources", {}).get("limits") == wanted
    nodes = {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v5p-slice",
        "cloud.google.com/gke-tpu-topology": "8x8x8",
    }
    assert pod.get("nodeSelector") == (nodes if mesh == "v5p_512" else None)


def test_a_jobset_does_not_begin_again_what_was_refused() -> None:
    """A pod that leaves with 2 fails its job by the pod failure policy, and that fails the set."""
    spec = json.loads(kubernetes(job("h100_64")))["spec"]
    workers = spec["replicatedJobs"][0]["template"]["spec"]
    (rule,) = workers["podFailurePolicy"]["rules"]
    (container,) = workers["template"]["spec"]["containers"]
    assert workers["template"]["spec"]["restartPolicy"] == "Never", "which the policy wants"
    assert rule["action"] == "FailJob"
    assert rule["onExitCodes"] == {
        "containerName": container["name"], "operator": "In", "values": [2],
    }  # fmt: skip
    (never,) = spec["failurePolicy"]["rules"]
    assert (never["action"], never["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
    assert workers["backoffLimit"] == 0 and spec["failurePolicy"]["maxRestarts"] == 10


def test_what_no_jobset_can_hold_is_refused() -> None:
    spec = load_mesh("v5p_512")
    slices = replace(spec, devices=1024, axes=(("replica", 2), *spec.axes))
    with pytest.raises(ValueError) as caught:
        kubernetes(replace(job("v5p_512"), spec=slices, run_dir=Path("runs/a")))
    assert "has 2 slices of 8x8x8" in str(caught.value)
    assert "--run-dir runs/a: a pod has the volume of --claim there" in str(caught.value)


def test_names_are_those_of_pods() -> None:
    names = [job_name(f"{name}.py") for name in ("gpt2_124m", "3B run", "_", "a" * 60 + "_b")]
    assert names == ["gpt2-124m", "run-3b-run", "run", "a" * 40]


def test_every_tpu_has_a_label_of_its_nodes() -> None:
    assert set(ACCELERATORS) == {name for name, chip in CHIPS.items() if chip.platform == "tpu"}


@pytest.mark.parametrize("mesh", MESHES)
def test_a_ray_script_is_python(mesh: str) -> None:
    hosts, _ = MESHES[mesh]
    text = ray(job(mesh))
    ast.parse(text)
    assert f"HOSTS, COMMAND = {hosts}, {['jaxtrain', *COMMAND]}\n" in text
    assert f"FOLDER = {str(Path.cwd())!r} " in text
    takes, bundle = {
        "h100_64": ("num_cpus=0, num_gpus=8", {"GPU": 8}),
        "v5p_512": ("num_cpus=0, resources={'TPU': 4}", {"TPU": 4}),
    }.get(mesh, ("num_cpus=1", {"CPU": 1}))
    assert f"@ray.remote({takes})\n" in text
    assert f"placement_group([{bundle}] * HOSTS" in text


PLAYED = '''
"""Actors that run where they are called."""
class Handle:
    def __init__(self, made): self.made = made
    def __getattr__(self, name): return Call(getattr(self.made, name))
class Call:
    def __init__(self, act, *args): self.act, self.args = act, args
    def remote(self, *args): return Call(self.act, *args)
class exceptions:
    class RayError(Exception): pass
class Group:
    wait = staticmethod(lambda seconds: True)
class PlacementGroupSchedulingStrategy:
    def __init__(self, group, number): pass
def remote(**takes):
    assert set(takes) <= {"num_cpus", "num_gpus", "resources"}
    def decorate(of):
        of.remote = classmethod(lambda cls: Handle(cls()))
        of.options = classmethod(lambda cls, scheduling_strategy: cls)
        return of
    return decorate
def placement_group(bundles, strategy): return Group()
def get(call): return call.act(*call.args)
def wait(calls): return calls[:1], calls[1:]
def init(): pass
def kill(handle): pass
def get_node_ip_address(): return "127.0.0.1"
'''


@pytest.mark.parametrize(
    ("codes", "code", "attempts"),
    [
        ([[0, 0]], 0, 1),
        ([[0, 75]], 75, 1),
        ([[2]], 2, 1),
        ([[0, 2]], 2, 1),
        ([[1], [0, -9], [0, 0]], 0, 3),
        ([[1]] * 11, 69, 11),
    ],
)
def test_a_ray_script_begins_again_where_it_helps(
    codes, code: int, attempts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With Ray played: a failure ends all, and they begin again ten times at most; what was
    refused, or has saved and left, does not."""
    spec = replace(load_mesh("cpu_8"), devices_per_host=4)
    text = ray(Job("e", spec, ["train", "e.py"], Path("runs/e")))
    given = iter([each for attempt in codes for each in attempt])
    asked = []

    def run(command, cwd, env):
        asked.append((command, env["JAXTRAIN_SUPERVISOR"]))
        return SimpleNamespace(returncode=next(given))

    played = ModuleType("ray")
    exec(PLAYED, played.__dict__)
    played.util = played  # type: ignore[attr-defined]
    for name in ("", ".util", ".util.placement_group", ".util.scheduling_strategies"):
        monkeypatch.setitem(sys.modules, f"ray{name}", played)
    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(SystemExit) as ended:
        exec(text, {"__name__": "script"})
    assert ended.value.code == code and not list(given)
    assert len([command for command, _ in asked if command[-1] == "0"]) == attempts
    command, parent = asked[0]
    assert command[:3] == ["jaxtrain", "train", "e.py"] and parent == str(os.getpid())
    assert command[-4:] == ["--processes", "2", "--process", "0"]


def test_what_is_submitted_is_a_file_that_the_scheduler_can_read(tmp_path, monkeypatch) -> None:
    """Ray copies the folder of it to where it runs."""
    said = tmp_path / "said"
    for name in ("sbatch", "kubectl", "ray"):
        into = 'while [ $# -gt 1 ]; do [ "$1" = --working-dir ] && cd "$2"; shift; done'
        (tmp_path / name).write_text(f'#!/bin/bash\n{into}\ncat "$1" > {said}\n')
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    train = ["--", "train", "experiments/stdlib_lm.py", "--mesh", "h100_64", "--run-dir", "/r/a"]
    for flag, sign in (("slurm", "#!/bin/bash"), ("k8s", '"JobSet"'), ("ray", "ray.init()")):
        extra = ["--image", "a", "--claim", "b"] if flag == "k8s" else []
        assert cli.main(["launch", f"--{flag}", "--unchecked", *extra, *train]) == 0
        assert sign in said.read_text()


def test_the_command_prints_what_it_would_submit(capsys: pytest.CaptureFixture[str]) -> None:
    train = ["--", "train", "experiments/stdlib_lm.py", "--mesh", "h100_64", "--run-dir", "/r/a"]
    for flag, sign in (("slurm", "#!/bin/bash"), ("k8s", '"JobSet"'), ("ray", "ray.init()")):
        extra = ["--image", "me/mine:1", "--claim", "ours"] if flag == "k8s" else []
        assert cli.main(["launch", f"--{flag}", "--dry-run", "--unchecked", *extra, *train]) == 0
        said = capsys.readouterr().out
        assert sign in said and "experiments/stdlib_lm.py" in said
        assert ("me/mine:1" in said) == ('"claimName": "ours"' in said) == (flag == "k8s")


def test_options_that_a_scheduler_has_no_use_for_are_refused(capsys) -> None:
    train = ["--", "train", "experiments/stdlib_lm.py", "--mesh", "h100_64", "--run-dir", "/r/a"]
    flags = ["--restarts=3", "--fault=kill@3", "--deadline-step=5", "--claim=b"]
    assert cli.main(["launch", "--slurm", *flags, *train]) == cli.REFUSED
    said = capsys.readouterr().err
    assert all(flag.partition("=")[0] in said for flag in flags)
    flags = ["--image=a", "--partition=a", "--account=b", "--time=3", "--sbatch=-x a", "--setup=b"]
    assert cli.main(["launch", "--ray", *flags, *train]) == cli.REFUSED
    said = capsys.readouterr().err
    assert all(f"{flag.partition('=')[0]} is for --" in said for flag in flags)
    flags += ["--dry-run", "--unchecked", "--claim=b"]
    assert cli.main(["launch", "--processes=8", *flags, *train]) == cli.REFUSED
    said = capsys.readouterr().err
    assert all(f"{flag.partition('=')[0]} is for a scheduler" in said for flag in flags)
    pods = ["launch", "--k8s", "--dry-run", "--image=a", *train[:-1], "s3://bucket/run"]
    assert cli.main(pods) == cli.REFUSED
    assert "s3://bucket/run: jobs of --k8s have runs on the volume" in capsys.readouterr().err
    assert cli.main(["launch", "--k8s", *train]) == cli.REFUSED
    said = capsys.readouterr().err
    assert "--image, which has jaxtrain in it" in said and "the --claim of a volume" in said


def test_a_job_that_repeats_begins_its_run_once(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "e.py").touch()
    train = ["--", "train", "e.py", "--mesh", "h100_64", "--fresh", "--run-dir"]
    texts = []
    for flag in ("--slurm", "--slurm", "--ray"):
        assert cli.main(["launch", flag, "--dry-run", "--unchecked", *train, "runs/a"]) == 0
        said = capsys.readouterr().out
        (text,) = re.findall("--fresh-once[ ',]+([0-9a-f]{16})", said)
        texts.append(text)
    assert len({*texts}) == 3
    flags = ["--dry-run", "--unchecked", "--image=a"]
    assert cli.main(["launch", "--slurm", *flags, *train, "runs/a"]) == 0
    for launched in (["--slurm", *flags, *train, "/r/a"], ["--k8s", *flags, *train, "/r/a"]):
        assert cli.main(["launch", *launched]) == cli.REFUSED
        said = capsys.readouterr().err
        assert "--fresh moves the run that is in /r/a, where the job's containers have" in said
        assert f"or one below {tmp_path}" in said or "--k8s" in launched


def test_a_scheduler_that_is_not_here_is_told(capsys, monkeypatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    train = ["--", "train", "experiments/stdlib_lm.py", "--mesh", "h100_64", "--run-dir", "/r/a"]
    assert cli.main(["launch", "--slurm", "--unchecked", *train]) == cli.REFUSED
    assert "there is no sbatch here; --dry-run prints" in capsys.readouterr().err


def test_what_check_refuses_is_refused_before_a_job_is_written(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By the same settings and mesh; an image's own file cannot be checked here, which is said."""
    asked = []

    def checked(command: list[str], **_: object) -> SimpleNamespace:
        asked.append(command[command.index("check") :])
        return real(command, **_)

    real = subprocess.run
    monkeypatch.setattr(subprocess, "run", checked)
    slurm = ["launch", "--slurm", "--dry-run", "--partition=gpu", "--account=lab", "--time=60"]
    train = ["--", "train", "experiments/stdlib_lm.py", "--mesh", "h100_64"]
    assert cli.main([*slurm, *train, "--set", "batch=3"]) == cli.REFUSED
    said = capfd.readouterr()
    assert "batch=3" in said.err and "no job is written" in said.err and not said.out
    file, settings = "experiments/stdlib_lm.py", ["--set", "batch=64"]
    monkeypatch.setattr(submit, "own_command", lambda *words: ["true", *words])
    assert cli.main([*slurm, "--sbatch=--qos=a", *train, *settings]) == 0
    assert asked[1:] == [["check", file, "--mesh", "h100_64", *settings]]
    given = [line for line in capfd.readouterr().out.splitlines() if line.startswith("#SBATCH")]
    wanted = ("--partition=gpu", "--account=lab", "--time=60", "--qos=a")
    assert given[-4:] == [f"#SBATCH {option}" for option in wanted]
    pods = ["launch", "--k8s", "--dry-run", "--image=a", "--", "train"]
    assert cli.main([*pods, file, "--mesh", "h100_64", "--run-dir", "/a"]) == 0
    assert asked[2:] == [["check", file, "--mesh", "h100_64", "--data-elsewhere"]]
    assert cli.main([*pods, file, "--mesh", "h100_64", "--run-dir", "/a", "--from", "/b@3"]) == 0
    assert asked.pop() == asked[2], "a pod's own run is not here"
    assert cli.main([*slurm, *train, "--from", "runs/b@3"]) == 0
    assert asked.pop() == ["check", file, "--mesh", "h100_64", "--from", "runs/b@3"]
    here = Path.cwd()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "e.py").touch()
    begun = tmp_path / "runs" / "e"
    begun.mkdir(parents=True)
    branch = ["--", "train", "e.py", "--mesh", "h100_64", "--from", "runs/b@3"]
    for config, flags, is_asked in (
        ('{"branch": {}}', [], False), ('{"branch": {}}', ["--fresh"], True), ("{}", [], True),
        ("{", [], True),
    ):  # fmt: skip
        (begun / "config.json").write_text(config)
        assert cli.main([*slurm, *branch, *flags]) == 0
        assert ("--from" in asked.pop()) == is_asked, "one that has begun needs no other run"
    monkeypatch.chdir(here)
    capfd.readouterr()
    assert cli.main([*pods, "none.py", "--mesh", "h100_64", "--run-dir", "/a"]) == 0
    assert "none.py is not here: it is not checked" in capfd.readouterr().err and len(asked) == 3
    monkeypatch.setattr(submit, "own_command", lambda *words: ["false", *words])
    assert cli.main([*slurm, *train]) == cli.REFUSED
    assert "`jaxtrain check` ended by exit code 1 here" in capfd.readouterr().err
