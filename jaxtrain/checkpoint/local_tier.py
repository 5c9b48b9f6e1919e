"""The fast tier: each process's part of a step on its own disk or in memory, and on a neighbour's.

    DIRECTORY/RUN/PROCESS/STEP/{process}.{start}.pack   the chunks that process wrote
    DIRECTORY/RUN/PROCESS/STEP/{process}.{start}.json   their digests, and which part of which step
                                                        they are; written last: the commit

A step is complete if the parts of all processes that saved it are on some of the present processes
(Wang et al., "GEMINI: Fast Failure Recovery in Distributed Training with In-Memory Checkpoints",
2023). A part's record has the number of parts, so the number of processes may change between.
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

from jaxtrain.checkpoint.exchange import PartId, Peers
from jaxtrain.checkpoint.policy import LocalTier
from jaxtrain.cluster.agreement import all_gather_text, share_failure
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
from jaxtrain.state_format.reader import ReadChunk

FINISHED = 2
"""Steps that are kept besides the one being written: a process may be one save behind another."""


@dataclass(frozen=True)
class LocalStep:
    """A step of which the processes together have every part. holders: name of a part's pack ->
    the processes that have it."""

    manifest: Manifest
    holders: dict[str, list[int]]


class LocalSteps:
    """Saves and reads the local tier of one run; created by all its processes together."""

    def __init__(self, tier: LocalTier, run: str) -> None:
        process, processes = jax.process_index(), jax.process_count()
        self.root = Path(tier.directory.format(process=process)).absolute() / run
        self.directory = self.root / str(process)
        share_failure(lambda: self.directory.mkdir(parents=True, exist_ok=True))
        self.start = all_gather_text(secrets.token_hex(8))[0]
        self.neighbour = (process + max(1, processes // 2)) % processes
        self.peers = Peers(self.root, self.directory) if processes > 1 else None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="local tier")
        self._job: Future[None] | None = None
        self.step = 0
        """Number of the last save that began."""
        self.took_s: float | None = None
        """Seconds of the last successful save."""
        self.problems: list[str] = []
        """Copies that could not be read."""

    def save(
        self,
        step: int,
        parts: OwnedParts,
        records: dict[str, LeafRecord],
        metadata: dict[str, Any],
    ) -> None:
        """Begins to write this process's part. Raises OSError if the previous save failed."""
        self.wait()
        self.step = step
        self._job = self._pool.submit(self._write, step, parts, records, metadata)

    def poll(self) -> None:
        """Raises OSError if the save in flight has ended and failed."""
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
        self._job = None  # after an interrupt it stays, and the next call asks for its result

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
        part = PartId(step, jax.process_index(), self.start)
        places = [p.parent.name for p in self.directory.glob(f"*/{part.process}.*.json")]
        finished = {int(name) for name in places if name.isdecimal()}
        previous = sorted(s for s in finished if s < step)[-FINISHED:]
        self._drop(lambda s: s < min(previous, default=0))
        try:
            self._write_part(part, parts, records, metadata)
        except BaseException:
            (self.directory / part.pack).unlink(missing_ok=True)  # it takes room others need
            raise
        if self.peers is not None:
            self.peers.put(part, self.neighbour)
        self.took_s = time.perf_counter() - began

    def _write_part(
        self,
        part: PartId,
        parts: OwnedParts,
        records: dict[str, LeafRecord],
        metadata: dict[str, Any],
    ) -> None:
        pack = self.directory / part.pack
        pack.parent.mkdir(parents=True, exist_ok=True)
        chunks = write_chunks(pack.parent, pack.name, parts.take())
        open_regular(pack, "ab").close()  # a process may have nothing to write
        body = json.dumps(
            {
                "held": part,
                "processes": jax.process_count(),
                "leaves": records,
                "metadata": metadata,
                "chunks": [c._replace(pack=part.pack) for c in chunks],
            }
        )
        record = self.directory / part.record
        temporary = record.with_suffix(".tmp")
        write_text(temporary, f"{text_digest(body.encode())}\n{body}")
        temporary.replace(record)

    def whole_steps(self) -> dict[int, LocalStep]:
        """Returns the steps of which every part is on some process, the same on every process. All
        call it."""
        bodies_here = {part: body for part, body in self._readable()}
        offer_here = [[*part, body["processes"]] for part, body in bodies_here.items()]
        offers = [json.loads(text) for text in all_gather_text(json.dumps(offer_here))]
        holders: dict[tuple[int, str], dict[str, list[int]]] = {}
        counts: dict[tuple[int, str], int] = {}
        for process, offer in enumerate(offers):
            for *fields, processes in offer:
                part = PartId(*fields)
                save = (part.step, part.start)
                holders.setdefault(save, {}).setdefault(part.pack, []).append(process)
                counts[save] = processes
        complete = {save: h for save, h in holders.items() if len(h) == counts[save]}
        # Every process needs all records of these to read, so they are sent complete.
        give = [[*h, body] for h, body in bodies_here.items() if (h.step, h.start) in complete]
        bodies: dict[tuple[int, str], dict[int, Any]] = {}
        for text in all_gather_text(json.dumps(give)):
            for step, process, start, body in json.loads(text):
                bodies.setdefault((step, start), {})[process] = body
        steps = {}
        for save in sorted(complete):
            try:
                steps[save[0]] = LocalStep(_merge(save[0], bodies[save]), complete[save])
            except MALFORMED as error:  # the same on every process
                self.problems.append(f"step {save[0]}: {error}")
        return steps

    def read(self, stored: LocalStep, otherwise: ReadChunk | None = None) -> ReadChunk:
        """Returns a reader of a step's chunks. It reads a chunk from this process's copy of the
        part; if that fails, from the copies of other processes; if all fail, by `otherwise`."""

        def read(chunk: Chunk, dtype: np.dtype) -> np.ndarray:
            problems = []
            for source in self._sources(stored.holders[chunk.pack]):
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

    def _sources(self, holders: list[int]) -> Iterator[ReadChunk]:
        """Yields a reader for each holder, this process first if it is one."""
        own = jax.process_index()
        for process in sorted(holders, key=lambda p: p != own):
            yield self._read_here if process == own else partial(self._read_there, process)

    def _read_here(self, chunk: Chunk, dtype: np.dtype) -> np.ndarray:
        return read_chunk(_parse_part(chunk.pack).find(self.root), chunk, dtype)

    def _read_there(self, process: int, chunk: Chunk, dtype: np.dtype) -> np.ndarray:
        assert self.peers is not None, "a part is held by a process that looked"
        data = self.peers.read(_parse_part(chunk.pack), chunk.offset, chunk.size, process)
        if len(data) != chunk.size:
            raise ValueError(f"{chunk.pack} is cut short")
        elements = np.frombuffer(data, dtype).reshape(chunk.box.shape)
        if digest(chunk.leaf, chunk.box, elements, chunk.digest) != chunk.digest:
            raise ValueError(f"{chunk.pack} has another digest")
        return elements

    def drop_after(self, step: int) -> None:
        """Removes the steps newer than `step`, when a run goes on from there."""
        self._drop(lambda s: s > step)

    def _drop(self, unwanted: Callable[[int], bool]) -> None:
        for place in self.root.glob("*/*"):
            if place.name.isdecimal() and unwanted(int(place.name)):
                shutil.rmtree(place, ignore_errors=True)

    def _readable(self) -> Iterator[tuple[PartId, Any]]:
        """Yields the parts on this machine with an intact record."""
        for path in sorted(self.root.glob("*/*/*.json")):
            try:
                body = _record(path)
                if body is None:
                    continue
                part = _parse_part(f"{path.parent.name}/{path.name}")
                other = _part_ids(body) - {part}
            except (OSError, *MALFORMED) as error:  # on one process alone: the others go on
                self.problems.append(f"{path} is no record of a part: {error!r}")
                continue
            if other:
                renamed = ", ".join(f"{other.record} was written" for other in sorted(other))
                self.problems.append(f"{part.record}: {renamed}, and renamed")
                continue
            yield part, body


def _record(path: Path) -> Any:
    """Returns the body of a record; None where it is damaged. Raises OSError, and one of MALFORMED
    where its text has another format."""
    stored_digest, _, text = read_text(path).partition("\n")
    if stored_digest != text_digest(text.encode(), stored_digest):
        return None
    body = parse_json(text)
    records_from_json(body["leaves"])
    if not isinstance(body["processes"], int) or not isinstance(body["metadata"], dict):
        raise ValueError("it does not say of how many processes it is, or has no metadata")
    return body


def _parse_part(name: str) -> PartId:
    step, file = name.split("/")
    process, start, _ = file.split(".")
    return PartId(int(step), int(process), start)


def _part_ids(body: Mapping[str, Any]) -> set[PartId]:
    """Returns the parts that a record and its chunks claim to be."""
    parts = {_parse_part(chunk.pack) for chunk in map(Chunk.from_json, body["chunks"])}
    return parts | ({PartId(*body["held"])} if "held" in body else set())


def _merge(step: int, bodies: dict[int, Any]) -> Manifest:
    """Returns the manifest of a step from its parts' records. Raises ValueError where they are of
    another step, or incomplete."""
    first = bodies[min(bodies)]
    leaves = records_from_json(first["leaves"])
    chunks: dict[str, list[Chunk]] = {}
    for body in bodies.values():
        for chunk in map(Chunk.from_json, body["chunks"]):
            chunks.setdefault(chunk.leaf, []).append(chunk)
    refuse_gaps(leaves, chunks)
    manifest = Manifest(step, Path(), leaves, first["metadata"], chunks, {})
    if conflicts := other_steps(manifest, step):
        raise ValueError(" and ".join(conflicts))
    return manifest
