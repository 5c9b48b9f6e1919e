"""The supervisor's side of other machines: each has an agent that connects to the supervisor.

Agents reconnect whenever they lose the supervisor, so machines may come, go and return during a
run. The last report of each agent's process is kept here, even after its machine is gone.
"""

from __future__ import annotations

import itertools
import math
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from jaxtrain.cluster.exit_codes import FAILED, PREEMPTED
from jaxtrain.cluster.phases import Now
from jaxtrain.cluster.sampler import ProcessSample
from jaxtrain.machines.channel import Channel, Gone
from jaxtrain.machines.machine import Machine, RunningProcess
from jaxtrain.machines.pauses import Pauses
from jaxtrain.machines.workers import ending, kind_of
from jaxtrain.notices import Tell

TOLD_S = 0.5
"""Seconds between heartbeats of each end."""

GONE_S = 10.0
"""Seconds without a message after which the other end counts as gone; those in which this end was
paused itself do not count."""

LEAVE_S = 5.0
"""Seconds to wait for agents that are released."""

_starts = itertools.count(1)


class Agents:
    """The machines whose agents have connected to `address`. Raises OSError if it cannot listen
    there. tell: prints a line when a machine comes or goes."""

    come_and_go = True

    def __init__(self, address: tuple[str, int], key: bytes, tell: Tell) -> None:
        self._listening, self._key = socket.create_server(address), key
        self._lines: SimpleQueue[tuple[Tell, str] | None] = SimpleQueue()
        self._tell, self._strangers = self._later(tell), set[str]()
        self._machines: dict[str, _Agent] = {}
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._telling = threading.Thread(target=self._tell_lines, daemon=True)
        self._telling.start()
        for act in (self._accept, self._watch):
            threading.Thread(target=act, name=act.__name__, daemon=True).start()

    @property
    def address(self) -> Any:
        """(host, port) at which agents connect."""
        return self._listening.getsockname()

    def present(self) -> list[Machine]:
        """Usable machines, in the order in which they came; those known by a loopback address last,
        since other machines cannot reach it and the processes meet on the first."""
        with self._lock:
            usable = [machine for machine in self._machines.values() if machine.usable]
        usable.sort(key=lambda machine: ip_address(machine.host).is_loopback)
        return [*usable]

    def close(self, code: int) -> None:
        """Releases the agents, which end with exit code `code`."""
        self._closed.set()
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listening.close()
        with self._lock:
            machines = list(self._machines.values())
        for machine in machines:
            machine.say({"do": "leave", "code": code})
        deadline = time.monotonic() + LEAVE_S
        for machine in machines:  # a close may discard the message just sent
            machine.over.wait(max(0.0, deadline - time.monotonic()))
            machine.channel.close()
        self._lines.put(None)
        self._telling.join(LEAVE_S)

    def _later(self, tell: Tell) -> Tell:
        """A `tell` that runs in a thread of its own: a blocked terminal delays no machine."""
        return lambda line: self._lines.put((tell, line))

    def _tell_lines(self) -> None:
        for tell, line in iter(self._lines.get, None):
            tell(line)

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                sock, _ = self._listening.accept()
            except OSError:  # closed; or one that was gone at once, or too many open files
                self._closed.wait(TOLD_S)
                continue
            threading.Thread(target=self._take, args=(sock,), daemon=True).start()

    def _prove(self, sock: socket.socket) -> Channel | None:
        """The channel to an agent that has the key, else None; a stranger is reported once."""
        host = sock.getpeername()[0]
        try:
            return Channel(sock, self._key, listens=True)
        except Gone as error:
            if host not in self._strangers:
                self._strangers.add(host)
                self._tell(f"launch: one at {host} is not let in: {error}")
            return None

    def _take(self, sock: socket.socket) -> None:
        """Serves one agent, from its connection to its end."""
        with suppress(Gone, OSError):
            if (channel := self._prove(sock)) is None:
                return None
            greeting = channel.receive(GONE_S)
            if greeting is None or greeting.get("is") != "agent":
                return channel.close()
            name = str(greeting["name"])
            with self._lock:
                if (previous := self._machines.get(name)) and not previous.gone:
                    channel.send({"do": "refuse", "why": f"there is a machine named {name}"})
                    return channel.close()
                host = str(ip_address(greeting["host"]))
                machine = self._machines[name] = _Agent(name, host, channel, self._later)
            self._tell(f"launch: machine {name} is here, at {machine.host}")
            machine.listen()
            if not self._closed.is_set():
                self._tell(f"launch: machine {name} is gone")
        return None

    def _watch(self) -> None:
        """Sends heartbeats to all agents; drops those that are silent."""
        pauses = Pauses(TOLD_S)
        while not self._closed.wait(TOLD_S):
            pauses.look()
            now = time.monotonic()  # what is sent below may take long
            with self._lock:
                machines = [machine for machine in self._machines.values() if not machine.gone]
            for machine in machines:
                machine.say({"do": "nothing"})
                if now - pauses.moved(machine.heard) > GONE_S:
                    machine.channel.close()


class _Agent:
    """One machine (`machines.Machine`)."""

    def __init__(
        self, name: str, host: str, channel: Channel, later: Callable[[Tell], Tell]
    ) -> None:
        """later: turns a `tell` into one that another thread runs."""
        self._later = later
        self.name, self.host, self.channel, self.where = name, host, channel, f" on {name}"
        self.heard, self.gone, self.leaving, self._port = time.monotonic(), False, False, 0
        self._running: dict[int, _Remote] = {}
        self.over = threading.Event()

    @property
    def usable(self) -> bool:
        """True if it can take a process: it is connected, and has reported a free port."""
        return bool(self._port) and not self.gone and not self.leaving

    def meeting_point(self) -> str:
        return f"{self.host}:{self._port}"

    def start(
        self, process: int, command: Sequence[str], environ: Mapping[str, str], tell: Tell
    ) -> RunningProcess:
        start = next(_starts)
        remote = self._running[start] = _Remote(self, start, process, self._later(tell))
        folder = str(Path.cwd())
        request = {"process": process, "command": list(command), "environ": dict(environ)}
        self.say({"do": "start", "start": start, "folder": folder, **request})
        if self.gone:
            remote.lost()
        return remote

    def say(self, message: Mapping[str, Any]) -> None:
        """Sends a message to the agent, if it is connected."""
        try:
            self.channel.send(message)
        except Gone:
            self.channel.close()

    def listen(self) -> None:
        """Handles its messages until it is gone."""
        try:
            while True:
                message = self.channel.receive(GONE_S)
                if message is not None:
                    self.heard = time.monotonic()
                    self._hear(message)
        except (Gone, KeyError, TypeError, ValueError):  # the last three: malformed messages
            self.channel.close()
        finally:
            self.gone = True
            self.over.set()
            for remote in list(self._running.values()):
                remote.lost()

    def _hear(self, message: dict[str, Any]) -> None:
        self._port = message.get("port", self._port)
        self.leaving |= message["is"] == "leaving"
        if running := self._running.get(message.get("start", 0)):
            running.hear(message, self.heard)
            if running.code is not None and message["is"] == "state":
                del self._running[message["start"]]
        if self.leaving and not self._running:
            self.say({"do": "leave", "code": PREEMPTED})


class _Remote:
    """A process of another machine (`machines.RunningProcess`)."""

    def __init__(self, machine: _Agent, start: int, process: int, tell: Tell) -> None:
        self.process, self._machine, self._start, self._tell = process, machine, start, tell
        self.last_line, self.lost_another, self.ended_at = "", False, math.inf
        self.code: int | None = None
        self._sample = ProcessSample(Now("start", 0, time.monotonic()))
        self._state, self._ended, self._lost = "", threading.Event(), False

    @property
    def ending(self) -> str:
        return "the loss of its machine" if self._lost else ending(self.code or 0)

    @property
    def kind(self) -> str:
        return "lost" if self._lost else kind_of(self.code or 0)

    def sample(self) -> ProcessSample:
        return self._sample

    def state(self) -> str:
        return self._state

    def send(self, number: int) -> None:
        if self.code is None:
            self._machine.say({"do": "signal", "start": self._start, "number": int(number)})

    def kill(self) -> None:
        if self.code is None:
            self._machine.say({"do": "kill", "start": self._start})

    def join(self) -> None:
        # A stopped agent cannot answer; it kills its process once it finds the supervisor gone.
        pauses, began = Pauses(TOLD_S), time.monotonic()
        while not self._ended.wait(TOLD_S):
            pauses.look()
            if time.monotonic() - pauses.moved(began) > GONE_S:
                return self.lost()
        return None

    def lost(self) -> None:
        """Marks the process as lost with its machine."""
        if self.code is None:
            self._lost, self.ended_at = True, self._machine.heard
            self.code = FAILED
        self._ended.set()

    def hear(self, message: Mapping[str, Any], now: float) -> None:
        """Handles a message of its agent. The agent's clock is converted to this machine's."""
        if message["is"] == "line":
            self.last_line = message["text"].strip() or self.last_line
            self._tell(message["text"])
        if message["is"] != "state":
            return
        ahead = now - message["clock"]
        self._state, self.lost_another = message["state"], message["lost_another"]
        if (record := message["sample"]) is not None:
            (sampled_at, *stacks) = record["rest"]
            report = Now(*record["now"])
            report = report._replace(since=report.since + ahead)
            self._sample = ProcessSample(report, sampled_at + ahead if sampled_at else 0.0, *stacks)
        if message["code"] is not None and self.code is None:
            self.ended_at = message["ended_at"] + ahead
            self.code = message["code"]
            self._ended.set()
