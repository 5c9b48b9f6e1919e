"""What schedulers are given: read by their own languages, for every mesh that comes along."""

from __future__ import annotations

import ast
import json
import re
import subprocess
from pathlib import Path

import pytest

from jaxtrain import cli
from jaxtrain.fault_tolerance.schedulers import job_of, kubernetes, ray, slurm
from jaxtrain.mesh.mesh import load_mesh

MESHES = {"h100_64": (8, 8), "v5p_512": (128, 4), "cpu_8": (1, 8)}
"""Mesh -> hosts, and devices of each."""

COMMAND = ["train", "experiments/my run.py", "--mesh", "MESH", "--set", "optimizer=SGD(0.1)"]


def job(mesh: str):
    return job_of("experiments/my run.py", load_mesh(mesh), COMMAND, None)


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
        assert lines[:8] == ["--kill-on-bad-exit=1", "jaxtrain", *COMMAND]
        assert (lines[8:] == ["requeue 7"]) == requeued, (code, restarts)


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
    wanted = {"h100_64": {"nvidia.com/gpu": 8}, "v5p_512": {"google.com/tpu": 4}}.get(mesh)
    assert container.get("resources", {}).get("limits") == wanted
    assert ("nodeSelector" in pod) == (mesh == "v5p_512")


@pytest.mark.parametrize("mesh", MESHES)
def test_a_ray_script_is_python(mesh: str) -> None:
    hosts, _ = MESHES[mesh]
    text = ray(job(mesh))
    ast.parse(text)
    assert f"HOSTS, COMMAND = {hosts}, {['jaxtrain', *COMMAND]}\n" in text
    assert ("'GPU': 8" in text) == (mesh == "h100_64")


def test_the_command_prints_what_it_would_submit(capsys: pytest.CaptureFixture[str]) -> None:
    train = ["--", "train", "experiments/stdlib_lm.py", "--mesh", "h100_64"]
    for flag, sign in (("slurm", "#!/bin/bash"), ("k8s", '"JobSet"'), ("ray", "ray.init()")):
        image = ["--image", "me/mine:1"] if flag == "k8s" else []
        assert cli.main(["launch", f"--{flag}", "--dry-run", *image, *train]) == 0
        said = capsys.readouterr().out
        assert sign in said and "experiments/stdlib_lm.py" in said
        assert ("me/mine:1" in said) == (flag == "k8s")


def test_options_that_a_scheduler_has_no_use_for_are_refused(capsys) -> None:
    train = ["--", "train", "experiments/stdlib_lm.py", "--mesh", "h100_64"]
    flags = ["--restarts=3", "--fault=kill@3", "--deadline-step=5", "--image=a"]
    assert cli.main(["launch", "--slurm", *flags, *train]) == cli.REFUSED
    said = capsys.readouterr().err
    assert all(flag.partition("=")[0] in said for flag in flags)
    assert cli.main(["launch", "--k8s", *train]) == cli.REFUSED
    assert "--image, which has jaxtrain in it" in capsys.readouterr().err


def test_a_scheduler_that_is_not_here_is_told(capsys, monkeypatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    train = ["--", "train", "experiments/stdlib_lm.py", "--mesh", "h100_64"]
    assert cli.main(["launch", "--slurm", *train]) == cli.REFUSED
    assert "there is no sbatch here; --dry-run prints" in capsys.readouterr().err
