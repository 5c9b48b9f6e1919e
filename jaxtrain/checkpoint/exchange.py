"""Transfer of files between processes during training, over sockets, while next steps run.

The device network is not used: a save must not wait for the step, nor a step for a save.
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

from jaxtrain.cluster.agreement import all_gather_text, share_failure
from jaxtrain.files.regular import open_regular, read_text, write_all, write_text

PIECE = 16 * 2**20


class PartId(NamedTuple):
    """Identity of a part of a step: the process that wrote it, and the start of the run."""

    step: int
    process: int
    start: str

    @property
    def pack(self) -> str:
        return f"{self.step}/{self.process}.{self.start}.pack"

    @property
    def record(self) -> str:
        return f"{self.step}/{self.process}.{self.start}.json"

    def find(self, root: Path) -> Path:
        """Returns the path of this part's pack below `root`, in the directory of any process of
        this machine. Raises OSError if none has it."""
        for directory in sorted(root.iterdir()):
            if (path := directory / self.pack).is_file():
                return path
        raise FileNotFoundError(f"{self.pack} is gone")


class Peers:
    """The local tiers of all processes: serves the files below `root`, stores copies from other
    processes in `directory`, reads theirs. Created by all processes together. Messages are
    authenticated by a secret of this start; the bytes are not encrypted."""

    def __init__(self, root: Path, directory: Path) -> None:
        self.root, self.directory = root, directory
        self._secret = bytes.fromhex(all_gather_text(secrets.token_hex(32))[0])
        self._listener = share_failure(
            lambda: Listener((_own_address(), 0), backlog=64, authkey=self._secret)
        )
        hosts = [
            json.loads(t)
            for t in all_gather_text(json.dumps([socket.gethostname(), *self._address]))
        ]
        self._addresses = [(host, port) for _, host, port in hosts]
        if len({name for name, _, _ in hosts}) > 1:
            share_failure(lambda: _refuse_loopback(self._address[0]))
        self._local = threading.local()
        self._closed = False
        threading.Thread(target=self._serve, name="local tier", daemon=True).start()

    @property
    def _address(self) -> Any:
        return self._listener.address

    def put(self, part: PartId, process: int) -> None:
        """Copy a part into the local tier of another process. Raises OSError."""
        record, pack = read_text(self.directory / part.record), self.directory / part.pack
        size = pack.stat().st_size
        with open_regular(pack, "rb") as file:
            ask = {"do": "put", "held": part, "record": record, "size": size}
            self._ask(process, ask, send=lambda to: _send_file(to, file, size))

    def read(self, part: PartId, offset: int, size: int, process: int) -> bytes:
        """Bytes of a part in the local tier of another process. Raises OSError."""
        ask = {"do": "read", "held": part, "offset": offset, "size": size}
        return self._ask(process, ask)

    def close(self) -> None:
        self._closed = True
        with suppress(OSError, EOFError):
            Client(self._address, authkey=self._secret).close()  # wakes the thread that listens
        self._listener.close()

    def _ask(
        self, process: int, ask: dict[str, Any], send: Callable[[Connection], None] | None = None
    ) -> bytes:
        connections = self._local.__dict__.setdefault("connections", {})
        try:
            if process not in connections:
                connections[process] = Client(self._addresses[process], authkey=self._secret)
            connection = connections[process]
            connection.send_bytes(json.dumps(ask).encode())
            if send is not None:
                send(connection)
            answer = json.loads(connection.recv_bytes())
            if "error" not in answer:
                return connection.recv_bytes() if answer["bytes"] else b""
        except (OSError, EOFError) as error:
            connections.pop(process, None)
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
                part = PartId(*ask["held"])
                if ask["do"] == "put":
                    reply = self._put(connection, part, ask["record"], ask["size"])
                else:
                    reply = self._read(part, ask["offset"], ask["size"])
                answer = {"error": reply} if isinstance(reply, str) else {"bytes": len(reply)}
                connection.send_bytes(json.dumps(answer).encode())
                if not isinstance(reply, str) and reply:
                    connection.send_bytes(reply)

    def _read(self, part: PartId, offset: int, size: int) -> bytes | str:
        try:
            with open_regular(part.find(self.root), "rb") as file:
                file.seek(offset)
                return _read_whole(file, size)
        except (OSError, ValueError) as error:
            return str(error)

    def _put(self, connection: Connection, part: PartId, record: str, size: int) -> bytes | str:
        """Stores a copy; returns an error message, or b"". Receives all bytes even after an error,
        since the next message starts behind them."""
        problem, left = "", size
        path = self.directory / part.pack
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
                write_text(self.directory / part.record, record)
        except (OSError, ValueError) as error:
            problem = str(error)
        return problem or b""


def _read_whole(file: FileIO, size: int) -> bytes:
    """Returns up to `size` bytes, fewer at the end of the file: an unbuffered read may return
    less."""
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
    """Returns the address at which others reach this machine: of the outward route, else as its
    name resolves (on many systems a loopback address). Sends nothing."""
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
