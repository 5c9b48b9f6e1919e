"""The fast tier: each process's part of a step on its own disk or in memory, and on a neighbour's.

    DIRECTORY/RUN/PROCESS/STEP/{process}.{start}.pack   the chunks that process wrote
    DIRECTORY/RUN/PROCESS/STEP/{process}.{start}.json   their digests, and which part of which step
                                                        they are; written last: the commit

A step is whole when the parts of all processes that saved it are somewhere among those that look
(Wang et al., "GEMINI: Fast Failure Recovery in Distributed Training with In-Memory Checkpoints",
2023). The record of a part tells how many there are, so other processes may look than have saved.
"""

from __future__ import annotations

import json
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxtrain.checkpoint.exchange import Held, Peers
from jaxtrain.checkpoint.policy import LocalTier
from jaxtrain.cluster.agreement import all_gather_text, share_oserror
from jaxtrain.files.json_text import parse_json
from jaxtrain.files.regular import open_regular, read_text, write_text
from jaxtrain.state_format.chunks import Chunk, digest
from jaxtrain.state_format.leaves import LeafRecord, records_from_json
from jaxtrain.state_format.manifest import (
    MALFORMED,
    Manifest,
    other_steps,
    refuse_gaps,
    text_digest,
)
from jaxtrain.state_format.pack import read_chunk, write_chunks
from jaxtrain.state_format.parts import OwnedParts
from jaxtrain.state_format.reader import Read

FINISHED = 2
"""Steps that are kept besides the one being written: a process may be one save behind another."""


@dataclass(frozen=True)
class LocalStep:
    """A step that is whole across processes. holders: of each part (its pack's name), the processes
    that have it."""

    manifest: Manifest
    holders: dict[str, list[int]]


class LocalSteps:
    """Saves and reads the local tier of one run; made by all its processes together."""

    def __init__(self, tier: LocalTier, run: str) -> None:
        process, processes = jax.process_index(), jax.process_count()
        self.root = Path(tier.directory.format(process=process)).absolute() / run
        self.directory = self.root / str(process)
        share_oserror(lambda: self.directory.mkdir(parents=True, exist_ok=True))
        self.start = all_gather_text(secrets.token_hex(8))[0]
        self.neighbour = (process + max(1, processes // 2)) % processes
        self.peers = Peers(self.root, self.directory) if processes > 1 else None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="local tier")
        self._job: Future[None] | None = None
        self.step = 0
        """Of the save that was begun last."""
        self.took_s: float | None = None
        """What the last save took that ended well."""
        self.problems: list[str] = []
        """Copies that were not good when they were read; another one was, or it says so."""

    def save(
        self,
        step: int,
        parts: OwnedParts,
        records: dict[str, LeafRecord],
        metadata: dict[str, Any],
    ) -> None:
        """Begin to write this process's part. Raises what the save before it met: OSError."""
        self.wait()
        self.step = step
        self._job = self._pool.submit(self._write, step, parts, records, metadata)

    def poll(self) -> None:
        """Raise what the save in flight met, if it has ended: OSError."""
        if self._job is not None and self._job.done():
            self.wait()

    def wait(self) -> None:
        if self._job is None:
            return
        try:
            self._job.result()
        except Exception:
            self._job = None
            raise
        self._job = None  # an interrupt leaves it: what became of it is asked again

    def close(self) -> None:
        try:
            self.wait()
        finally:
            self._pool.shutdown()
            if self.peers is not None:
                self.peers.close()

    def _write(
        self,
        step: int,
        parts: OwnedParts,
        records: dict[str, LeafRecord],
        metadata: dict[str, Any],
    ) -> None:
        began = time.perf_counter()
        held = Held(step, jax.process_index(), self.start)
        places = [p.parent.name for p in self.directory.glob(f"*/{held.process}.*.json")]
        finished = {int(name) for name in places if name.isdecimal()}
        kept = sorted(s for s in finished if s < step)[-FINISHED:]
        self._drop(lambda s: s < min(kept, default=0))
        try:
            self._write_part(held, parts, records, metadata)
        except BaseException:
            (self.directory / held.pack).unlink(missing_ok=True)  # it takes room others need
            raise
        if self.peers is not None:
            self.peers.put(held, self.neighbour)
        self.took_s = time.perf_counter() - began

    def _write_part(
        self,
        held: Held,
        parts: OwnedParts,
        records: dict[str, LeafRecord],
        metadata: dict[str, Any],
    ) -> None:
        pack = self.directory / held.pack
        pack.parent.mkdir(parents=True, exist_ok=True)
        chunks = write_chunks(pack.parent, pack.name, parts.take())
        open_regular(pack, "ab").close()  # a process may have nothing to write
        body = json.dumps(
            {
                "held": held,
                "processes": jax.process_count(),
                "leaves": records,
                "metadata": metadata,
                "chunks": [c._replace(pack=held.pack) for c in chunks],
            }
        )
        record = self.directory / held.record
        beside = record.with_suffix(".tmp")
        write_text(beside, f"{text_digest(body.encode())}\n{body}")
        beside.replace(record)

    def whole_steps(self) -> dict[int, LocalStep]:
        """The steps of which all parts are somewhere, the same on every process. All call it."""
        mine = {held: body for held, body in self._readable()}
        own = [[*held, body["processes"]] for held, body in mine.items()]
        offers = [json.loads(text) for text in all_gather_text(json.dumps(own))]
        holders: dict[tuple[int, str], dict[str, list[int]]] = {}
        counts: dict[tuple[int, str], int] = {}
        for process, offer in enumerate(offers):
            for *held, processes in offer:
                at = Held(*held)
                save = (at.step, at.start)
                holders.setdefault(save, {}).setdefault(at.pack, []).append(process)
                counts[save] = processes
        whole = {save: h for save, h in holders.items() if len(h) == counts[save]}
        # Every process needs all records of these to read, so they travel whole.
        give = [[*h, body] for h, body in mine.items() if (h.step, h.start) in whole]
        bodies: dict[tuple[int, str], dict[int, Any]] = {}
        for text in all_gather_text(json.dumps(give)):
            for step, process, start, body in json.loads(text):
                bodies.setdefault((step, start), {})[process] = body
        found = {}
        for save in sorted(whole):
            try:
                found[save[0]] = LocalStep(_merge(save[0], bodies[save]), whole[save])
            except MALFORMED as error:  # the same on every process
                self.problems.append(f"step {save[0]}: {error}")
        return found

    def read(self, found: LocalStep, otherwise: Read | None = None) -> Read:
        """Reads chunks of a step: here, of another process that has the part, or `otherwise`."""

        def read(chunk: Chunk, dtype: np.dtype) -> np.ndarray:
            problems = []
            for source in self._sources(found.holders[chunk.pack]):
                try:
                    return source(chunk, dtype)
                except (OSError, ValueError) as error:
                    problems.append(str(error))
                    self.problems.append(f"{chunk.leaf}: {error}")
            if otherwise is not None:
                try:
                    return otherwise(chunk, dtype)
                except ValueError as error:
                    problems.append(str(error))
            raise ValueError("; ".join(problems))

        return read

    def _sources(self, holders: list[int]) -> Iterator[Read]:
        """This process first, if it has the part."""
        own = jax.process_index()
        for process in sorted(holders, key=lambda p: p != own):
            yield self._read_here if process == own else partial(self._read_there, process)

    def _read_here(self, chunk: Chunk, dtype: np.dtype) -> np.ndarray:
        return read_chunk(_parse_held(chunk.pack).found(self.root), chunk, dtype)

    def _read_there(self, process: int, chunk: Chunk, dtype: np.dtype) -> np.ndarray:
        assert self.peers is not None, "a part is held by a process that looked"
        data = self.peers.read(_parse_held(chunk.pack), chunk.offset, chunk.size, process)
        if len(data) != chunk.size:
            raise ValueError(f"{chunk.pack} is cut short")
        elements = np.frombuffer(data, dtype).reshape(chunk.box.shape)
        if digest(chunk.leaf, chunk.box, elements, chunk.digest) != chunk.digest:
            raise ValueError(f"{chunk.pack} has another digest")
        return elements

    def drop_after(self, step: int) -> None:
        """Remove what is newer than `step`: a history that is left."""
        self._drop(lambda s: s > step)

    def _drop(self, unwanted: Callable[[int], bool]) -> None:
        for place in self.root.glob("*/*"):
            if place.name.isdecimal() and unwanted(int(place.name)):
                shutil.rmtree(place, ignore_errors=True)

    def _readable(self) -> Iterator[tuple[Held, Any]]:
        """Parts on this machine whose record is as it was written."""
        for path in sorted(self.root.glob("*/*/*.json")):
            try:
                told = _record(path)
                if told is None:
                    continue
                held = _parse_held(f"{path.parent.name}/{path.name}")
                other = _parts_held(told) - {held}
            except (OSError, *MALFORMED) as error:  # on one process alone: the others go on
                self.problems.append(f"{path} is no record of a part: {error!r}")
                continue
            if other:
                where = ", ".join(f"{other.record} was written" for other in sorted(other))
                self.problems.append(f"{held.record}: {where}, and renamed")
                continue
            yield held, told


def _record(path: Path) -> Any:
    """The body of a record; None where it is not as it was written. Raises OSError, and one of
    MALFORMED where somebody wrote another."""
    found, _, text = read_text(path).partition("\n")
    if found != text_digest(text.encode(), found):
        return None
    body = parse_json(text)
    records_from_json(body["leaves"])
    if not isinstance(body["processes"], int) or not isinstance(body["metadata"], dict):
        raise ValueError("it does not say of how many processes it is, or has no metadata")
    return body


def _parse_held(name: str) -> Held:
    step, file = name.split("/")
    process, start, _ = file.split(".")
    return Held(int(step), int(process), start)


def _parts_held(body: Mapping[str, Any]) -> set[Held]:
    """Which part of which step a record and its chunks say they are."""
    told = {_parse_held(chunk.pack) for chunk in map(Chunk.from_json, body["chunks"])}
    return told | ({Held(*body["held"])} if "held" in body else set())


def _merge(step: int, bodies: dict[int, Any]) -> Manifest:
    """The manifest of a step out of its parts' records. Raises ValueError where they are not of it,
    or not all of it."""
    first = bodies[min(bodies)]
    leaves = records_from_json(first["leaves"])
    chunks: dict[str, list[Chunk]] = {}
    for body in bodies.values():
        for chunk in map(Chunk.from_json, body["chunks"]):
            chunks.setdefault(chunk.leaf, []).append(chunk)
    refuse_gaps(leaves, chunks)
    found = Manifest(step, Path(), leaves, first["metadata"], chunks, {})
    if others := other_steps(found, step):
        raise ValueError(" and ".join(others))
    return found
