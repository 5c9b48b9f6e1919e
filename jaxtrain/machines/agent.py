"""`jaxtrain agent`: starts and ends the process of its machine for a supervisor elsewhere."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from jaxtrain.cluster.exit_codes import EXHAUSTED, PREEMPTED, REFUSED
from jaxtrain.cluster.join import free_port
from jaxtrain.files.temporary import temporary_folder
from jaxtrain.machines.agents import GONE_S, TOLD_S
from jaxtrain.machines.channel import KEY, Channel, Gone, connect
from jaxtrain.machines.pauses import Pauses
from jaxtrain.machines.workers import Worker
from jaxtrain.notices import Tell

TICK_S = 0.1
"""Seconds between checks for exits."""

LONGEST_LINE = 2**16
"""Most characters of a line that are passed on."""

AGAIN_S = 1.0
"""Seconds between two tries to reach the supervisor."""


class Agent:
    """The agent of one machine. address: of the supervisor. name: of the machine, unique. program:
    prefix of each command. wait_s: how long it tries to reach a missing supervisor."""

    def __init__(
        self,
        address: tuple[str, int],
        key: bytes,
        *,
        name: str,
        program: Sequence[str],
        wait_s: float,
        tell: Tell,
    ) -> None:
        self._address, self._key, self._name, self._wait_s = address, key, name, wait_s
        self._program, self._tell = program, tell
        self._worker: Worker | None = None
        self._start, self._leaving, self._reported_at, self._port = 0, False, 0.0, 0
        self._is_taken = False
        self._refusals = 0

    def run(self) -> int:
        """Serves until the supervisor releases it or cannot be reached; returns the exit code."""
        with temporary_folder("agent") as folder:
            self._file = folder / "sample"
            while True:
                channel = self._reach()
                if channel is None:
                    return PREEMPTED if self._leaving else EXHAUSTED
                self._is_taken = False
                try:
                    code = self._serve(channel)
                except Gone as error:
                    self._tell(f"agent: the launch is gone ({error}); what ran for it is ended")
                    code = None
                finally:
                    self._end()
                    channel.close()
                if code is not None:
                    return code

    def leave(self) -> None:
        """Marks this machine as leaving; for a signal handler. `run` then tells the supervisor, and
        sends SIGTERM to the process here, which asks all processes to save, and ends."""
        self._leaving = True

    def _reach(self) -> Channel | None:
        """Connects to the supervisor; None if it is not reached in time, or this machine leaves."""
        began, pauses, reported = time.monotonic(), Pauses(AGAIN_S), ""
        address = ":".join(map(str, self._address))
        while not self._leaving:
            try:
                channel = connect(self._address, self._key)
                channel.send({"is": "agent", "name": self._name, "host": channel.host})
                return channel
            except OSError as error:
                why = str(error)
            if why != reported:
                reported = why
                self._tell(f"agent: {address}: {why}; tries again for {self._wait_s:g} s")
            if time.monotonic() - pauses.moved(began) > self._wait_s:
                self._tell(f"agent: no launch at {address} took it for {self._wait_s:g} s: {why}")
                return None
            pauses.sleep()
        return None

    def _serve(self, channel: Channel) -> int | None:
        """Handles requests; returns the exit code when released."""
        heard, announced, terminated, self._reported_at = time.monotonic(), False, 0, 0.0
        pauses = Pauses(TICK_S)
        while True:
            if (message := channel.receive(TICK_S)) is not None:
                heard = time.monotonic()
                if message["do"] == "leave":
                    return message["code"]
                if message["do"] == "refuse":
                    return self._refused(message["why"])
                self._do(message, channel)
                self._taken()
            pauses.look()
            if time.monotonic() - pauses.moved(heard) > GONE_S:
                raise Gone(f"nothing was heard of it for {GONE_S:g} s")
            self._say(channel)
            if self._leaving and not announced:
                announced = True
                channel.send({"is": "leaving"})
            if self._leaving and self._worker is not None and terminated != self._start:
                terminated = self._start
                self._worker.send(signal.SIGTERM)

    def _taken(self) -> None:
        """Reports once that the supervisor accepted this machine."""
        if not self._is_taken:
            self._is_taken, self._refusals = True, 0
            self._tell(f"agent: machine {self._name} is with the launch")

    def _refused(self, why: str) -> int | None:
        """Returns an exit code if the refusal lasts. After a lost connection, an agent may return
        before the supervisor has noticed, and is refused for a while."""
        self._refusals += 1
        if self._refusals == 1:
            self._tell(f"agent: {why}; tries again, or give this one another --name")
        if self._refusals * AGAIN_S > 2 * GONE_S:
            self._tell(f"agent: {why}; give this one another --name")
            return REFUSED
        time.sleep(AGAIN_S)
        return None

    def _do(self, message: dict[str, Any], channel: Channel) -> None:
        if message["do"] == "start":
            self._end()
            self._begin(message, channel)
        elif message.get("start") == self._start and self._worker is not None:
            if message["do"] == "signal":
                self._worker.send(message["number"])
            if message["do"] == "kill":
                self._worker.kill()
        self._reported_at = 0.0

    def _begin(self, message: dict[str, Any], channel: Channel) -> None:
        start = self._start = message["start"]

        def line(text: str) -> None:
            with suppress(Gone):
                channel.send({"is": "line", "start": start, "text": text[:LONGEST_LINE]})

        environ = {k: v for k, v in os.environ.items() if k != KEY} | message["environ"]
        command, folder = [*self._program, *message["command"]], Path(message["folder"])
        try:
            worker = Worker(message["process"], command, environ, self._file, folder=folder)
        except OSError as error:
            missing = error.filename or folder
            line(f"machine {self._name} cannot start a process in {missing}: {error.strerror}")
            failed = {"code": REFUSED, "ended_at": time.monotonic(), "sample": None}
            self._state(channel, {**failed, "state": "", "lost_another": False})
            return
        self._worker = worker
        worker.read(line)

    def _say(self, channel: Channel) -> None:
        """Reports the state of the process regularly, and once it has ended."""
        worker, since = self._worker, time.monotonic() - self._reported_at
        code = worker.code if worker is not None else None  # read once: it may end meanwhile
        ended = code is not None
        if since < (TICK_S if ended else TOLD_S):
            return
        self._reported_at += since
        if worker is None:
            self._port = free_port()
            return channel.send({"is": "nothing", "port": self._port})
        if ended:
            worker.kill()  # processes that it had started
            worker.join()
        sample = worker.sample()
        now = sample.now._replace(spent=dict(sample.now.spent))
        record = {"now": now, "rest": sample[1:]}
        status = {"code": code, "ended_at": worker.ended_at if ended else 0.0, "sample": record}
        state = worker.state() if not ended else ""
        self._state(channel, {**status, "state": state, "lost_another": worker.lost_another})
        if ended:
            self._worker = None
        return None

    def _state(self, channel: Channel, status: dict[str, Any]) -> None:
        clock = time.monotonic()
        channel.send({"is": "state", "start": self._start, "clock": clock, **status})

    def _end(self) -> None:
        if self._worker is not None:
            self._worker.kill()
            self._worker.join()
            self._worker = None
