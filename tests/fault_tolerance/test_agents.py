"""A supervisor and the agents of other machines, here all of this one; no JAX in the processes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
from scripted import ROOT, WORKER

from jaxtrain.cluster.phases import Now
from jaxtrain.fault_tolerance.deadlines import Deadlines
from jaxtrain.fault_tolerance.restarts import Restarts
from jaxtrain.fault_tolerance.supervisor import Supervisor
from jaxtrain.machines import agents as of_agents
from jaxtrain.machines.agents import Agents, _Remote
from jaxtrain.machines.channel import KEY, Gone, connect, read_address, read_key
from jaxtrain.machines.layouts import Layout
from jaxtrain.machines.roster import Roster

SECRET = "0123456789abcdef"
GONE_S = 2.0

AGENT = """
import os, signal, sys
from jaxtrain.machines import agent
from jaxtrain.machines.channel import read_key

agent.GONE_S = 2.0
made = agent.Agent(
    ("127.0.0.1", int(sys.argv[1])), read_key(os.environ), name=sys.argv[2], wait_s=4,
    program=[sys.executable, sys.argv[3]], tell=lambda line: print(line, flush=True),
)
signal.signal(signal.SIGTERM, lambda *_: made.leave())
sys.exit(made.run())
"""


class Cluster:
    """Agents of machines `a`, `b`, ... and a run on them. script: what each process does."""

    def __init__(self, folder: Path, script: str) -> None:
        self.folder, self.told = folder, list[str]()
        (folder / "worker.py").write_text(WORKER + script)
        self.agents = Agents(("127.0.0.1", 0), SECRET.encode(), self.told.append)
        self.popen: dict[str, subprocess.Popen[str]] = {}
        self.all: list[subprocess.Popen[str]] = []

    def agent(self, name: str, secret: str = SECRET) -> subprocess.Popen[str]:
        place = [str(self.agents.address[1]), name, str(self.folder / "worker.py")]
        found = self.popen[name] = subprocess.Popen(
            [sys.executable, "-c", AGENT, *place],
            env={"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"], KEY: secret},
            stdout=subprocess.PIPE,
            text=True,
        )
        self.all.append(found)
        return found

    def run(self, layouts: dict[int, Layout], **rule) -> int:
        roster = Roster(self.agents, layouts, 20, self.told.append)
        self.made = Supervisor(
            [str(self.folder)],
            roster,
            tell=self.told.append,
            run_dir=self.folder / "run",
            folder=self.folder,
            deadlines=Deadlines(silence=20, step=20, **rule),
            restarts=Restarts(first_wait_s=0.1),
        )
        code = self.made.run()
        self.agents.close(code)
        return code

    def until(self, said: str) -> None:
        while not any(said in line for line in list(self.told)):
            time.sleep(0.02)

    def pid(self, process: int) -> int:
        return int((self.folder / f"pid{process}").read_text())


def alive(pid: int) -> bool:
    state = Path(f"/proc/{pid}/stat")
    return state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(of_agents, "GONE_S", GONE_S)
    monkeypatch.setattr("jaxtrain.machines.roster.REJOIN_S", 0.5)
    made: list[Cluster] = []

    def make(script: str, names: str = "ab") -> Cluster:
        made.append(Cluster(tmp_path, script))
        for name in names:
            made[-1].agent(name)
        return made[-1]

    yield make
    for each in made:
        each.agents.close(0)
        for popen in each.all:
            popen.kill()
            with popen:
                pass


TWO = {2: Layout(2)}
ELASTIC = {1: Layout(1, ("--one",), "one of two"), 2: Layout(2, told="two of two")}
WAITS = "if start == 0:\n    phases.advance(5)\n    time.sleep(60)\n"


def test_all_done(cluster) -> None:
    found = cluster("print('flags', *sys.argv[2:])")
    assert found.run(TWO) == 0
    for process in (0, 1):
        (line,) = [each for each in found.told if each.startswith(f"[{process}] flags")]
        assert "--coordinator 127.0.0.1:" in line and line.endswith(f"2 --process {process}")
        assert f"[{process}] begins 0" in found.told
    for name in "ab":
        assert found.popen[name].wait(10) == 0, "agents end as the run does"
    assert "goodput" in found.told[-1]


def test_a_lost_machine_is_named_and_the_run_goes_on_without_it_until_it_is_back(cluster) -> None:
    grows = "\nwhile not asked and '--one' in sys.argv:\n    time.sleep(0.05)\n"
    found = cluster(WAITS + grows + "sys.exit(75 if asked else 0)")

    def happens() -> None:
        found.until("[1] begins 0")
        time.sleep(0.7)
        lost = found.made.roster.hosts[1].name
        pid = found.pid(1)
        found.popen[lost].kill()
        found.until("[0] begins 1")
        assert not alive(pid), "its process is gone with it"
        found.agent(lost)

    threading.Thread(target=happens, daemon=True).start()
    assert found.run(ELASTIC) == 0
    told = found.told
    (line,) = [each for each in told if "ended by the loss of its machine" in each]
    assert line.startswith("launch: process 1 of 2 on ") and "after step 5, in phase step" in line
    at = [told.index(each) for each in (line, "[0] begins 1", "[0] begins 2", "[1] begins 1")]
    assert at[0] < at[1] < min(at[2:]), "one alone, then both"
    assert any("on 1 machines, of 2 wanted and 1 here: one of two" in each for each in told)
    assert any("there are more machines; all save, and begin again" in each for each in told)


def test_an_agent_that_stands_still_is_lost_and_ends_its_process_when_it_wakes(cluster) -> None:
    found, pids = cluster(WAITS), []

    def happens() -> None:
        found.until("[1] begins 0")
        stopped = found.popen[found.made.roster.hosts[1].name]
        pids.append(found.pid(1))
        stopped.send_signal(signal.SIGSTOP)
        found.until("[0] begins 1")
        stopped.send_signal(signal.SIGCONT)

    threading.Thread(target=happens, daemon=True).start()
    pids = []
    threading.Thread(
        target=lambda: (found.until("[1] begins 0"), pids.append(found.pid(1)))
    ).start()
    began = time.monotonic()
    assert found.run(ELASTIC) == 0 and time.monotonic() - began < 20
    assert any("ended by the loss of its machine" in each for each in found.told)
    deadline = time.monotonic() + 10
    while alive(pids[0]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(pids[0])


def test_a_machine_that_is_to_go_has_all_save_and_the_others_go_on(cluster) -> None:
    """As a scheduler takes back one node: SIGTERM to its agent."""
    obeys = "while start == 0 and not asked:\n    time.sleep(0.05)\nsys.exit(75 if asked else 0)"
    found = cluster("phases.advance(5)\n" + obeys)

    def happens() -> None:
        found.until("[1] begins 0")
        time.sleep(0.3)
        found.popen["a"].send_signal(signal.SIGTERM)
        time.sleep(0.3)
        for process in (0, 1):  # of several processes one is asked, and all leave
            with suppress(ProcessLookupError):
                os.kill(found.pid(process), signal.SIGTERM)

    threading.Thread(target=happens, daemon=True).start()
    assert found.run(ELASTIC) == 0
    assert found.popen["a"].wait(10) == 75 and found.popen["b"].wait(10) == 0
    assert any("machine a is to go; the run goes on without it" in each for each in found.told)
    assert "[0] begins 1" in found.told and "[1] begins 1" not in found.told
    assert not (found.folder / "run" / "failures.jsonl").exists()


def test_an_agent_whose_launch_is_gone_ends_its_process_and_looks_for_another(cluster) -> None:
    found = cluster(WAITS)

    def happens() -> None:
        found.until("[1] begins 0")
        pid = found.pid(0)
        found.made.roster.hosts[0].channel.close()
        found.until("[0] begins 1")
        assert not alive(pid)

    threading.Thread(target=happens, daemon=True).start()
    assert found.run(TWO) == 0, "both are there again"


def test_strangers_are_not_let_in(cluster) -> None:
    found = cluster("", names="")
    with socket.create_connection(found.agents.address[:2]) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        other = found.agent("a", secret="another secret...")
        said, _ = other.communicate(timeout=20)
        assert other.returncode == 69 and f"does not have the same {KEY}" in said
        with pytest.raises(Gone):
            connect(found.agents.address[:2], b"x" * 16)
        assert found.agents.present() == []
        found.agent("a"), found.agent("b")
        assert found.run(TWO) == 0


def test_two_machines_of_one_name_are_told(cluster) -> None:
    found = cluster("", names="a")
    found.until("machine a is here")
    first, second = found.popen["a"], found.agent("a")
    assert second.stdout is not None
    while "there is a machine named a" not in (line := second.stdout.readline()):
        assert second.poll() is None
    assert "give this one another --name" in line and first.poll() is None
    first.kill()
    found.agent("b")
    assert found.run(TWO) == 0, "the second takes its place"


def test_what_cannot_be_started_there_is_told(cluster, tmp_path: Path, monkeypatch) -> None:
    found = cluster("")
    (gone := tmp_path / "gone").mkdir()
    monkeypatch.chdir(gone)
    threading.Thread(target=lambda: (found.until("is here"), gone.rmdir())).start()
    monkeypatch.setattr(of_agents.Path, "cwd", lambda: gone)
    assert found.run(TWO) == 2
    assert any("cannot start a process in" in each for each in found.told)


def test_times_of_another_machine_become_this_ones() -> None:
    """Its clock is 1000 s ahead."""
    found = _Remote(None, 1, 0, print)  # type: ignore[arg-type]
    now = ["step", 7, 1040.0, 0.5, 2, {"step": 3.0}]
    told = {"now": now, "rest": [1048.0, "stacks"]}
    message = {"is": "state", "clock": 1050.0, "sample": told, "state": "", "lost_another": True}
    found.hear({**message, "code": None, "ended_at": 0.0}, 50.0)
    sample = found.sample()
    assert sample.now == Now("step", 7, 40.0, 0.5, 2, {"step": 3.0})
    assert (sample.at, sample.stacks, found.code) == (48.0, "stacks", None)
    found.hear({**message, "code": -9, "ended_at": 1049.5}, 50.0)
    assert (found.code, found.ended_at, found.kind, found.lost_another) == (
        -9,
        49.5,
        "killed",
        True,
    )


def test_addresses_and_keys_are_read() -> None:
    assert read_address("node0:7000", "--listen") == ("node0", 7000)
    for text in ("node0", "7000", ":7000", "node0:x", "node0:0", "node0:70000"):
        with pytest.raises(ValueError, match=r"--listen .*; use HOST:PORT"):
            read_address(text, "--listen")
    assert read_key({KEY: SECRET}) == SECRET.encode()
    for environ in ({}, {KEY: "short"}):
        with pytest.raises(ValueError, match="to the same secret of 16 or more"):
            read_key(environ)
