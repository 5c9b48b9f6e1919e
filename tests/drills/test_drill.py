"""What a drill makes of what was written down; and drills, by hand."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from jaxtrain import cli
from jaxtrain.drills import drill as drilling
from jaxtrain.drills.apart import isolated_runs
from jaxtrain.drills.drill import Drill, drilled
from jaxtrain.drills.happened import Happened, resumed_s
from jaxtrain.drills.plan import APART, FIRST, SAVES, SPIKES, kinds, listed, skipped
from jaxtrain.fault_tolerance.faults import KINDS, Fault
from jaxtrain.fault_tolerance.ledger import Entry, Ledger, add_entry
from jaxtrain.fault_tolerance.supervisor import FAILURES
from jaxtrain.run.rollback import good_step
from jaxtrain.run.watch import LossWatch
from jaxtrain.session.skips import Skips

ROOT = Path(__file__).parents[2]
STDLIB = str(ROOT / "experiments" / "stdlib_lm.py")


def test_every_kind_of_fault_is_drilled() -> None:
    """But those of which a run shows nothing, or that end it; a machine is lost in another run."""
    for processes in (2, 4):
        faults = kinds(processes)
        of_their_own = [fault for each in isolated_runs(processes) for fault in each.faults]
        drilled_kinds = {fault.kind for fault in [*faults, *of_their_own]}
        assert drilled_kinds == set(KINDS) - {"slow", "crash", "lose"}
        listing = listed(processes)
        every = {fault.kind for faults in listing.runs.values() for fault in faults}
        assert every == set(KINDS) - {"slow"} and listing.runs["disturbed"] == tuple(faults)
        assert {
            each.run: each.faults for each in isolated_runs(processes)
        }.items() <= listing.runs.items()
        assert max(fault.process for fault in faults) == processes - 1
        assert [fault.step for fault in faults] == [FIRST + APART * n for n in range(len(faults))]
        assert drilled(STDLIB, processes).steps > faults[-1].step + SAVES


def test_a_run_is_resumed_when_a_start_has_done_all_that_comes_before_its_first_step() -> None:
    phases = {"start": 1.0, "join": 2.0, "open": 4.0, "compile": 8.0, "restore": 16.0, "step": 99.0}
    assert resumed_s(90.0, Entry(100.0, 300.0, phases)) == 10.0 + 31.0


def test_what_a_spike_costs_is_what_the_rule_says() -> None:
    """By the run's own rules, of a batch that a save is just too new for, and of every other."""
    policy = SPIKES
    for step in range(30, 60):
        spike = Fault("spike", step)
        losses = [2.0] * step + [9.0] * policy.patience
        watch = LossWatch(policy)
        for at, loss in enumerate(losses, 1):
            watch.add(at, loss)
        assert watch.since is not None and watch.seen is not None
        saved = [at for at in range(SAVES, step + 1, SAVES)][-3:]
        good = good_step(saved, watch.since, policy.back)
        assert good is not None
        assert skipped(spike) == Skips().back_to(good, watch.seen, policy.skip_more).detected[0]
        assert good <= step < good + skipped(spike)[1], "the batch is among them"


def test_a_drill_of_one_process_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="processes=1; use 2 or more"):
        drilling.drill(STDLIB, processes=1, folder=tmp_path, tell=print)
    assert not list(tmp_path.iterdir())


@pytest.fixture
def written(tmp_path: Path):
    """A run with one fault, as it is written down; and what a drill makes of it."""

    def judge(
        fault: Fault,
        *,
        mark: bool = True,
        noticed_s: float = 2.0,
        again: int = 8,
        processes: int = 2,
        **failure,
    ):
        run, files = tmp_path / "disturbed", tmp_path / "disturbed files"
        files.mkdir()
        if mark:
            (files / str(fault)).touch()
            os.utime(files / str(fault), (1000.0, 1000.0))
        add_entry(run, Entry(900.0, 1002.0, {"step": 102.0}, 0, 10))
        add_entry(run, Entry(1002.0, 1003.0, {"waiting": 1.0}))
        add_entry(
            run, Entry(1003.0, 1050.0, {"start": 2.0, "compile": 3.0, "step": 42.0}, again, 20)
        )
        line = {"process": 1, "kind": "killed", "what": "", "phase": "step", "step": 10} | failure
        if failure.get("process", 1) is not None:
            (run / FAILURES).write_text(json.dumps({"time": 1000.0 + noticed_s, **line}) + "\n")
        return drilling._happened(tmp_path, [fault], processes)[-1]

    return judge


def test_what_happened_is_told(written) -> None:
    found = written(Fault("kill", 10, "step", 1))
    assert found == Happened(
        "kill@10.step:1", 2.0, "process 1, killed after step 10 in step", 2, 1 + 2 + 3, ()
    )


def test_each_of_several_is_told(tmp_path: Path) -> None:
    run, files = tmp_path / "apart", tmp_path / "apart files"
    files.mkdir()
    faults = [Fault("kill", 10 * n, "step", 1) for n in (1, 2, 3)]
    failures = []
    for n, fault in enumerate(faults, 1):
        (files / str(fault)).touch()
        os.utime(files / str(fault), (100.0 * n, 100.0 * n))
        add_entry(run, Entry(100.0 * n - 100, 100.0 * n, {"step": 100.0}, 10 * n - 10, 10 * n + 1))
        line = {"process": 1, "kind": "killed", "what": "", "phase": "step", "step": 10 * n}
        failures.append(json.dumps({"time": 100.0 * n + n, **line}))
    add_entry(run, Entry(300.0, 400.0, {"step": 100.0}, 30, 40))
    (run / FAILURES).write_text("\n".join(failures) + "\n")
    found = drilling._happened(tmp_path, faults, 2, "apart")
    assert [(each.noticed_s, each.lost, each.violations) for each in found] == [
        (1.0, 1, ()), (2.0, 1, ()), (3.0, 1, ()),
    ]  # fmt: skip


def test_of_two_that_are_cut_apart_each_may_be_named(written) -> None:
    cut = Fault("cut", 10, "step", 1)
    assert written(cut, process=0, kind="hangs").violations == ()


@pytest.mark.parametrize("kind", ["full", "readonly", "clean", "pause"])
def test_what_a_run_is_to_come_over_ends_no_start(kind: str, written) -> None:
    assert written(Fault(kind, 10), process=None).named == "the run went on"


def test_the_faults_are_told_without_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["drill", "--list", "--processes", "3", "--json"]) == 0
    said = capsys.readouterr()
    found = json.loads(said.out)["faults"]
    assert {"run": "disturbed", "fault": "kill@8.step:2", "what": KINDS["kill"]} == found[0]
    for each in found:
        assert f"{each['run']}:" in said.err and f"{each['fault']} " in said.err
        assert each["what"] in said.err
    assert cli.main(["drill", "--list", "--processes", "1"]) == 2
    assert "processes=1; use 2 or more" in capsys.readouterr().err
    assert cli.main(["drill"]) == 2
    assert "drill wants an experiment file, or --list" in capsys.readouterr().err


WRONG = {
    "a cut of another kind": (dict(kind="crashed"), "it was hangs in step"),
    "a disk that was not full": (dict(mark=False, process=None), "it did not happen"),
    "another is named": (dict(process=0), "it was process 1"),
    "in another phase": (dict(kind="silent", phase="load"), "it was silent in step"),
    "late": (dict(noticed_s=15.2), "it was noticed after more than 15 s"),
    "not at all": (dict(process=None), "nobody noticed"),
    "it did not happen": (dict(mark=False), "it did not happen"),
    "a flipped bit of another": (
        dict(kind="wrong", process=0, wrong=[0]),
        "it was wrong numbers of process 1",
    ),
    "a flipped bit of three, and nobody is named": (
        dict(kind="wrong", wrong=[], processes=3),
        "it was wrong numbers of process 1",
    ),
    "a flipped bit, and it crashed of something else": (
        dict(kind="crashed", wrong=[]),
        "it was wrong numbers of process 1",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_not_as_it_should_be_is_a_violation(name: str, written) -> None:
    how, said = WRONG[name]
    kind = {
        "in another phase": "stop", "a cut of another kind": "cut",
        "a disk that was not full": "full",
    }.get(name, "flip" if "flipped" in name else "kill")  # fmt: skip
    assert written(Fault(kind, 10, "step", 1), **how).violations == (said,)


@pytest.mark.parametrize(("wrong", "named"), [([1], "process 1, wrong"), ([], "one of two, wrong")])
def test_a_flipped_bit_is_one_of_two_or_is_named(wrong: list[int], named: str, written) -> None:
    found = written(Fault("flip", 10, "step", 1), kind="wrong", wrong=wrong)
    assert found.named == f"{named} after step 10 in step" and not found.violations


def test_steps_lost_beyond_the_saves_that_are_kept(written, monkeypatch) -> None:
    monkeypatch.setattr(drilling, "SAVES", 1)
    assert written(Fault("kill", 10, "step", 1), again=6).violations == ("4 steps were lost",)


def test_any_violation_fails_it() -> None:
    good = Happened("kill@8.step:1", 0.4, "process 1", 3, 8.0, ())
    ledger = Ledger(10.0, {"step": 5.0, "init": 5.0})
    fine = Drill(2, (good,), ledger, 0.001, ())
    without = replace(fine, skipped=("cut@9.step:1: there is no ip here",))
    assert without.passed and "SKIPPED cut@9.step:1: there is no ip here\n" in str(without)
    assert without.as_json()["skipped"] == list(without.skipped)
    assert fine.passed and "to the bit" in str(fine) and fine.as_json()["lost_steps"] == 3
    for bad in (
        replace(fine, violations=("losses differ",)),
        replace(fine, faults=(good, replace(good, violations=("x",)))),
    ):
        assert not bad.passed and "NOT PASSED" in str(bad) and "VIOLATION" in str(bad)
        assert json.loads(json.dumps(bad.as_json()))["passed"] is False


@pytest.mark.exhaustive
@pytest.mark.parametrize("processes", [2, 4])
def test_the_drill(processes: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Six minutes, and nine."""
    code = cli.main(["drill", STDLIB, "--processes", str(processes), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert code == 0 and found["passed"], found
