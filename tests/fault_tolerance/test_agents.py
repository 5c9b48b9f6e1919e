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
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from scripted import DONE, ROOT, WORKER, alive

from jaxtrain.cluster.phases import Now
from jaxtrain.fault_tolerance.deadlines import Deadlines
from jaxtrain.fault_tolerance.restarts import Restarts
from jaxtrain.fault_tolerance.supervisor import Supervisor
from jaxtrain.machines import agents as of_agents
from jaxtrain.machines import channel as of_channel
from jaxtrain.machines.agents import Agents, _Remote
from jaxtrain.machines.channel import KEY, Channel, Gone, connect, read_address, read_key
from jaxtrain.machines.layouts import MachineLayout
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
        (folder / "worker.py").write_text(WORKER + script + DONE)
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

    def run(self, layouts: dict[int, MachineLayout], *, wait_s: float = 20) -> int:
        roster = Roster(self.agents, layouts, wait_s, self.told.append, 0.5)
        self.made = Supervisor(
            [str(self.folder)],
            roster,
            tell=self.told.append,
            run_dir=self.folder / "run",
            folder=self.folder,
            deadlines=Deadlines(silence=20, step=20),
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


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(of_agents, "GONE_S", GONE_S)
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


TWO = {2: MachineLayout(2)}
ELASTIC = {
    1: MachineLayout(1, ("--one",), "one of two"),
    2: MachineLayout(2, description="two of two"),
}
WAITS = "if start == 0:\n    phases.advance(5)\n    time.sleep(60)\n"


def test_all_done(cluster) -> None:
    found = cluster(
        "print('flags', *sys.argv[2:])\nprint('secret', os.environ.get('JAXTRAIN_KEY'))"
    )
    assert found.run(TWO) == 0
    assert "[0] secret None" in found.told, "it is the agent's alone"
    for process in (0, 1):
        (line,) = [each for each in found.told if each.startswith(f"[{process}] flags")]
        assert "--coordinator 127.0.0.1:" in line and line.endswith(f"2 --process {process}")
        assert f"[{process}] begins 0" in found.told
    for name in "ab":
        assert found.popen[name].wait(120) == 0, "agents end as the run does"
    assert "goodput" in found.told[-1]


def test_a_lost_machine_is_named_and_the_run_goes_on_without_it_until_it_is_back(cluster) -> None:
    grows = "\nwhile not asked and '--one' in sys.argv:\n    time.sleep(0.05)\n"
    found = cluster(WAITS + grows + "if asked:\n    sys.exit(75)")

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
    obeys = "while start == 0 and not asked:\n    time.sleep(0.05)\nif asked:\n    sys.exit(75)"
    found = cluster("phases.advance(5)\n" + obeys)

    def happens() -> None:
        found.until("[1] begins 0")
        found.until("[0] begins 0")
        time.sleep(0.3)
        found.popen["a"].send_signal(signal.SIGTERM)
        time.sleep(0.3)
        for process in (0, 1):  # of several processes one is asked, and all leave
            with suppress(ProcessLookupError):
                os.kill(found.pid(process), signal.SIGTERM)

    threading.Thread(target=happens, daemon=True).start()
    assert found.run(ELASTIC) == 0
    assert found.popen["a"].wait(120) == 75 and found.popen["b"].wait(10) == 0
    assert any("machine a is to go; the run goes on without it" in each for each in found.told)
    assert "[0] begins 1" in found.told and "[1] begins 1" not in found.told
    assert not (found.folder / "run" / "failures.jsonl").exists()


def test_an_agent_whose_launch_is_gone_ends_its_process_and_looks_for_another(cluster) -> None:
    found = cluster(WAITS)

    def happens() -> None:
        found.until("[0] begins 0")
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
        said, _ = other.communicate(timeout=120)
        assert other.returncode == 69 and f"does not have the same {KEY}" in said
        with pytest.raises(Gone):
            connect(found.agents.address[:2], b"x" * 16)
        assert found.agents.present() == []
        found.agent("a"), found.agent("b")
        assert found.run(TWO) == 0


def test_who_has_no_key_cannot_have_one_agent_answer_for_a_launch() -> None:
    """A stranger listens where a launch did, and passes what one agent asks on to another."""
    server, ends = socket.create_server(("127.0.0.1", 0)), list[str]()

    def agent() -> None:
        try:
            connect(server.getsockname(), SECRET.encode()).close()
            ends.append("it takes the stranger for its launch")
        except Gone:
            ends.append("gone")

    threads = [threading.Thread(target=agent) for _ in range(2)]
    for thread in threads:
        thread.start()
    with server:
        one, other = (Connection(server.accept()[0].detach()) for _ in range(2))
    how = b"{sha256}" if sys.version_info >= (3, 12) else b""
    with one, other:
        one.send_bytes(b"#CHALLENGE#" + how + bytes(40))
        one.recv_bytes()
        one.send_bytes(b"#WELCOME#")
        other.send_bytes(one.recv_bytes())
        one.send_bytes(other.recv_bytes())
        assert one.recv_bytes() == b"#FAILURE#"
    for thread in threads:
        thread.join()
    assert ends == ["gone", "gone"]


def test_a_message_that_does_not_end_is_not_waited_for(monkeypatch) -> None:
    monkeypatch.setattr(of_channel, "STALLED_S", 1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        ends: list[Channel] = []
        address = server.getsockname()
        joins = threading.Thread(target=lambda: ends.append(connect(address, SECRET.encode())))
        joins.start()
        channel = Channel(server.accept()[0], SECRET.encode(), listens=True)
        joins.join()
        ends[0].send({"is": "whole"})
        assert channel.receive(1) == {"is": "whole"}
        assert channel.receive(0.01) is None
        os.write(ends[0]._connection.fileno(), b"\0\0\0\7half")
        began = time.monotonic()
        with pytest.raises(Gone):
            channel.receive(1)
        assert 0.9 < time.monotonic() - began < 25
        for each in (channel, *ends):
            each.close()


def test_machines_meet_where_all_reach_the_first(cluster) -> None:
    """One that came by the machine's own address is no place to meet for others."""
    found = cluster("", names="")
    for name, host in (("a", "127.0.1.1"), ("b", "10.0.0.2"), ("c", "10.0.0.3")):
        made = found.agents._machines[name] = of_agents._Agent(name, host, None, None)  # type: ignore[arg-type]
        made._port = 7000
    assert [each.name for each in found.agents.present()] == ["b", "c", "a"]
    found.agents._machines.clear()


@pytest.mark.parametrize("line", ["'x' * 9_000_000", "'\\u00e9' * 1_000_000"])
def test_a_long_line_is_cut_and_costs_nothing(cluster, line: str) -> None:
    found = cluster(f"print({line})")
    assert found.run(TWO) == 0
    assert max(map(len, found.told)) == 2**16 + len("[0] ")


def test_a_growth_that_fails_is_no_growth_later(cluster) -> None:
    """All are asked, and one fails as it saves; the next start stops of its own accord."""
    script = """
while "--one" in sys.argv and not asked:
    time.sleep(0.05)
os._exit(3 if "--one" in sys.argv else 75)
"""
    found = cluster(script, names="a")
    threading.Thread(
        target=lambda: (found.until("[0] begins 0"), found.agent("b")), daemon=True
    ).start()
    found.until("machine a is here")
    assert found.run(ELASTIC, wait_s=1) == 75
    assert any("there are more machines" in each for each in found.told)
    assert found.told.count("[0] begins 1") == 1 and "[0] begins 2" not in found.told


def test_two_machines_of_one_name_are_told(cluster, monkeypatch) -> None:
    found = cluster("", names="a")
    found.until("machine a is here")
    first, second = found.popen["a"], found.agent("a")
    said, _ = second.communicate(timeout=120)
    assert second.returncode == 2 and first.poll() is None
    assert said.count("there is a machine named a") == 2, "at once, and at the end"
    assert said.endswith("give this one another --name\n")
    third = found.agent("a")
    assert third.stdout is not None and "tries again" in third.stdout.readline()
    first.kill()
    found.agent("b")
    assert found.run(TWO) == 0, "it takes the place of the first"


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
    assert (sample.sampled_at, sample.stacks, found.code) == (48.0, "stacks", None)
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
