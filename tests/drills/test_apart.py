"""What runs of a drill stand on: a disk of their own that is filled, a network that is cut."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jaxtrain.cluster.phases import Phases
from jaxtrain.drills import apart, namespaces
from jaxtrain.drills import drill as drilling
from jaxtrain.drills.apart import IsolatedRun, NotHere, cut_network, small_disk
from jaxtrain.drills.namespaces import Network, network, why_not
from jaxtrain.fault_tolerance import faults, machine_faults
from jaxtrain.fault_tolerance.faults import FAULTS, Fault, Injector, faults_variable
from jaxtrain.fault_tolerance.machine_faults import LINK

ROOT = Path(__file__).parents[2]

needs_namespaces = pytest.mark.skipif(bool(why_not()), reason=why_not() or "none")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mount wants root")

CONNECTS = "import socket, sys; socket.create_connection((sys.argv[1], 9000), timeout=0.5)"
LISTENS = """
import socket
s = socket.create_server((socket.gethostbyname(socket.gethostname()), 9000))
print(flush=True)
while True: s.accept()
"""


@needs_namespaces
def test_processes_in_namespaces_reach_each_other_until_one_is_cut() -> None:
    """By the addresses that their hosts' names resolve to, as collectives of CPUs do; the machine
    has no more interfaces than before, and none of it is left."""
    before = socket.if_nameindex()
    with network(3) as found:
        listens = subprocess.Popen(
            [*found.prefix(0), "python3", "-c", LISTENS], stdout=subprocess.PIPE
        )

        def reaches(process: int) -> bool:
            command = [*found.prefix(process), "python3", "-c", CONNECTS, found.addresses[0]]
            return subprocess.run(command, capture_output=True, check=False).returncode == 0

        try:
            assert listens.stdout is not None and listens.stdout.readline()
            assert reaches(1) and reaches(2)
            found.cut(2)
            assert reaches(1) and not reaches(2)
            found.mend(2)
            assert reaches(2)
            cuts = "import jaxtrain.fault_tolerance.machine_faults as m"
            cuts += "; assert not m.refuse_shared_link(); m.cut_link()"
            own = [*found.prefix(1), sys.executable, "-c", cuts]
            subprocess.run(own, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
            assert reaches(2) and not reaches(1), "a process may cut its own"
        finally:
            listens.kill()
            listens.communicate()
        assert socket.if_nameindex() == before
    assert not any(Path(f"/proc/{each}").exists() for each in found.holders)


def test_what_the_kernel_refuses_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apart, "why_not", lambda: "only Linux has them")
    with pytest.raises(NotHere, match="only Linux"), cut_network(Path(), 2):
        pass
    monkeypatch.setattr(apart, "why_not", lambda: "")
    monkeypatch.setattr(namespaces, "_holder", lambda stack, name: _refused())
    with pytest.raises(NotHere, match="no more namespaces"), cut_network(Path(), 2):
        pass


def _refused() -> int:
    raise OSError("no more namespaces")


def test_only_root_has_them_and_is_told_how_another_may(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(NotHere, match="unshare --map-root-user"), small_disk(tmp_path / "a", 2):
        pass
    monkeypatch.setattr(namespaces.shutil, "which", lambda name: name)
    assert "unshare --map-root-user" in why_not()
    monkeypatch.setattr(namespaces.shutil, "which", lambda name: None)
    assert why_not() == "there is no unshare, nsenter, ip here"


@needs_root
def test_a_disk_is_filled_to_the_last_byte_and_emptied(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(apart, "SMALL", "2m")
    disk = tmp_path / "disk"
    with small_disk(disk, 2):
        assert machine_faults.refuse_large(disk / "run") == []
        machine_faults.fill(disk)
        assert shutil.disk_usage(disk).free == 0
        with pytest.raises(OSError, match="No space left"):
            (disk / "a").write_bytes(b"a")
        machine_faults.empty(disk)
        assert shutil.disk_usage(disk).free >= 2**20
    assert not list(disk.iterdir()), "it is gone"


def test_no_large_disk_is_filled_and_no_link_of_the_machine_cut(tmp_path, monkeypatch) -> None:
    usage = SimpleNamespace(total=2**40)
    monkeypatch.setattr(machine_faults.shutil, "disk_usage", lambda path: usage)
    given = faults_variable(
        [Fault("full", 3), Fault("cut", 3), Fault("cut", 3, process=1)], tmp_path
    )
    with pytest.raises(ValueError) as caught:
        Injector(given[FAULTS], 0, tmp_path / "a" / "run")
    said = str(caught.value)
    assert "has 1099.5 GB" in said and f"no link {LINK} of its own" in said
    usage.total = 2**30
    with pytest.raises(ValueError, match=LINK) as caught:
        Injector(given[FAULTS], 1, tmp_path)
    assert "GB" not in str(caught.value)


@pytest.fixture(params=["full", "readonly"])
def disk(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What becomes of the disk of a run with that fault after step 3."""
    done: list[str] = []
    kind = request.param
    acts = (lambda run_dir: done.append("taken"), lambda run_dir: done.append("given back"))
    monkeypatch.setitem(faults.DISKS, kind, acts)
    monkeypatch.setattr(faults, "refuse_large", lambda run_dir: [])
    monkeypatch.setattr(faults, "refuse_mounting", lambda: [])
    given = faults_variable([Fault(kind, 3)], tmp_path)[FAULTS]

    def start(first: int, last: int, ends: bool) -> list[str]:
        phases = Phases()
        phases.listen(Injector(given, 0, tmp_path))
        for step in range(first, last):
            phases.enter("step")
            phases.enter("load")
            phases.advance(step + 1)
        if ends:
            phases.enter("finish")
        return done

    return start


def test_a_disk_takes_nothing_for_some_steps(disk) -> None:
    assert disk(0, 3, False) == []
    assert disk(0, 11, False) == ["taken"], "after step 3, and until more than 11 are done"
    assert disk(0, 14, False) == ["taken", "given back"], "it happened: the next start has it back"


@pytest.mark.parametrize("ends", [True, False])
def test_a_disk_is_not_left_so(disk, ends: bool) -> None:
    assert disk(0, 13 if not ends else 6, ends) == ["taken", "given back"]


@needs_root
def test_a_run_directory_is_read_only_whatever_is_open_there(tmp_path: Path) -> None:
    """And what a run had left so is a directory again at the end of its disk."""
    disk = tmp_path / "disk"
    with small_disk(disk, 2):
        run = disk / "run"
        run.mkdir()
        for place in run, disk:
            with (place / "open").open("a") as held:
                machine_faults.make_readonly(place)
                for act in (place / "new").mkdir, (place / "open").unlink, (place / "b").touch:
                    with pytest.raises(OSError, match="Read-only file system"):
                        act()
                held.write("a")
            machine_faults.make_writable(place)
            machine_faults.make_writable(place)  # it is, and stays there
            assert (place / "open").read_text() == "a" and os.path.ismount(disk)
        machine_faults.make_readonly(disk)
    assert not os.path.ismount(disk) and not list(disk.iterdir())


def test_only_root_makes_one_read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    given = faults_variable([Fault("readonly", 3)], tmp_path)[FAULTS]
    with pytest.raises(ValueError, match="readonly: only root may mount"):
        Injector(given, 0, tmp_path)


def test_a_link_is_cut_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[int] = []
    monkeypatch.setattr(faults, "refuse_shared_link", lambda: [])
    monkeypatch.setattr(faults, "cut_link", lambda: done.append(1))
    for _ in range(2):
        phases = Phases()
        given = faults_variable([Fault("cut", 0)], tmp_path)[FAULTS]
        phases.listen(Injector(given, 0, tmp_path))
        phases.enter("step")
        assert done == [1]


@dataclass(frozen=True)
class Played(Network):
    def prefix(self, process: int) -> list[str]:
        return ["env", f"THERE={self.holders[process]}"]


def test_processes_start_where_their_network_is(tmp_path: Path) -> None:
    played = Played(("10.0.0.1", "10.0.0.2"), (7, 8))
    found = drilling._slots(tmp_path, tmp_path, 2, played)
    for slot, there, address in zip(found, (7, 8), played.addresses, strict=True):
        assert slot.program[:3] == ["env", f"THERE={there}", sys.executable]
        assert slot.meeting_point().startswith(f"{address}:")
    assert drilling._slots(tmp_path, tmp_path, 1, None)[0].program[0] == sys.executable


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What a drill makes of a run apart of six steps, whose numbers these are."""

    def judge(numbers: list[int], *, code: int = 0, told: tuple[str, ...] = ()) -> tuple[str, ...]:
        mended: list[int] = []
        stands_on: Any = SimpleNamespace(mend=mended.append)

        def launched(folder, run, given, processes, tell, *, arguments, network):
            assert network is stands_on and arguments == ["--steps", "6"]
            for name, losses in (("undisturbed", list(range(9))), (run, numbers)):
                (folder / name).mkdir()
                lines = (json.dumps({"step": n, "loss": loss}) for n, loss in enumerate(losses))
                (folder / name / "metrics.jsonl").write_text("\n".join(lines) + "\n")
            tell("NOT SAVED step 5")
            tell("launch: all processes start again in 1 s")
            return code, 1.0

        monkeypatch.setattr(drilling, "_launched", launched)
        found = drilling.Happened("cut@3.step:1", 14.0, "process 0", 2, 3.0, ())
        monkeypatch.setattr(drilling, "_happened", lambda *_: [found])
        each = IsolatedRun(
            "cut", (Fault("cut", 3, "step", 1),), 6, told, lambda folder, n: nullcontext(stands_on)
        )
        (happened,) = drilling._run_apart(tmp_path, each, 2, lambda text: None)
        assert mended == [1], "before the next start"
        return happened.violations

    return judge


def test_a_run_on_fewer_processes_is_held_against_one_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[tuple[str, int, int]] = []

    def play(folder, run, given, processes, tell, *, arguments, network=None):
        launched.append((run, len(given), processes))
        (folder / run).mkdir()
        loss = 2 if run == "alone undisturbed" else 1
        (folder / run / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": loss}) + "\n")
        return 0, 1.0

    (tmp_path / "undisturbed").mkdir()
    (tmp_path / "undisturbed" / "metrics.jsonl").write_text('{"step": 1, "loss": 1}\n')
    monkeypatch.setattr(drilling, "_launched", play)
    happened = drilling.Happened("raise@3.load:0", 1.0, "process 0", 0, 1.0, ())
    monkeypatch.setattr(drilling, "_happened", lambda *_: [happened])
    fault = (Fault("raise", 3, "load"),)
    alone = IsolatedRun("alone", fault, 6, (), apart.nothing_special, processes=1)
    (found,) = drilling._run_apart(tmp_path, alone, 4, print)
    assert launched == [("alone undisturbed", 0, 1), ("alone", 1, 1)]
    assert "losses of the alone run differ" in found.violations[0]


def test_a_launch_of_its_own_is_in_no_session_of_the_drills(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which would hear that it is stopped; its words are told, and its exit code counts."""
    script = "import os, sys; print(os.getsid(0) == os.getpid(), *sys.argv[1:]); sys.exit(3)"
    monkeypatch.setattr(
        drilling, "own_command", lambda *words: [sys.executable, "-c", script, *words]
    )
    told: list[str] = []
    each = IsolatedRun(
        "paused", (Fault("pause", 9),), 24, (), apart.nothing_special, as_command=True
    )
    assert drilling._commanded(tmp_path, each, 2, told.append) == 3
    (line,) = told
    assert line.startswith("True launch --processes 2 --fault pause@9.step:0 -- train ")
    assert line.endswith(f"--steps 24 --run-dir {tmp_path / 'paused'}")
    assert [path.name for path in (tmp_path / "paused files").iterdir()] == ["pause@9.step:0"]
    (tmp_path / "paused").mkdir()
    (tmp_path / "paused" / "failures.jsonl").write_text("{}\n")
    (tmp_path / "paused files" / "pause@9.step:0").unlink()
    (tmp_path / "paused files").rmdir()
    drilling._commanded(tmp_path, each, 2, told.append)
    assert not list((tmp_path / "paused files").iterdir()), "it was to end nothing"


def test_a_run_apart_is_the_undisturbed_one_as_far_as_it_goes(ran) -> None:
    """But for its last line, which is evaluated."""
    assert ran([0, 1, 2, 3, 4, 9], told=("NOT SAVED",)) == ()


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"numbers": [0, 1, 2, 3, 3, 5]}, "losses of the cut run differ"),
        ({"numbers": [0, 1, 2, 3]}, "line 5 of metrics.jsonl"),
        ({"numbers": list(range(6)), "code": 69}, "ended with exit code 69"),
        ({"numbers": list(range(6)), "told": ("hangs",)}, "nothing said 'hangs'"),
    ],
)
def test_what_is_wrong_with_a_run_apart_is_told(how, said: str, ran) -> None:
    (violation,) = ran(**how)
    assert said in violation
