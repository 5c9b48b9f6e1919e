"""Files that processes send each other beside the training, over sockets, behind the next steps.

The device network is not used for them: a save must not wait for the step, nor a step for a save.
"""

from __future__ import annotations

import json
import secrets
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from io import FileIO
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any, NamedTuple

from jaxtrain.cluster.agreement import all_gather_text, share_oserror
from jaxtrain.files.regular import open_regular, read_text, write_all, write_text

PIECE = 16 * 2**20


class Held(NamedTuple):
    """A part of a step: of the process that wrote it, in which start of the run."""

    step: int
    process: int
    start: str

    @property
    def pack(self) -> str:
        return f"{self.step}/{self.process}.{self.start}.pack"

    @property
    def record(self) -> str:
        return f"{self.step}/{self.process}.{self.start}.json"

    def found(self, root: Path) -> Path:
        """Its pack in a directory of any process of this machine. Raises OSError."""
        for directory in sorted(root.iterdir()):
            if (path := directory / self.pack).is_file():
                return path
        raise FileNotFoundError(f"{self.pack} is gone")


class Peers:
    """The local tiers of all processes: gives away what is below `root`, puts copies that others
    send into `directory`, reads theirs. Made by all processes together. Messages are authenticated
    by a secret of this start; the bytes are not encrypted.
    """

    def __init__(self, root: Path, directory: Path) -> None:
        self.root, self.directory = root, directory
        self._secret = bytes.fromhex(all_gather_text(secrets.token_hex(32))[0])
        self._listener = share_oserror(
            lambda: Listener((_own_address(), 0), backlog=64, authkey=self._secret)
        )
        told = [
            json.loads(t)
            for t in all_gather_text(json.dumps([socket.gethostname(), *self._address]))
        ]
        self._addresses = [(host, port) for _, host, port in told]
        if len({name for name, _, _ in told}) > 1:
            share_oserror(lambda: _refuse_loopback(self._address[0]))
        self._mine = threading.local()
        self._closed = False
        threading.Thread(target=self._serve, name="local tier", daemon=True).start()

    @property
    def _address(self) -> Any:
        return self._listener.address

    def put(self, held: Held, process: int) -> None:
        """Copy a part into the local tier of another process. Raises OSError."""
        record, pack = read_text(self.directory / held.record), self.directory / held.pack
        size = pack.stat().st_size
        with open_regular(pack, "rb") as file:
            ask = {"do": "put", "held": held, "record": record, "size": size}
            self._ask(process, ask, send=lambda to: _send_file(to, file, size))

    def read(self, held: Held, offset: int, size: int, process: int) -> bytes:
        """Bytes of a part in the local tier of another process. Raises OSError."""
        ask = {"do": "read", "held": held, "offset": offset, "size": size}
        return self._ask(process, ask)

    def close(self) -> None:
        self._closed = True
        with suppress(OSError, EOFError):
            Client(self._address, authkey=self._secret).close()  # wakes the thread that listens
        self._listener.close()

    def _ask(
        self, process: int, ask: dict[str, Any], send: Callable[[Connection], None] | None = None
    ) -> bytes:
        open_ones = self._mine.__dict__.setdefault("connections", {})
        try:
            if process not in open_ones:
                open_ones[process] = Client(self._addresses[process], authkey=self._secret)
            connection = open_ones[process]
            connection.send_bytes(json.dumps(ask).encode())
            if send is not None:
                send(connection)
            answer = json.loads(connection.recv_bytes())
            if "error" not in answer:
                return connection.recv_bytes() if answer["bytes"] else b""
        except (OSError, EOFError) as error:
            open_ones.pop(process, None)
            raise OSError(f"process {process} does not answer: {error!r}") from error
        raise OSError(f"process {process} says: {answer['error']}")

    def _serve(self) -> None:
        while not self._closed:
            try:
                connection = self._listener.accept()
            except Exception:  # a stranger without the secret, or the end
                continue
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: Connection) -> None:
        with suppress(OSError, EOFError), connection:
            while True:
                ask = json.loads(connection.recv_bytes())
                held = Held(*ask["held"])
                if ask["do"] == "put":
                    found = self._put(connection, held, ask["record"], ask["size"])
                else:
                    found = self._read(held, ask["offset"], ask["size"])
                answer = {"error": found} if isinstance(found, str) else {"bytes": len(found)}
                connection.send_bytes(json.dumps(answer).encode())
                if not isinstance(found, str) and found:
                    connection.send_bytes(found)

    def _read(self, held: Held, offset: int, size: int) -> bytes | str:
        try:
            with open_regular(held.found(self.root), "rb") as file:
                file.seek(offset)
                return _read_whole(file, size)
        except (OSError, ValueError) as error:
            return str(error)

    def _put(self, connection: Connection, held: Held, record: str, size: int) -> bytes | str:
        """Takes all that is sent, whatever happens: what comes after it is a new question."""
        problem, left = "", size
        path = self.directory / held.pack
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
        try:
            file: Any = open_regular(path, "wb")
        except (OSError, ValueError) as error:
            file, problem = None, str(error)
        while left:
            piece = connection.recv_bytes()
            left -= len(piece)
            try:
                if file is not None and not problem:
                    write_all(file, piece)
            except OSError as error:
                problem = str(error)
        try:
            if file is not None:
                file.close()
            if not problem:
                write_text(self.directory / held.record, record)
        except (OSError, ValueError) as error:
            problem = str(error)
        return problem or b""


def _read_whole(file: FileIO, size: int) -> bytes:
    """Up to `size` bytes, fewer at the end: an unbuffered read may give less."""
    pieces = []
    while size and (piece := file.read(size)):
        pieces.append(piece)
        size -= len(piece)
    return b"".join(pieces)


def _send_file(to: Connection, file: FileIO, size: int) -> None:
    left = size
    while left:
        piece = file.read(min(PIECE, left))
        if not piece:
            raise OSError("the part became shorter while it was sent")
        to.send_bytes(piece)
        left -= len(piece)


def _own_address() -> str:
    """The address others reach this machine by: that of the route outward, else as its name
    resolves (which on many systems is a loopback address). Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as outward, suppress(OSError):
        outward.connect(("192.0.2.1", 9))  # an address reserved for examples (RFC 5737)
        return outward.getsockname()[0]
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"


def _refuse_loopback(address: str) -> None:
    if address.startswith("127."):
        raise OSError(
            f"{socket.gethostname()} knows itself as {address} only, which other machines cannot "
            "reach; give its name an address in /etc/hosts"
        )
