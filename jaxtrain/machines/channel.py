"""Messages between a supervisor and the agents on other machines: JSON, each whole.

Both ends prove that they hold the same key before anything else is read.
"""

from __future__ import annotations

import hmac
import json
import os
import socket
import struct
import threading
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

KEY = "JAXTRAIN_KEY"
"""The environment variable that has the key, the same on all machines of a run."""

STALLED_S = 30
"""A message that is not whole after so long is not waited for."""

LONGEST = 2**22
"""Bytes of a message; a longer one is no message of ours."""


class Gone(ConnectionError):
    """The other end is: it ended, or it is no agent and no supervisor of this key."""


class Channel:
    """One end. Messages may be sent from any thread, and are received by one."""

    def __init__(self, found: socket.socket, key: bytes, *, listens: bool) -> None:
        """found: connected, and the channel's from here on. listens: whether this end was connected
        to. Raises Gone where the keys differ."""
        found.settimeout(None)
        stalled = struct.pack("ll", STALLED_S, 0)
        for way in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            found.setsockopt(socket.SOL_SOCKET, way, stalled)
        self.host: str = found.getsockname()[0]
        """Of this end, as the other one reaches it."""
        connection = self._connection = Connection(found.detach())
        self._lock = threading.Lock()
        try:
            # Each end proves another key: who has none cannot have one end answer for the other.
            if listens:
                deliver_challenge(connection, _key_of("agent", key))
                answer_challenge(connection, _key_of("launch", key))
            else:
                answer_challenge(connection, _key_of("agent", key))
                deliver_challenge(connection, _key_of("launch", key))
        except Exception as error:  # a wrong key, or whatever a stranger says
            self.close()
            raise Gone(f"the other end does not have the same {KEY}") from error

    def send(self, message: Mapping[str, Any]) -> None:
        """Raises Gone."""
        try:
            with self._lock:
                self._connection.send_bytes(json.dumps(message).encode())
        except (OSError, ValueError) as error:
            raise Gone(str(error)) from error

    def receive(self, within_s: float) -> dict[str, Any] | None:
        """The next message, None where none comes within so many seconds. Raises Gone."""
        try:
            if not self._connection.poll(within_s):
                return None
            return json.loads(self._connection.recv_bytes(LONGEST))
        except (OSError, EOFError, ValueError) as error:
            raise Gone(str(error) or "the connection is closed") from error

    def close(self) -> None:
        """Whatever waits on it, in any thread, goes on with Gone."""
        with suppress(OSError):
            with socket.socket(fileno=os.dup(self._connection.fileno())) as found:
                found.shutdown(socket.SHUT_RDWR)
            self._connection.close()


def _key_of(end: str, key: bytes) -> bytes:
    return hmac.digest(key, end.encode(), "sha256")


def connect(address: tuple[str, int], key: bytes) -> Channel:
    """To the supervisor at (host, port). Raises OSError where nobody listens, Gone where the keys
    differ."""
    return Channel(socket.create_connection(address, STALLED_S), key, listens=False)


def read_address(text: str, flag: str) -> tuple[str, int]:
    """Of `HOST:PORT`. Raises ValueError."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 2**16:
        raise ValueError(f"{flag} {text!r}; use HOST:PORT, such as node0:7000")
    return host, int(port)


def read_key(environ: Mapping[str, str]) -> bytes:
    """Raises ValueError where there is none worth the name."""
    key = environ.get(KEY, "")
    if len(key) < 16:
        raise ValueError(
            f"{KEY} has {len(key)} characters; set it to the same secret of 16 or more on all "
            "machines, such as that of: python -c 'import secrets; print(secrets.token_hex())'"
        )
    return key.encode()
