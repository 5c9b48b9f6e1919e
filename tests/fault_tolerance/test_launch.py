"""`jaxtrain launch`: real runs on two processes, with faults on purpose."""

from __future__ import annotations

import json
import math
import re
import shutil
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from process_group import bare_environment

from jaxtrain import cli
from jaxtrain.cli import launch
from jaxtrain.cluster.exit_codes import PREEMPTED
from jaxtrain.cluster.join import TLS_FILES, free_port
from jaxtrain.fault_tolerance.beginning import Beginning

EXPERIMENT = '''
"""A run of a few seconds, with code of its own that it calls."""
import time
import jaxtrain


class Looks(jaxtrain.Callback):
    """A step takes a twentieth of a second at least: signals come between steps."""

    def after_step(self, run, step):
        time.sleep(0.05)


def experiment():
    block = jaxtrain.BlockConfig(
        jaxtrain.AttentionConfig(heads=2, head_dim=4), jaxtrain.MlpConfig(hidden=16)
    )
    return jaxtrain.Experiment(
        model=jaxtrain.DecoderConfig(
            vocab=16, embed=8, layers=1, period=(block,), tied=True, vocab_multiple=16
        ),
        data=jaxtrain.data.BigramChain(vocab=16, seq=8, isolate_documents=True),
        optimizer=jaxtrain.AdamW(1e-2),
        steps=48,
        batch=8,
        evaluation=None,
        checkpoints=jaxtrain.SavePolicy(every=8),
        logging=jaxtrain.Logging(every=1, tensorboard=False, callbacks=(Looks,)),
    )
'''
MESH = 'chip = "cpu"\ndevices = 4\n[axes]\ndata = 2\nfsdp = 2\n'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("launch")
    (found / "experiment.py").write_text(EXPERIMENT)
    (found / "mesh.toml").write_text(MESH)
    return found


def begin(folder: Path, run: str, *flags: str, settings: str = "") -> subprocess.Popen[str]:
    """A launch of two processes, which cannot end but by themselves or a signal."""
    train = ["train", "experiment.py", "--mesh", "mesh.toml", "--run-dir", run]
    train += ["--set", settings] if settings else []
    command = [sys.executable, "-m", "jaxtrain", "launch", "--processes", "2", *flags, "--"]
    return subprocess.Popen(
        [*command, *train],
        cwd=folder,
        env=bare_environment(folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def launched(folder: Path, run: str, *flags: str, settings: str = "") -> tuple[int, str]:
    """Its exit code, and what it said."""
    started = begin(folder, run, *flags, settings=settings)
    said, _ = started.communicate(timeout=900)
    return started.returncode, said


def losses(folder: Path, run: str) -> dict[int, float]:
    lines = (folder / run / "metrics.jsonl").read_text().splitlines()
    return {line["step"]: line["loss"] for line in map(json.loads, lines)}


def failures(folder: Path, run: str) -> list[dict[str, Any]]:
    lines = (folder / run / "failures.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> dict[int, float]:
    code, said = launched(folder, "undisturbed")
    assert code == 0, said
    assert re.search(r"\[0\] \S+ done: 48 steps", said)
    assert "[1]" not in said and "Gloo" not in said
    assert not (folder / "undisturbed" / "failures.jsonl").exists()
    return losses(folder, "undisturbed")


SILENCE = ("--deadline-silence=6", "--deadline-step=7")
FAULTS = {
    "kill@18:1": ("killed", "step", 1),
    "hang@18.load:1": ("hangs", "load", 1),
    "stop@24.save:0": ("silent", "save", 0),
    "stop@29.callback:1": ("silent", "callback", 1),
    "corrupt@34:0": ("killed", "step", 0),
}
"""Fault -> the kind of failure, the phase and the process that are to be named."""
LATER = {32, 40}
RESUMED = dict(
    zip(FAULTS, ({8, 16}, {8, 16}, {8, 16, 24} | LATER, {16, 24} | LATER, {16, 24}), strict=True)
)
"""From which save: the last one, or the one before if that was not whole yet. One that was stopped
is let go on for a moment, for its stacks: it may end a save, or come to a later one. The one that
was corrupted is passed over."""


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.slow
@pytest.mark.sampled(5)
def test_the_run_is_the_same_to_the_bit_after_a_failure(
    fault: str, folder: Path, undisturbed
) -> None:
    code, said = launched(folder, fault, f"--fault={fault}", *SILENCE)
    assert code == 0, said
    (found,) = failures(folder, fault)
    assert (found["kind"], found["phase"], found["process"]) == FAULTS[fault]
    assert found["step"] == int(re.findall(r"\d+", fault)[0])
    (resumed,) = map(int, re.findall(r"resuming at step (\d+)", said))
    assert resumed in RESUMED[fault]
    assert losses(folder, fault) == undisturbed


@pytest.mark.exhaustive
def test_the_run_is_the_same_to_the_bit_whatever_fails(folder: Path, undisturbed) -> None:
    flags = [f"--fault={fault}" for fault in FAULTS]
    code, said = launched(folder, "disturbed", *flags, *SILENCE)
    assert code == 0, said
    found = failures(folder, "disturbed")
    assert [(each["kind"], each["phase"], each["process"]) for each in found] == [*FAULTS.values()]
    for fault, each in zip(FAULTS, found, strict=True):
        assert each["step"] == int(re.findall(r"\d+", fault)[0]), fault
    resumed = [int(step) for step in re.findall(r"resuming at step (\d+)", said)]
    assert len(resumed) == len(FAULTS)
    for at, fault in zip(resumed, FAULTS, strict=True):
        assert at in RESUMED[fault], "since the last whole save but one at most"
    assert losses(folder, "disturbed") == undisturbed


@pytest.mark.exhaustive
def test_a_signal_to_one_process_stops_all_at_the_same_step(folder: Path, undisturbed) -> None:
    code, said = launched(folder, "stopped", "--fault=terminate@20:1")
    assert code == PREEMPTED, said
    (step,) = re.findall(r"stopped; step (\d+) is saved", said)
    assert 20 < int(step) < 48 and "[1] stopping after this step" in said
    assert not (folder / "stopped" / "failures.jsonl").exists()
    code, said = launched(folder, "stopped")
    assert code == 0 and f"resuming at step {step}" in said
    assert losses(folder, "stopped") == undisturbed


@pytest.mark.exhaustive
def test_a_spike_is_skipped_by_all_whoever_is_killed_meanwhile(folder: Path) -> None:
    """Before it is seen, and after the run has gone back and saved."""
    policy = "LossSpikes(above=20.0, least=0.2, window=8, patience=2, back=2, skip_more=1)"
    settings = f"execution.health=Health(replicas=8, replay=8, spikes={policy})"
    faults = [f"--fault={each}" for each in ("spike@27", "kill@29:1", "kill@34:0")]
    code, said = launched(folder, "spike", *faults, settings=settings)
    assert code == 0, said
    assert "to take steps 25 to 29 once more" in said and "skip_batches=((24, 6),)" in said
    settings = "execution.health.skip_batches=((24, 6),)"
    code, quiet = launched(folder, "told", "--fault=spike@27", settings=settings)
    assert code == 0 and "SPIKE" not in quiet, quiet
    assert losses(folder, "spike") == losses(folder, "told") and max(losses(folder, "told")) == 48
    assert len(failures(folder, "spike")) == 2


@pytest.mark.exhaustive
def test_a_crash_that_comes_again_stops_after_two_tries(folder: Path) -> None:
    code, said = launched(folder, "crashes", "--fault=crash@12:1")
    assert code == 70, said
    assert said.count("[1] RuntimeError: the fault crash@12.step:1") == 2
    assert [each["step"] for each in failures(folder, "crashes")] == [12, 12]


@pytest.mark.exhaustive
def test_a_slow_process_is_named_within_20_steps(folder: Path, undisturbed) -> None:
    code, said = launched(folder, "slow", "--fault=slow@12:1")
    assert code == 0, said
    (step,) = re.findall(r"NOTE step (\d+): process 1 is slow", said)
    assert 12 < int(step) <= 32 and "process 0 is slow" not in said
    assert losses(folder, "slow") == undisturbed
    lines = map(json.loads, (folder / "slow" / "metrics.jsonl").read_text().splitlines())
    known = [each for each in lines if "slowest_process" in each]
    assert any(each["slowest_process"] == 1 for each in known)
    of_each = [each["process_own_s"] for each in known if "process_own_s" in each]
    assert 0 < len(of_each) < len(known) and any(second > 0.25 > first for first, second in of_each)


@pytest.mark.slow
def test_ctrl_c_saves_on_all(folder: Path) -> None:
    started = begin(folder, "interrupted")
    assert started.stdout is not None
    said = ""
    while "step 12/48" not in said:
        said += started.stdout.readline()
    started.send_signal(signal.SIGINT)
    said += started.communicate(timeout=300)[0]
    assert started.returncode == PREEMPTED, said
    assert re.search(r"\[0\] \S+ stopped; step \d+ is saved", said)


@pytest.mark.slow
def test_a_run_goes_on_without_a_machine_that_is_lost(folder: Path, undisturbed) -> None:
    """Two agents; one is gone for good after step 20. The first start begins anew, and keeps the
    run that is there."""
    shutil.copytree(folder / "undisturbed", folder / "fewer")
    port = free_port()
    environ = bare_environment(folder) | {"JAXTRAIN_KEY": "0123456789abcdef"}
    own = [sys.executable, "-m", "jaxtrain"]
    agents = [
        subprocess.Popen([*own, "agent", f"127.0.0.1:{port}", "--name", name], env=environ)
        for name in ("one", "two")
    ]
    flags = ["--machines=2", "--elastic", f"--listen=127.0.0.1:{port}", "--fault=lose@20:1"]
    flags += ["--fault=clean@12:0"]  # the folder that all share
    flags += ["--rejoin=1"]  # it is gone for good
    train = ["train", "experiment.py", "--mesh", "mesh.toml", "--run-dir", "fewer", "--fresh"]
    done = subprocess.run(
        [*own, "launch", *flags, "--", *train],
        cwd=folder, env=environ, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    said = done.stdout
    assert done.returncode == 0, said
    assert sorted(agent.wait(120) for agent in agents) == [-signal.SIGKILL, 0]
    (failure,) = failures(folder, "fewer")
    assert (failure["kind"], failure["process"]) == ("lost", 1)
    assert 5 < failure["step"] <= 20, "as its agent told it last, half a second before"
    assert "on 1 machines, of 2 wanted and 1 here: data=1 x fsdp=2, microbatches=2" in said
    (resumed,) = map(int, re.findall(r"resuming at step (\d+)", said))
    assert resumed in (8, 16)
    assert said.count(" the run that was in fewer is kept in fewer.1") == 1
    assert losses(folder, "fewer.1") == undisturbed
    assert {p.name for p in folder.glob("*fewer*")} == {"fewer", "fewer.1"}
    found = losses(folder, "fewer")
    assert found == pytest.approx(undisturbed, rel=1e-5)
    assert {k: v for k, v in found.items() if k <= resumed} == {
        k: v for k, v in undisturbed.items() if k <= resumed
    }


REFUSED = {
    "nothing": ([], "launch runs `train`, and was given nothing"),
    "another command": (["check", "e.py"], "launch runs `train`, and was given check e.py"),
    "a place": (["train", "e.py", "--process", "1"], "launch tells its processes where they meet"),
    "devices": (
        ["train", "e.py", "--mesh", "cpu_8"], "cpu_8 has 8 devices, of which 3 processes cannot"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_launched_is_refused_before_anything_starts(name: str, capsys) -> None:
    command, said = REFUSED[name]
    assert cli.main(["launch", "--processes", "3", "--", *command]) == cli.REFUSED
    assert said in capsys.readouterr().err


def test_each_start_of_a_launch_knows_which_run_it_began() -> None:
    train = ["train", "e.py", "--set", "name=--fresh"]

    def commands(*flags: str) -> list[str]:
        command = [*train, *flags]
        options = cli._parser().parse_args(command)
        given = launch._for_starts(command, options)
        assert cli._parser().parse_args(given).fresh_once == options.fresh_once
        return given

    assert commands() == train and commands("--fresh-once", "a") == [*train, "--fresh-once", "a"]
    first, second = commands("--fresh"), commands("--fresh")
    assert first[:-1] == second[:-1] == [*train, "--fresh", "--fresh-once"]
    assert first[-1] != second[-1] and len(first[-1]) == 16
    both = ("--fresh", "--fresh-once", "a")
    assert commands(*both) == [*train, *both]
    with pytest.raises(ValueError, match="and --numbered would take another directory each time"):
        commands("--numbered")


def test_wrong_rules_are_refused(capsys) -> None:
    train = ["--", "train", "e.py", "--mesh", "cpu_8"]
    for flags, said in (
        (["--restarts=-1"], "most=-1"),
        (["--deadline-step=0"], "step=0.0 must be a finite number above 0"),
        (["--fault=kil@3"], "did you mean 'kill'?"),
        (["--fault=kill@3:2"], "kill@3.step:2 is of no process; there are 0 to 1"),
        (["--dry-run"], "--dry-run is for a scheduler"),
        (["--listen=a:1"], "--listen is for --machines"),
        (["--fault=lose@3"], "lose@3.step:0 is of a machine's agent; use --machines"),
        (["--rejoin=3"], "--rejoin is for --machines"),
        (["--wait=-1"], "--wait=-1; use a number of seconds"),
        (["--rejoin=nan"], "--rejoin=nan; use a number of seconds"),
    ):
        assert cli.main(["launch", "--processes=2", *flags, *train]) == cli.REFUSED
        assert said in capsys.readouterr().err


def test_a_launch_over_machines_wants_a_key_and_an_address(capsys, monkeypatch) -> None:
    train = ["--", "train", "e.py", "--mesh", "cpu_8"]
    monkeypatch.delenv("JAXTRAIN_KEY", raising=False)
    for command in (["launch", "--machines=2", *train], ["agent", "node0:7000"]):
        assert cli.main(command) == cli.REFUSED
        assert "JAXTRAIN_KEY has 0 characters" in capsys.readouterr().err
    monkeypatch.setenv("JAXTRAIN_KEY", "0123456789abcdef")
    for command in (["launch", "--machines=2", "--listen=7000", *train], ["agent", "node0"]):
        assert cli.main(command) == cli.REFUSED
        assert "use HOST:PORT, such as node0:7000" in capsys.readouterr().err
    assert cli.main(["launch", "--slurm", "--elastic", *train]) == cli.REFUSED
    assert "--elastic is for --processes and --machines" in capsys.readouterr().err


def test_how_long_a_lost_machine_is_waited_for_is_said(capsys, monkeypatch) -> None:
    monkeypatch.setenv("JAXTRAIN_KEY", "0123456789abcdef")
    train = ["--", "train", "e.py", "--mesh", "cpu_8"]
    assert cli.main(["launch", "--machines=2", "--rejoin=30", *train]) == cli.REFUSED
    assert "--rejoin is for --elastic" in capsys.readouterr().err
    assert cli.main(["agent", "node0:7000", "--wait=nan"]) == cli.REFUSED
    assert "--wait=nan; use a number of seconds" in capsys.readouterr().err
    given = []

    def roster(machines, layouts, wait_s, tell, rejoin_s):
        given.append((wait_s, rejoin_s))
        raise ValueError("enough is known")

    monkeypatch.setattr(launch, "Roster", roster)
    monkeypatch.setattr(launch, "_plans", lambda *_: None)
    monkeypatch.setattr(launch, "_machines", lambda *_, **__: (None, None))
    for flags in ([], ["--elastic", "--rejoin=30", "--wait=inf"]):
        assert cli.main(["launch", "--machines=2", *flags, *train]) == cli.REFUSED
    assert given == [(300, 10), (math.inf, 30)]


def test_a_launch_over_machines_says_that_others_could_take_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAXTRAIN_KEY", "0123456789abcdef")
    options = SimpleNamespace(machines=2, wait=300, listen=f"127.0.0.1:{free_port()}")
    for path, is_open in (("", True), (__file__, False)):
        told: list[str] = []
        for name in TLS_FILES:
            monkeypatch.setenv(name, path)
        with ExitStack() as stack:
            agents, _ = launch._machines(options, tmp_path, told.append, stack, anew=False)  # type: ignore[arg-type]
            agents.close(0)
        assert any("is open to all" in line for line in told) == is_open


def test_a_launch_that_begins_anew_says_so_and_keeps_its_files_beside_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the directory they would be moved with the run that is there."""
    monkeypatch.setenv("JAXTRAIN_KEY", "0123456789abcdef")
    monkeypatch.chdir(tmp_path)
    seen: list[tuple[Path, Path, Beginning]] = []

    def supervisor(command, roster, tell, run_dir, folder, *, beginning, **_):
        text = command[-1] if "--fresh" in command else beginning.text
        assert beginning.text == text
        seen.append((run_dir, folder, beginning))
        raise ValueError("enough is known")

    monkeypatch.setattr(launch, "Supervisor", supervisor)
    train = ["train", "e.py", "--mesh", "cpu_8", "--run-dir", "runs/a"]
    for more in ([], ["--fresh"], ["--fresh-once", "a"]):
        flags = ["--machines=2", f"--listen=127.0.0.1:{free_port()}"]
        assert cli.main(["launch", *flags, "--", *train, *more]) == cli.REFUSED
        assert Path("runs/a").exists() == (not more)
        shutil.rmtree("runs")
    nothing, anew, once = (beginning for *_, beginning in seen)
    assert (nothing, anew.again, once) == (Beginning(), True, Beginning("a"))
    runs = tmp_path / "runs"
    assert [folder.parent for _, folder, _ in seen] == [runs / "a", runs, runs]
    assert all(folder.name.startswith(".a.launch-") for _, folder, _ in seen[1:])


@pytest.mark.parametrize("how", [["--processes=2"], ["--slurm", "--dry-run"]])
def test_an_experiment_that_is_not_there_is_refused_at_once(how: list[str], capsys) -> None:
    train = ["--", "train", "e.py", "--mesh", "h100_64" if "--slurm" in how else "cpu_8"]
    assert cli.main(["launch", *how, *train]) == cli.REFUSED
    assert "there is no experiment file e.py" in capsys.readouterr().err


def test_a_supervisor_needs_no_jax() -> None:
    """It is there before the processes are, and takes no device or memory from them."""
    script = "import sys, jaxtrain.cli; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
