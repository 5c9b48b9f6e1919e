"""A supervisor with processes that only tell what they are at: no JAX in them."""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from scripted import DONE, ROOT, WORKER, alive

from jaxtrain.cluster.phases import Now
from jaxtrain.cluster.run_lock import sole_run
from jaxtrain.cluster.sampler import ProcessSample, SampleFile
from jaxtrain.fault_tolerance import supervisor as supervising
from jaxtrain.fault_tolerance.beginning import Beginning
from jaxtrain.fault_tolerance.deadlines import Deadlines
from jaxtrain.fault_tolerance.faults import Fault
from jaxtrain.fault_tolerance.ledger import OPEN, read_entries, read_ledger
from jaxtrain.fault_tolerance.restarts import Restarts
from jaxtrain.fault_tolerance.supervisor import Supervisor
from jaxtrain.machines import pauses
from jaxtrain.machines.layouts import MachineLayout
from jaxtrain.machines.machine import LocalMachines, slots_of
from jaxtrain.machines.pauses import Pauses
from jaxtrain.machines.roster import Roster
from jaxtrain.machines.workers import Worker


@pytest.fixture
def supervise(tmp_path: Path):
    """The exit code, what was told and the failures written down of a script on two processes."""

    def run(
        script: str,
        *,
        processes: int = 2,
        late: float = 60,
        step: float = 60,
        during=None,
        faults=(),
        beginning=Beginning(),  # noqa: B008
        files=(),
        **rule,
    ):
        told: list[str] = []
        samples = tmp_path / "samples"
        (tmp_path / "worker.py").write_text(WORKER + script + DONE)
        environ = {"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"]}
        program = [sys.executable, str(tmp_path / "worker.py")]
        made = Supervisor(
            [str(tmp_path)],
            Roster(
                LocalMachines(slots_of(2, samples, program, environ)),
                {2: MachineLayout(2, files=files)},
                0,
                told.append,
            ),
            tell=told.append,
            deadlines=Deadlines(silence=late, step=step),
            restarts=Restarts(first_wait_s=0.1, **rule),
            run_dir=tmp_path / "run",
            folder=samples,
            faults=faults,
            beginning=beginning,
        )
        if during is not None:
            threading.Thread(target=during, args=(made, told), daemon=True).start()
        code = made.run()
        for worker in made.workers:
            assert worker.code is not None, "nobody is left"
        record = tmp_path / "run" / "failures.jsonl"
        lines = record.read_text().splitlines() if record.exists() else []
        return code, told, [json.loads(line) for line in lines]

    return run


def test_all_done(supervise) -> None:
    code, told, failures = supervise("print('x' * 3)\nprint('[Gloo] Rank 1 is connected to 1')")
    assert code == 0 and not failures
    assert sorted(told[:-1]) == ["[0] begins 0", "[0] xxx", "[1] begins 0", "[1] xxx"]
    assert told[-1].startswith("launch: ") and "goodput" in told[-1]


def test_a_fault_that_never_happened_is_told(supervise, tmp_path: Path) -> None:
    """Step 90 of a shorter run, or a phase that it never is in."""
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples" / "kill@4.step:0").touch()
    given = [Fault("kill", 4), Fault("kill", 90), Fault("hang", 4, "evaluate", 1)]
    code, told, _ = supervise("", faults=given)
    never = "did not happen before the run was done: kill@90.step:0, hang@4.evaluate:1"
    assert code == 0 and f"launch: {never}" in told
    code, told, _ = supervise("", faults=given[:1])
    assert code == 0 and not any("happen" in line for line in told)


ENDS = {
    "an exit code": ("sys.exit(3)", "crashed", "ended by exit code 3 after step 4"),
    "a kill": ("os.kill(os.getpid(), 9)", "killed", "ended by SIGKILL after step 4"),
    "a fault": ("os.kill(os.getpid(), 11)", "crashed", "ended by SIGSEGV after step 4"),
}


@pytest.mark.parametrize("name", ENDS)
def test_one_that_ends_badly_is_named_and_all_start_again(supervise, name: str) -> None:
    """The other leaves by an abort, as JAX has it, and a second before the one is seen to end."""
    act, kind, said = ENDS[name]
    code, told, failures = supervise(
        f"""
if start == 0:
    phases.advance(4)
    if process == 1:
        time.sleep(1)
        {act}
    print("Terminating process because the JAX distributed service detected fatal", end=" ")
    print("errors", flush=True)
    os.kill(os.getpid(), 6)
"""
    )
    assert code == 0
    assert f"launch: process 1 of 2 {said}, in phase step" in told
    (failure,) = failures
    assert (failure["process"], failure["kind"], failure["step"]) == (1, kind, 4)
    assert failure["start"] == 1 and failure["restarts"] is True
    assert told.count("[0] begins 1") == told.count("[1] begins 1") == 1


def test_what_holds_the_output_of_one_that_ended_holds_nothing_up(supervise) -> None:
    """A service that a process has begun in a session of its own; the other process hangs, which is
    found by its deadline."""
    script = """
if start == 0:
    phases.advance(4)
    if process == 0:
        subprocess.Popen(["sleep", "90"], start_new_session=True)
        print("Gloo all-reduce failed: Connection closed by peer", flush=True)
        os._exit(1)
    time.sleep(600)
"""
    code, told, failures = supervise(script, step=5)
    assert code == 0 and [(each["kind"], each["process"]) for each in failures] == [("hangs", 1)]
    assert not any("stood still" in line for line in told)


@pytest.mark.parametrize("wrong", [(1,), ()])
def test_wrong_numbers_are_those_of_whom_they_say(supervise, wrong: tuple[int, ...]) -> None:
    """The first process tells it first, and is not the one."""
    code, told, failures = supervise(
        f"""
if start == 0:
    phases.begin_at(0)
    phases.advance(4)
    time.sleep(0.1 * process)
    phases.accuse({wrong})
    print("copies differ", flush=True)
    os._exit(1)
"""
    )
    assert code == 0
    (failure,) = failures
    assert (failure["kind"], failure["wrong"]) == ("wrong", list(wrong))
    assert wrong in ((), (failure["process"],))
    assert failure["cause"] == "exit code 1: copies differ" and failure["first"] == 0
    whose = "process 1" if wrong else "one of several"
    assert any(line.endswith(f"for wrong numbers of {whose}") for line in told)


HANGS = {
    "stopped": ("os.kill(os.getpid(), 19)", "silent", "has said nothing for", "(stopped by a"),
    "stuck": ("time.sleep(600)", "hangs", "has not moved for", "in phase load"),
}


@pytest.mark.parametrize("name", HANGS)
def test_one_that_hangs_is_named_with_its_stack(supervise, name: str, tmp_path: Path) -> None:
    act, kind, said, more = HANGS[name]
    code, told, failures = supervise(
        f"""
def gets_stuck():
    {act}

if start == 0:
    phases.advance(6)
    if process == 0:
        phases.enter("load")
        {"time.sleep(2.0)" if name == "stopped" else ""}
        gets_stuck()
    time.sleep(600)
""",
        **({"late": 4} if name == "stopped" else {"step": 2}),
    )
    assert code == 0
    (line,) = [line for line in told if "main thread was at" in line]
    assert line.startswith(f"launch: process 0 of 2 {said}") and more in line
    assert any(("gets_stuck" if name == "stuck" else "sleep(2.0)") in line for line in told)
    (failure,) = failures
    assert (failure["process"], failure["kind"], failure["phase"]) == (0, kind, "load")
    ledger = read_ledger(tmp_path / "run")
    assert ledger.seconds["hang"] >= 1.9 > ledger.seconds.get("step", 0.0) - 1
    assert ledger.wall_s == pytest.approx(sum(ledger.seconds.values()))


def test_a_crash_that_comes_again_is_met_twice(supervise) -> None:
    code, told, failures = supervise(
        "phases.advance(4)\nif process:\n    sys.exit(1)\ntime.sleep(60)"
    )
    assert code == supervising.DETERMINISTIC == 70 and len(failures) == 2
    assert "[1] begins 1" in told and "[1] begins 2" not in told
    assert "the same failure twice, after step 4 in phase step" in told[-2]
    assert [each["restarts"] for each in failures] == [True, False]


def test_two_failures_before_a_step_is_won_are_not_the_same_for_that(supervise) -> None:
    """A service that is away, and then a disk; the third start is well."""
    script = """
phases.enter("open")
if start < 2 and process:
    sys.exit(["nobody answers", "no such disk"][start])
"""
    code, told, failures = supervise(script)
    assert code == 0 and [each["phase"] for each in failures] == ["open", "open"], told


def test_a_flapping_process_exhausts_the_budget(supervise) -> None:
    script = "phases.advance(start)\nif process:\n    os.kill(os.getpid(), 9)\ntime.sleep(60)"
    code, told, failures = supervise(script, most=2)
    assert code == supervising.EXHAUSTED == 69 and len(failures) == 3
    assert "2 restarts within 3600 s are used up (--restarts 2)" in told[-2]
    code, told, _ = supervise("time.sleep(60)", late=0.5, step=0.5, most=0)
    assert code == supervising.HUNG == 124


def test_what_is_refused_later_was_not_before(supervise) -> None:
    """A host that stands still may hold the run directory for a while."""
    script = """
if start == 0 and process:
    os.kill(os.getpid(), 9)
phases.enter("open")
if 0 < start < 4 and process == 0:
    print("run directory run is in use by process 1", flush=True)
    os._exit(2)
time.sleep(60 * (start < 4))
"""
    code, told, failures = supervise(script)
    assert code == 0 and [each["cause"][:11] for each in failures] == [
        "SIGKILL",
        *["exit code 2"] * 3,
    ], told


def test_what_one_refuses_is_not_tried_again(supervise, tmp_path: Path) -> None:
    script = "print('no such file') if process else time.sleep(60)\nsys.exit(2)"
    code, told, failures = supervise(script)
    assert code == 2 and not failures and "[0] begins 1" not in told
    assert told[-1] == "launch: process 1 of 2 refused it: no such file"
    assert not (tmp_path / "run").exists(), "its ledger would be another's"


def test_what_is_said_once_steps_are_taken_is_no_refusal(supervise) -> None:
    """Of exit code 2 in mid-run, in the first start."""
    code, told, failures = supervise(
        """
phases.begin_at(0)
phases.advance(30)
if start == 0 and process:
    print("No space left on device", flush=True)
    os._exit(2)
time.sleep(60 * (start == 0))
"""
    )
    assert code == 0 and "launch: process 1 of 2 ended by exit code 2 after step 30" in str(told)
    (failure,) = failures
    assert (failure["process"], failure["kind"], failure["step"]) == (1, "crashed", 30)
    assert failure["cause"] == "exit code 2: No space left on device"


@pytest.mark.parametrize("phase", ["start", "join", "open"])
def test_a_refusal_that_comes_again_ends_it(supervise, phase: str) -> None:
    """In a later start, in whatever phase; the words alone count, not their numbers."""
    code, told, failures = supervise(
        f"""
if start == 0 and process:
    os.kill(os.getpid(), 9)
phases.enter("{phase}")
if start and process == 0:
    print("config.json of run", start, "is cut off", flush=True)
    os._exit(2)
time.sleep(60)
"""
    )
    assert code == 70 and [each["kind"] for each in failures] == ["killed", "refused", "refused"]
    assert "the same failure twice" in told[-2] and "config.json of run 2 is cut off" in told[-2]
    assert told[-1].startswith("launch: nothing is saved; ")


def test_one_that_leaves_well_before_the_run_is_done_is_named(supervise) -> None:
    """Not the other, which ends by its loss."""
    code, told, failures = supervise(
        """
if start == 0:
    phases.begin_at(0)
    phases.advance(5)
    if process:
        (folder / "left").touch()
        os._exit(0)
    while not (folder / "left").exists():
        time.sleep(0.05)
    time.sleep(1)
    os.kill(os.getpid(), 6)
"""
    )
    assert code == 0
    (failure,) = failures
    assert (failure["process"], failure["kind"], failure["step"]) == (1, "left", 5)
    said = "process 1 of 2 ended by exit code 0 before the run was done after step 5, in phase step"
    assert f"launch: {said}" in told


def test_one_that_leaves_well_in_its_last_save_is_named(supervise) -> None:
    script = """
if start == 0:
    phases.begin_at(0)
    phases.advance(5)
    phases.enter("finish")
    if process:
        os._exit(0)
    time.sleep(60)
"""
    code, told, (failure,) = supervise(script)
    assert code == 0, told
    assert (failure["process"], failure["kind"], failure["phase"]) == (1, "left", "finish")


def test_all_that_leave_well_before_the_run_is_done_are_a_failure(supervise) -> None:
    """Whatever they said last, which is no cause."""
    script = """
phases.begin_at(5 * bool(start))
phases.advance(5)
print("x" * start, flush=True)
os._exit(0)
"""
    code, _, failures = supervise(script)
    assert code == 70 and [each["kind"] for each in failures] == ["left", "left"]


def test_a_folder_that_is_removed_meanwhile_costs_nothing(supervise) -> None:
    """As by what cleans up old files; a failure after that is one as ever."""
    code, told, failures = supervise(
        """
import shutil
if start == 0:
    phases.advance(7)
    if process == 0:
        shutil.rmtree(folder / "samples")
    time.sleep(4.5)
    phases.advance(8)
    os.kill(os.getpid(), 9)
phases.enter("load")
time.sleep(3.5)
""",
        late=3,
    )
    assert code == 0, told
    (failure,) = failures
    assert (failure["kind"], failure["step"]) == ("killed", 8)


PAUSED_S = 4.0


class Pausing:
    """`time`, for a supervisor that stands still once, in `act`, for as long as that takes."""

    def __init__(self, when: Path, act) -> None:
        self._when, self._act, self.done = when, act, False
        self.time, self.monotonic = time.time, time.monotonic

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)
        if not self.done and len(list(self._when.glob("at*"))) == 2:
            self.done = True
            self._act()


def test_a_supervisor_that_stood_still_blames_nobody(
    supervise, tmp_path: Path, monkeypatch
) -> None:
    """With all its processes, as on a virtual machine that was held."""

    def stand_still() -> None:
        pids = [int((tmp_path / f"pid{process}").read_text()) for process in (0, 1)]
        time.sleep(PAUSED_S)
        for pid in pids:
            os.kill(pid, 18)

    monkeypatch.setattr(supervising, "time", Pausing(tmp_path, stand_still))
    script = """
(folder / f"at{process}").touch()
os.kill(os.getpid(), 19)
time.sleep(1)
"""
    code, told, failures = supervise(script, late=2.5, step=2.5)
    assert code == 0 and not failures, told
    assert any(line.startswith("launch: stood still itself for ") for line in told)


def test_a_pause_in_which_all_ended_is_told_and_nobody_stayed(
    supervise, tmp_path: Path, monkeypatch
) -> None:
    """What machines did in it was not seen, so that none has stayed."""
    forgotten: list[Roster] = []

    def stand_still() -> None:
        pids = [int((tmp_path / f"pid{process}").read_text()) for process in (0, 1)]
        while any(map(alive, pids)):
            time.sleep(0.05)
        time.sleep(PAUSED_S)

    monkeypatch.setattr(supervising, "time", Pausing(tmp_path, stand_still))
    monkeypatch.setattr(Roster, "forget_stays", lambda roster: forgotten.append(roster))
    code, told, failures = supervise('(folder / f"at{process}").touch()')
    assert code == 0 and not failures, told
    assert any(line.startswith("launch: stood still itself for ") for line in told)
    assert len(forgotten) == 1


def test_each_pause_is_forgiven_once(tmp_path: Path, monkeypatch) -> None:
    """Of a long one and a short one behind it, before a process could say anything."""
    roster = Roster(LocalMachines(slots_of(1, tmp_path, [], {})), {1: MachineLayout(1)}, 0, print)
    made = Supervisor([], roster, tell=print, run_dir=tmp_path, folder=tmp_path)
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(pauses, "time", SimpleNamespace(monotonic=lambda: clock.now))
    made._pauses = Pauses(1.0)
    for clock.now in (701.0, 705.0, 706.5):  # late by 600 s, by 3 s, and as any look may be
        made._pauses.look()
    said = ProcessSample(Now("step", 3, 90.0), 99.0)
    found = made._awake(said)
    assert (found.sampled_at, found.now.since) == (702.0, 693.0)
    later = ProcessSample(Now("step", 3, 710.0), 711.0)
    assert made._awake(later) == later


def test_a_later_start_that_has_no_room_for_its_files_is_tried_again(
    supervise, monkeypatch
) -> None:
    """As where the disk of temporary files is full for a moment."""
    made, tries = SampleFile.__init__, []

    def full(self, path: Path, *, create: bool = False) -> None:
        tries.append(path)
        if len(tries) in (3, 5):
            raise OSError(28, "No space left on device", str(path))
        made(self, path, create=create)

    monkeypatch.setattr(SampleFile, "__init__", full)
    script = "phases.begin_at(0)\nif start == 0 and process:\n    os.kill(os.getpid(), 9)\n"
    code, told, failures = supervise(script + "time.sleep(60 * (start == 0))")
    assert code == 0 and [each["kind"] for each in failures] == ["killed", "crashed", "crashed"]
    assert [each["process"] for each in failures] == [1, 0, 1]
    assert f"process 0 of 2 could not be started: No space left on device: {tries[2]}" in str(told)


def test_those_that_ended_while_their_supervisor_stood_still_are_not_silent(
    supervise, tmp_path: Path, monkeypatch
) -> None:
    """Where it stood between a look at exits and one at what they say."""
    read, slept = Worker.sample, []

    def late(worker: Worker):
        if not slept and len(list(tmp_path.glob("at*"))) == 2:
            slept.append(time.sleep(PAUSED_S))
        return read(worker)

    monkeypatch.setattr(Worker, "sample", late)
    script = '(folder / f"at{process}").touch()\ntime.sleep(1)'
    code, told, failures = supervise(script, late=2.5, step=2.5)
    assert code == 0 and slept and not failures, told


def test_a_refusal_is_one_whatever_the_others_do_of_it(supervise) -> None:
    """JAX aborts where the first process is gone."""
    code, told, failures = supervise(
        """
if process == 0:
    os._exit(2)
print("Terminating process because the JAX distributed service detected fatal", end=" ")
print("errors", flush=True)
os.kill(os.getpid(), 6)
"""
    )
    assert code == 2 and not failures and "[0] begins 1" not in told


def test_a_signal_asks_all_to_save_and_a_second_one_ends_them(supervise, tmp_path: Path) -> None:
    obeys = "while not asked:\n    time.sleep(0.05)\nsys.exit(75)"

    def once(made: Supervisor, told: list[str]) -> None:
        while len(told) < 2:
            time.sleep(0.05)
        made.stop()

    code, _, failures = supervise(obeys, during=once)
    assert code == 75 and not failures
    crashes = "while not asked:\n    time.sleep(0.05)\nsys.exit(3)"
    code, told, failures = supervise(crashes, during=once)
    assert "while it was stopping" in str(told)
    assert [(each["kind"], each["restarts"]) for each in failures] == [("crashed", False)]

    def twice(made: Supervisor, told: list[str]) -> None:
        once(made, told)
        made.stop()  # a terminal's and a wrapper's: one
        time.sleep(1.2)
        made.stop()

    began = time.monotonic()
    record = tmp_path / "run" / "failures.jsonl"
    record.unlink()
    code, told, failures = supervise("time.sleep(300)\ntime.sleep(300)", during=twice)
    assert not failures and "SIGKILL" not in str(told), "it was ended on purpose"
    assert code == 130 and time.monotonic() - began < 300


def test_signals_that_come_close_are_one(tmp_path: Path, monkeypatch) -> None:
    roster = Roster(LocalMachines(slots_of(1, tmp_path, [], {})), {1: MachineLayout(1)}, 0, print)
    made = Supervisor([], roster, tell=print, run_dir=tmp_path, folder=tmp_path)
    for at, count in ((100.0, 1), (100.5, 1), (101.0, 1), (102.5, 2)):
        monkeypatch.setattr(supervising, "time", SimpleNamespace(monotonic=lambda at=at: at))
        made.stop()
        assert made.stopping == count, "the second is a second one only after a pause"


def test_one_that_was_asked_by_another_leaves_with_all(supervise) -> None:
    """A scheduler's SIGTERM to one process: all agree, and exit with 75."""
    code, _, failures = supervise("sys.exit(75)")
    assert code == 75 and not failures


def test_what_a_process_started_ends_with_it(supervise, tmp_path: Path) -> None:
    code, _, _ = supervise(
        """
if start == 0 and process == 1:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    (folder / "child").write_text(str(child.pid))
    os.kill(os.getpid(), 9)
"""
    )
    assert code == 0
    child = int((tmp_path / "child").read_text())
    for _ in range(1000):
        if not alive(child):
            return
        time.sleep(0.05)
    raise AssertionError("the child runs 50 s later")


def test_of_two_that_end_alike_the_first_is_named(supervise) -> None:
    """The other meets an error where the first is missing, before anybody looks."""
    script = """
if start == 0:
    phases.advance(5)
    if process == 0:
        while not (folder / "start1.0").exists():
            time.sleep(0.005)
        other = Path("/proc", (folder / "pid1").read_text())
        while other.exists():  # until its end is known
            time.sleep(0.005)
        time.sleep(0.2)
    os._exit(1)
"""
    _, told, failures = supervise(script)
    assert [each["process"] for each in failures] == [1], told


def test_a_wait_before_the_first_start_is_in_no_ledger(tmp_path: Path, monkeypatch) -> None:
    """That start may be refused, for the directory is another run's."""
    monkeypatch.setattr(supervising, "POLL_S", -1.0)
    roster = Roster(LocalMachines(slots_of(1, tmp_path, [], {})), {1: MachineLayout(1)}, 0, print)
    made = Supervisor([], roster, tell=print, run_dir=tmp_path / "run", folder=tmp_path)
    assert made._waits(lambda: True) and not (tmp_path / "run").exists()
    made._records.write()
    assert made._waits(lambda: True)
    assert list(read_ledger(tmp_path / "run").seconds) == ["waiting"]


@pytest.mark.parametrize("used", [True, False])
def test_of_a_start_without_a_step_nothing_is_written_while_another_run_has_the_directory(
    used: bool, supervise, tmp_path: Path
) -> None:
    """A second launch of the same run, of which the first start crashes before it asks for it."""
    (tmp_path / "run").mkdir()
    script = "time.sleep(0.1)\nos._exit(1)"
    with sole_run(tmp_path / "run") if used else nullcontext():
        code, told, failures = supervise(script, most=1)
        names = {path.name for path in (tmp_path / "run").iterdir()}
    assert code == supervising.DETERMINISTIC
    if used:
        assert names == {".lock"}
        assert told[-1].endswith("run is in use by another run: nothing of this one is recorded")
    else:
        assert names == {"ledger.jsonl", "failures.jsonl"} and len(failures) == 2
        assert len(read_entries(tmp_path / "run")) == 3, "two starts, and the wait between them"


def test_a_launch_that_begins_anew_leaves_the_run_that_was_there_alone(
    supervise, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until one of its starts has made it its own; and its command would begin anew again."""
    roster: Any = SimpleNamespace(choose=lambda stopped: False)
    for name in ("storage", "run_config"):
        monkeypatch.setattr(f"jaxtrain.checkpoint.{name}.committed_steps", lambda folder: [4])
    told: list[str] = []
    run = tmp_path / "run"
    places: Any = dict(tell=told.append, run_dir=run, folder=tmp_path)
    made = Supervisor([], roster, **places, beginning=Beginning("a", again=True))
    made._records.add("failures.jsonl", {"start": 1})
    made.stopping = 1
    run.mkdir()
    for config, reason in (
        (None, "holds checkpoints .* but no config.json"),
        ("{", "cannot be read"),
    ):
        if config is not None:
            (run / "config.json").write_text(config)
        assert made.run() == 130 and not (run / "failures.jsonl").exists()
        assert re.search(rf"what is saved cannot be seen: .*{reason}", told[-1])
        assert re.search(rf"nothing of this run is recorded: .*{reason}", told[-1])
    (run / "config.json").write_text('{"begun_by": "b"}')
    assert made.run() == 130 and not (run / "failures.jsonl").exists()
    assert f"nothing is saved: this run has not begun in {run}; nothing" in told[-1]
    assert "nothing of this run is recorded: it has taken no step" in told[-1]
    (run / "config.json").write_text('{"begun_by": "a"}')
    assert made.run() == 130 and (run / "failures.jsonl").exists()
    assert "the newest save is 4, from which the same command without --fresh goes on" in told[-1]
    for beginning in (Beginning("a"), Beginning()):
        again = Supervisor([], roster, **places, beginning=beginning)
        again.stopping = 1
        assert again.run() == 75
        assert "the newest save is 4, from which the same command goes on" in told[-1]


def test_files_that_a_start_is_given_are_written_again_for_the_next(
    supervise, tmp_path: Path
) -> None:
    """As where a cleaner of old files has removed them."""
    file = tmp_path / "elastic" / "mesh.toml"
    script = f"""
import shutil
assert Path({str(file)!r}).read_text() == "a mesh"
if start == 0 and process == 0:
    shutil.rmtree({str(file.parent)!r})
    os._exit(1)
if start == 0:
    time.sleep(300)
"""
    code, told, failures = supervise(script, files=((file, "a mesh"),))
    assert code == 0 and len(failures) == 1, told


def test_processes_that_saved_and_left_do_not_begin_anew_again(supervise) -> None:
    """By 75 a scheduler would give the same command again, which would move what they saved."""
    cases = ((Beginning(), 75), (Beginning("a"), 75), (Beginning("a", again=True), 130))
    for beginning, code in cases:
        assert supervise("sys.exit(75)", beginning=beginning)[0] == code


def test_a_launch_that_lacks_machines_tells_what_it_could_not_write(tmp_path: Path) -> None:
    told: list[str] = []
    roster: Any = SimpleNamespace(choose=lambda stopped: False)
    made = Supervisor([], roster, tell=told.append, run_dir=tmp_path, folder=tmp_path)
    made._records.add("failures.jsonl", {"start": 1})
    with sole_run(tmp_path):
        assert made.run() == supervising.EXHAUSTED
    assert told == [f"launch: {tmp_path} is in use by another run: nothing of this one is recorded"]
    assert made.run() == supervising.EXHAUSTED and len(told) == 1
    assert (tmp_path / "failures.jsonl").read_text() == '{"start": 1}\n'


def test_what_was_kept_back_is_written_before_the_first_start_with_a_step(
    supervise, tmp_path: Path
) -> None:
    looked = tmp_path / "looked"
    script = f"""
if start == 0:
    os._exit(1)
while not os.path.exists({str(looked)!r}):
    time.sleep(0.01)
phases.begin_at(0)
phases.advance(5)
"""
    written: list[list[str]] = []

    def look(made: Supervisor, told: list[str]) -> None:
        while not any("[0] begins 1" in line for line in told):
            time.sleep(0.01)
        written.append([path.name for path in tmp_path.glob("run/*")])
        looked.touch()

    code, _, failures = supervise(script, during=look)
    assert code == 0 and len(failures) == 1 and written == [[]]
    kinds = [(entry.first, entry.done) for entry in read_entries(tmp_path / "run")]
    assert kinds == [(-1, 0), (-1, 0), (0, 5)]


def test_what_is_known_of_a_start_is_kept_while_it_goes_on(supervise, tmp_path: Path) -> None:
    """So that a launch that is killed leaves it; and no longer once it has ended."""

    def once(made: Supervisor, told: list[str]) -> None:
        path = made.run_dir / OPEN
        while not path.exists():
            time.sleep(0.01)
        (tmp_path / "kept").write_text(path.read_text())

    script = """
phases.begin_at(0)
phases.advance(5)
while not (folder / "kept").exists():
    time.sleep(0.05)
"""
    code, _, _ = supervise(script, during=once)
    assert code == 0 and json.loads((tmp_path / "kept").read_text())["done"] == 5
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["ledger.jsonl"]
