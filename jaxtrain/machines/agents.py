"""A supervisor's side of the other machines: each has an agent, which has come to it.

The agents connect, and connect again whenever they have lost the supervisor, so machines may come,
go and come back while a run goes on. What an agent tells of its process is kept here as it was last
told: a machine that is gone has said what it was at.
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
from jaxtrain.cluster.sampler import Sample
from jaxtrain.machines.channel import Channel, Gone
from jaxtrain.machines.machine import Machine, Running
from jaxtrain.machines.workers import Tell, ending, kind_of

TOLD_S = 0.5
"""How often each end tells the other that it is there."""

GONE_S = 10.0
"""Without a word for so long the other end is gone."""

LEAVE_S = 5.0
"""How long agents are waited for when they are let go."""

_starts = itertools.count(1)


class Agents:
    """The machines whose agents have come to `address`. Raises OSError where nobody can listen
    there. tell: takes a line when a machine comes or goes."""

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
        """(host, port) at which agents are waited for."""
        return self._listening.getsockname()

    def present(self) -> list[Machine]:
        """In the order in which they came; last those that are known here by an address which no
        other machine reaches them at, for the processes meet on the first."""
        with self._lock:
            usable = [each for each in self._machines.values() if each.usable]
        usable.sort(key=lambda each: ip_address(each.host).is_loopback)
        return [*usable]

    def close(self, code: int) -> None:
        """Let the agents go, to end with that exit code."""
        self._closed.set()
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)  # who waits there goes on
        self._listening.close()
        with self._lock:
            machines = list(self._machines.values())
        for each in machines:
            each.say({"do": "leave", "code": code})
        until = time.monotonic() + LEAVE_S
        for each in machines:  # the end that closes first may take back what it has just said
            each.over.wait(max(0.0, until - time.monotonic()))
            each.channel.close()
        self._lines.put(None)
        self._telling.join(LEAVE_S)

    def _later(self, tell: Tell) -> Tell:
        """`tell`, from a thread of its own: a terminal that nobody reads holds up no machine."""
        return lambda line: self._lines.put((tell, line))

    def _tell_lines(self) -> None:
        for tell, line in iter(self._lines.get, None):
            tell(line)

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                found, _ = self._listening.accept()
            except OSError:  # closed; or one that was gone at once, or too many open files
                self._closed.wait(TOLD_S)
                continue
            threading.Thread(target=self._take, args=(found,), daemon=True).start()

    def _prove(self, found: socket.socket) -> Channel | None:
        """Of one that has the key; another is told once."""
        host = found.getpeername()[0]
        try:
            return Channel(found, self._key, listens=True)
        except Gone as error:
            if host not in self._strangers:
                self._strangers.add(host)
                self._tell(f"launch: one at {host} is not let in: {error}")
            return None

    def _take(self, found: socket.socket) -> None:
        """One agent, from its coming to its end."""
        with suppress(Gone, OSError):
            if (channel := self._prove(found)) is None:
                return None
            said = channel.receive(GONE_S)
            if said is None or said.get("is") != "agent":
                return channel.close()
            name = str(said["name"])
            with self._lock:
                if (before := self._machines.get(name)) and not before.gone:
                    channel.send({"do": "refuse", "why": f"there is a machine named {name}"})
                    return channel.close()
                host = str(ip_address(said["host"]))
                machine = self._machines[name] = _Agent(name, host, channel, self._later)
            self._tell(f"launch: machine {name} is here, at {machine.host}")
            machine.listen()
            if not self._closed.is_set():
                self._tell(f"launch: machine {name} is gone")
        return None

    def _watch(self) -> None:
        """Tell all that this end is there; give up those that say nothing."""
        while not self._closed.wait(TOLD_S):
            with self._lock:
                machines = [each for each in self._machines.values() if not each.gone]
            for each in machines:
                each.say({"do": "nothing"})
                if time.monotonic() - each.heard > GONE_S:
                    each.channel.close()


class _Agent:
    """One machine (`machines.Machine`)."""

    def __init__(
        self, name: str, host: str, channel: Channel, later: Callable[[Tell], Tell]
    ) -> None:
        """later: makes of what takes a line what does so soon."""
        self._later = later
        self.name, self.host, self.channel, self.where = name, host, channel, f" on {name}"
        self.heard, self.gone, self.leaving, self._port = time.monotonic(), False, False, 0
        self._running: dict[int, _Remote] = {}
        self.over = threading.Event()

    @property
    def usable(self) -> bool:
        """Whether it can take a process: it is there, and has said at which port one may meet."""
        return bool(self._port) and not self.gone and not self.leaving

    def meeting_point(self) -> str:
        return f"{self.host}:{self._port}"

    def start(
        self, process: int, command: Sequence[str], environ: Mapping[str, str], tell: Tell
    ) -> Running:
        start = next(_starts)
        made = self._running[start] = _Remote(self, start, process, self._later(tell))
        folder = str(Path.cwd())
        asked = {"process": process, "command": list(command), "environ": dict(environ)}
        self.say({"do": "start", "start": start, "folder": folder, **asked})
        if self.gone:
            made.lost()
        return made

    def say(self, message: Mapping[str, Any]) -> None:
        """To the agent, if it is there."""
        try:
            self.channel.send(message)
        except Gone:
            self.channel.close()

    def listen(self) -> None:
        """Until it is gone."""
        try:
            while True:
                message = self.channel.receive(GONE_S)
                if message is not None:
                    self.heard = time.monotonic()
                    self._hear(message)
        except (Gone, KeyError, TypeError, ValueError):  # the last three: a stranger's words
            self.channel.close()
        finally:
            self.gone = True
            self.over.set()
            for each in list(self._running.values()):
                each.lost()

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
    """A process of another machine (`machines.Running`)."""

    def __init__(self, machine: _Agent, start: int, process: int, tell: Tell) -> None:
        self.process, self._machine, self._start, self._tell = process, machine, start, tell
        self.last_line, self.lost_another, self.ended_at = "", False, math.inf
        self.code: int | None = None
        self._sample = Sample(Now("start", 0, time.monotonic()))
        self._state, self._ended, self._lost = "", threading.Event(), False

    @property
    def ending(self) -> str:
        return "the loss of its machine" if self._lost else ending(self.code or 0)

    @property
    def kind(self) -> str:
        return "lost" if self._lost else kind_of(self.code or 0)

    def sample(self) -> Sample:
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
        # An agent that is stopped cannot say so; its process is killed when it finds itself alone.
        if not self._ended.wait(GONE_S):
            self.lost()

    def lost(self) -> None:
        """Its machine is gone, and it with it."""
        if self.code is None:
            self._lost, self.ended_at = True, self._machine.heard
            self.code = FAILED
        self._ended.set()

    def hear(self, message: Mapping[str, Any], now: float) -> None:
        """What its agent tells. Times are by the agent's clock, and become this machine's."""
        if message["is"] == "line":
            self.last_line = message["text"].strip() or self.last_line
            self._tell(message["text"])
        if message["is"] != "state":
            return
        ahead = now - message["clock"]
        self._state, self.lost_another = message["state"], message["lost_another"]
        if (told := message["sample"]) is not None:
            (at, *rest) = told["rest"]
            said = Now(*told["now"])
            said = said._replace(since=said.since + ahead)
            self._sample = Sample(said, at + ahead if at else 0.0, *rest)
        if message["code"] is not None and self.code is None:
            self.ended_at = message["ended_at"] + ahead
            self.code = message["code"]
            self._ended.set()
