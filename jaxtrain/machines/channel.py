"""Messages between a supervisor and the agents on other machines, as JSON.

Both ends prove that they have the same key before anything else is read.
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
"""Environment variable with the key, the same on all machines of a run."""

STALLED_S = 30
"""Seconds after which an incomplete message is given up."""

LONGEST = 2**22
"""Most bytes of a message; a longer one is not ours."""


class Gone(ConnectionError):
    """The other end ended, or has another key."""


class Channel:
    """One end of a connection. Any thread may send messages; one receives them."""

    def __init__(self, sock: socket.socket, key: bytes, *, listens: bool) -> None:
        """sock: connected; the channel takes ownership. listens: True on the end that accepted.
        Raises Gone if the keys differ."""
        sock.settimeout(None)
        stalled = struct.pack("ll", STALLED_S, 0)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            sock.setsockopt(socket.SOL_SOCKET, option, stalled)
        self.host: str = sock.getsockname()[0]
        """Address of this end, as the other one reaches it."""
        connection = self._connection = Connection(sock.detach())
        self._lock = threading.Lock()
        try:
            # Each end proves another key, so that one end's answer cannot be replayed to the other.
            if listens:
                deliver_challenge(connection, _key_of("agent", key))
                answer_challenge(connection, _key_of("launch", key))
            else:
                answer_challenge(connection, _key_of("agent", key))
                deliver_challenge(connection, _key_of("launch", key))
        except Exception as error:  # a wrong key, or arbitrary bytes
            self.close()
            raise Gone(f"the other end does not have the same {KEY}") from error

    def send(self, message: Mapping[str, Any]) -> None:
        """Sends a message. Raises Gone."""
        try:
            with self._lock:
                self._connection.send_bytes(json.dumps(message).encode())
        except (OSError, ValueError) as error:
            raise Gone(str(error)) from error

    def receive(self, within_s: float) -> dict[str, Any] | None:
        """Returns the next message, None if none comes within `within_s` seconds. Raises Gone."""
        try:
            if not self._connection.poll(within_s):
                return None
            return json.loads(self._connection.recv_bytes(LONGEST))
        except (OSError, EOFError, ValueError) as error:
            raise Gone(str(error) or "the connection is closed") from error

    def close(self) -> None:
        """Closes the connection; calls that wait on it, in any thread, raise Gone."""
        with suppress(OSError):
            with socket.socket(fileno=os.dup(self._connection.fileno())) as sock:
                sock.shutdown(socket.SHUT_RDWR)
            self._connection.close()


def _key_of(end: str, key: bytes) -> bytes:
    return hmac.digest(key, end.encode(), "sha256")


def connect(address: tuple[str, int], key: bytes) -> Channel:
    """Connects to the supervisor at (host, port). Raises OSError if nothing listens there, Gone if
    the keys differ."""
    return Channel(socket.create_connection(address, STALLED_S), key, listens=False)


def read_address(text: str, flag: str) -> tuple[str, int]:
    """Parses `HOST:PORT`. Raises ValueError."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 2**16:
        raise ValueError(f"{flag} {text!r}; use HOST:PORT, such as node0:7000")
    return host, int(port)


def read_key(environ: Mapping[str, str]) -> bytes:
    """Returns the key from the environment. Raises ValueError if it is missing or too short."""
    key = environ.get(KEY, "")
    if len(key) < 16:
        raise ValueError(
            f"{KEY} has {len(key)} characters; set it to the same secret of 16 or more on all "
            "machines, such as that of: python3 -c 'import secrets; print(secrets.token_hex())'"
        )
    return key.encode()
