"""Saves and restores compared with plain Orbax and a plain `numpy.save` of the same bytes, in one
run."""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

from jaxtrain.checkpoint.manager import CheckpointManager
from jaxtrain.checkpoint.policy import SavePolicy
from jaxtrain.files.store import AnyPath, reading
from jaxtrain.files.stores import local_path
from jaxtrain.mesh.sharding import named_sharding
from jaxtrain.mesh.spare_memory import spare_bytes
from jaxtrain.state_format.chunks import Chunk
from jaxtrain.state_format.manifest import read_manifest
from jaxtrain.state_format.pack import write_chunks
from jaxtrain.state_format.parts import owned_parts
from jaxtrain.state_format.reader import read_arrays

SIZES = (200 << 20, 1 << 30)
ROUNDS = 5
LEAVES = 24

State = dict[str, jax.Array]
StateTemplate = dict[str, jax.ShapeDtypeStruct]


@dataclass(frozen=True)
class CheckpointRow:
    """Medians over the rounds.

    blocked_s: until the call of a save returned; first_blocked_s: of the first, which imports the
    library. next_step_s: the step after a save, whose arrays are still referenced; step_s: any
    other, a pass over the state, donated.
    """

    bytes: int
    way: str
    save_s: float
    restore_s: float
    blocked_s: float
    first_blocked_s: float
    step_s: float
    next_step_s: float

    def as_json(self) -> dict[str, Any]:
        rates = {
            "save_bytes_per_s": self.bytes / self.save_s,
            "restore_bytes_per_s": self.bytes / self.restore_s,
        }
        return asdict(self) | rates


@dataclass(frozen=True)
class DigestCost:
    """Seconds to write all chunks, to read them from the disk, and to read them from the file
    cache, with digests and without.

    They are of the quickest round, since other work of the machine only adds to them. Shares are of
    the throughput.
    """

    bytes: int
    write_s: float
    write_without_s: float
    read_s: float
    read_without_s: float
    reread_s: float
    reread_without_s: float

    @property
    def shares(self) -> dict[str, float]:
        return {
            "write_share": 1 - self.write_without_s / self.write_s,
            "read_share": 1 - self.read_without_s / self.read_s,
            "reread_share": 1 - self.reread_without_s / self.reread_s,
        }

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | self.shares


@dataclass(frozen=True)
class Report:
    rows: list[CheckpointRow]
    digests: list[DigestCost]

    def table(self) -> str:
        lines = [
            f"{'way':<10} {'MB':>6} {'save MB/s':>10} {'restore MB/s':>13} {'blocked ms':>11}"
            f" {'first ms':>9} {'step ms':>8} {'next ms':>8}"
        ]
        for r in self.rows:
            mb = r.bytes / 1e6
            lines.append(
                f"{r.way:<10} {mb:>6.0f} {mb / r.save_s:>10.0f} {mb / r.restore_s:>13.0f}"
                f" {1e3 * r.blocked_s:>11.1f} {1e3 * r.first_blocked_s:>9.0f}"
                f" {1e3 * r.step_s:>8.1f} {1e3 * r.next_step_s:>8.1f}"
            )
        for d in self.digests:
            write, read, reread = d.shares.values()
            lines.append(
                f"digests at {d.bytes / 1e6:.0f} MB cost {write:.1%} of the throughput of writing, "
                f"{read:.1%} of reading, {reread:.1%} of reading what is in memory"
            )
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        return {
            "checkpoints": [row.as_json() for row in self.rows],
            "digests": [cost.as_json() for cost in self.digests],
        }


def bench_checkpoint(
    sizes: tuple[int, ...] = SIZES,
    *,
    directory: str | Path | None = None,
    rounds: int = ROUNDS,
    progress: Callable[[str], None] = lambda text: None,
) -> Report:
    """Measures on all local devices, with a state split over them, in a directory made and removed
    below `directory` (None: the system's for temporary files). Ways take turns within each round. A
    restore reads from the disk, as a later start does, if the system can drop its file cache
    (Linux).

    Raises ValueError where the directory has too little free space.
    """
    rows, digests = [], []
    for size in sizes:
        with _place(directory, size) as place:
            ways = {name: make(place / name) for name, make in WAYS.items()}
            times_of: dict[str, list[Times]] = {name: [] for name in ways}
            state = state_of(size)
            for number in range(rounds + 1):  # the first of each imports its library
                for name, way in ways.items():
                    state, times = one_round(way, number + 1, state, place)
                    times_of[name].append(times)
                progress(f"{size / 1e6:.0f} MB: round {number} of {rounds}")
            rows += [_row(size, name, times) for name, times in times_of.items()]
            for way in ways.values():
                way.close()
            digests.append(_digest_cost(place / "digests", state, rounds))
    return Report(rows, digests)


class Times:
    """Seconds of a round, as in `CheckpointRow`."""

    def __init__(self) -> None:
        self.blocked = self.save = self.restore = self.step = self.next_step = 0.0


class Way(Protocol):
    """A library that saves a state and reads it back; `wait` returns when the save is on the
    disk."""

    def save(self, step: int, state: State) -> None: ...

    def wait(self) -> None: ...

    def restore(self, step: int, template: StateTemplate) -> State: ...

    def close(self) -> None: ...


def one_round(way: Way, step: int, state: State, place: Path) -> tuple[State, Times]:
    """Does a step, a save, the next step, and a restore. The state is donated."""
    times = Times()
    state, times.step = _time(lambda: _update(state))
    began = time.perf_counter()
    way.save(step, state)
    times.blocked = time.perf_counter() - began
    state, times.next_step = _time(lambda: _update(state))
    began += times.next_step  # the step runs during the save, but is not part of it
    way.wait()
    times.save = time.perf_counter() - began
    template = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), state
    )
    _forget(place)
    restored, times.restore = _time(lambda: way.restore(step, template))
    last = next(iter(restored))
    assert np.array_equal(np.asarray(restored[last]) + 1, np.asarray(state[last]))
    return state, times


def _row(size: int, name: str, times: list[Times]) -> CheckpointRow:
    def median(field: str) -> float:
        return statistics.median(getattr(t, field) for t in times[1:])

    return CheckpointRow(
        size,
        name,
        median("save"),
        median("restore"),
        median("blocked"),
        times[0].blocked,
        median("step"),
        median("next_step"),
    )


class _Ours:
    def __init__(self, directory: Path) -> None:
        self.manager = CheckpointManager(directory, SavePolicy(every=1, keep=1))

    def save(self, step: int, state: State) -> None:
        room = spare_bytes(jax.local_devices())  # the next step writes in place
        self.manager.save(step, state, {}, spare_bytes=room)

    def wait(self) -> None:
        self.manager.wait()

    def restore(self, step: int, template: StateTemplate) -> State:
        return self.manager.restore(step, template)[0]

    def close(self) -> None:
        self.manager.close()


class _Orbax:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.manager: Any = None

    def save(self, step: int, state: State) -> None:
        import orbax.checkpoint as ocp

        if self.manager is None:
            options = ocp.CheckpointManagerOptions(max_to_keep=1)
            self.manager = ocp.CheckpointManager(self.directory, options=options)
        self.manager.save(step, args=ocp.args.StandardSave(state))

    def wait(self) -> None:
        self.manager.wait_until_finished()

    def restore(self, step: int, template: StateTemplate) -> State:
        import orbax.checkpoint as ocp

        return self.manager.restore(step, args=ocp.args.StandardRestore(template))

    def close(self) -> None:
        self.manager.close()


class _Numpy:
    """One file, written and synced while the loop waits."""

    def __init__(self, directory: Path) -> None:
        self.path = directory
        self.names: list[str] = []

    def save(self, step: int, state: State) -> None:
        self.names = list(state)
        with self.path.open("wb") as file:
            for array in state.values():
                np.save(file, np.asarray(array))
            file.flush()
            os.fsync(file.fileno())

    def wait(self) -> None:
        pass

    def restore(self, step: int, template: StateTemplate) -> State:
        with self.path.open("rb") as file:
            loaded = {name: np.load(file) for name in self.names}
        return {k: jax.device_put(v, template[k].sharding) for k, v in loaded.items()}

    def close(self) -> None:
        pass


WAYS: dict[str, Callable[[Path], Way]] = {"jaxtrain": _Ours, "orbax": _Orbax, "numpy": _Numpy}


def _digest_cost(directory: Path, state: State, rounds: int) -> DigestCost:
    """Times writes and reads of all chunks, in turn with digests and without."""
    parts = owned_parts(state).take()
    seconds: dict[str, list[float]] = {}

    def timed(name: str, act: Callable[[], Any]) -> None:
        seconds.setdefault(name, []).append(_time(act)[1])

    directory.mkdir()
    with CheckpointManager(directory / "run", SavePolicy(every=1)) as manager:
        manager.save(1, state, {})
    manifest = read_manifest(directory / "run" / "1")
    specs = {
        k: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=v.sharding) for k, v in state.items()
    }
    without = partial(_unverified, manifest.directory)
    for _ in range(rounds):
        timed("write", lambda: write_chunks(directory, "a", parts))
        timed("bare write", lambda: write_chunks(directory, "b", parts, digest_of=lambda *_: ""))
        for read, again, reader in (
            ("read", "reread", None),
            ("bare read", "bare reread", without),
        ):
            _forget(directory)
            timed(read, lambda reader=reader: read_arrays(manifest, specs, reader))
            timed(again, lambda reader=reader: read_arrays(manifest, specs, reader))
    best = {name: min(times) for name, times in seconds.items()}
    names = ("write", "bare write", "read", "bare read", "reread", "bare reread")
    return DigestCost(sum(part.data.nbytes for part in parts), *(best[name] for name in names))


def _forget(directory: Path) -> None:
    """Drops the system's cache of the files there."""
    if not hasattr(os, "posix_fadvise"):
        return
    os.sync()  # what is not on the disk yet cannot be dropped
    for path in directory.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _unverified(directory: AnyPath, chunk: Chunk, dtype: np.dtype) -> np.ndarray:
    with reading(directory / chunk.pack, chunk.offset, chunk.size) as file:
        data = np.empty(chunk.size, np.uint8)
        assert file is not None and file.readinto(data.data) == chunk.size
    return data.view(dtype).reshape(chunk.box.shape)


def _time(act: Callable[[], Any]) -> tuple[Any, float]:
    began = time.perf_counter()
    result = jax.block_until_ready(act())
    return result, time.perf_counter() - began


_update = jax.jit(lambda state: jax.tree.map(lambda a: a + 1, state), donate_argnums=0)


def state_of(size: int) -> State:
    """Returns fp32 leaves of `size` bytes together, split over all devices."""
    devices = jax.devices()
    mesh = jax.sharding.Mesh(np.array(devices), ("fsdp",))
    rows = named_sharding(mesh, (("fsdp",), ()))
    columns = max(1, size // 4 // LEAVES // (8 * len(devices)))
    shape = (8 * len(devices), columns)
    # Random like weights: data that compresses well would favour a library that compresses.
    make = jax.jit(lambda key: jax.random.normal(key, shape), out_shardings=rows)
    return {f"leaf{i}": make(jax.random.key(i)) for i in range(LEAVES)}


@contextmanager
def _place(directory: str | Path | None, size: int) -> Iterator[Path]:
    below = local_path("directory", tempfile.gettempdir() if directory is None else directory)
    free = shutil.disk_usage(below).free
    needed = 8 * size  # two steps of each, and packs
    if free < needed:
        raise ValueError(
            f"bench checkpoint at {size:,} bytes writes up to {needed:,} bytes below {below}, "
            f"which has {free:,} free; use a smaller --sizes, or another --dir"
        )
    with tempfile.TemporaryDirectory(dir=below, prefix="jaxtrain-bench-") as name:
        yield Path(name)
