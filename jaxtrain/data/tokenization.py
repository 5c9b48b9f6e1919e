"""Tokenise a corpus: in parallel, restartable, with the same bytes in the file either way.

The corpus is cut into shards by its files alone. Each shard is a token file of its own, written
atomically beside the output, so an interrupted job goes on with the shards that are missing.
"""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxtrain.data.array_file import DamagedFile, UnwritableFile
from jaxtrain.data.source import Document, Piece, Source, fingerprint
from jaxtrain.data.token_file import (
    TokenDocument,
    TokenFile,
    merge_token_files,
    open_token_file,
    write_token_file,
)
from jaxtrain.data.tokenizer import Vocabulary
from jaxtrain.files.stores import local_path

SHARD_BYTES = 16 << 20
Progress = Callable[[int, int], None]
"""Called with (bytes of text done, bytes in all)."""


class _Shard(NamedTuple):
    source: Source
    split: str
    pieces: tuple[Piece, ...]
    vocabulary: Vocabulary
    path: Path


def tokenize(
    source: Source,
    vocabulary: Vocabulary,
    out: Path,
    *,
    split: str = "train",
    processes: int = 1,
    progress: Progress | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> TokenFile:
    """Write the split's documents to the token file `out`, each ended by eos.

    Law: the file's bytes are the same for every number of processes and after any interruption.
    An `out` that exists was finished and is only opened. Documents without text are left out.
    Raises ValueError for unreadable input, an empty corpus, or shards left by a different job.
    """
    out = local_path("out", out)
    if processes < 1:
        raise ValueError(f"processes={processes} does no work; use 1 or more")
    if not hasattr(source, "pieces"):
        raise ValueError(f"{source} has no text of its own; tokenise the source of each part")
    if out.exists():
        return _open_finished(out, vocabulary)
    parts = out.with_name(out.name + ".parts")
    groups = _group(source.pieces(split), shard_bytes)
    if not groups:
        raise ValueError(_no_text(split, source))
    shards = [
        _Shard(source, split, group, vocabulary, parts / f"{number:06d}.tokens")
        for number, group in enumerate(groups)
    ]
    try:
        _claim(parts, source=source, split=split, vocabulary=vocabulary, shard_bytes=shard_bytes)
        _run(shards, processes=processes, progress=progress)
        _merge(shards, out, parts)
    # Another process of the same run may have been faster, and removed the shards' folder: also
    # between two looks of `mkdir` at it, which then says that the folder exists.
    except UnwritableFile:
        if not out.exists():
            raise
    except OSError as error:
        if not out.exists():
            reason = f"{out} cannot be made: {error}; check the disk and its rights"
            raise ValueError(reason) from error
    return _open_finished(out, vocabulary)


def _open_finished(out: Path, vocabulary: Vocabulary) -> TokenFile:
    file = open_token_file(out)
    if file.tokenizer != vocabulary.key:
        raise ValueError(f"{out} exists and was written by another tokenizer; delete it first")
    return file


def _group(pieces: Sequence[Piece], shard_bytes: int) -> list[tuple[Piece, ...]]:
    """Consecutive pieces of about `shard_bytes` together; a piece is never cut."""
    groups: list[list[Piece]] = []
    size = shard_bytes
    for piece in pieces:
        if size >= shard_bytes:
            groups.append([])
            size = 0
        groups[-1].append(piece)
        size += piece.stop - piece.start
    return [tuple(group) for group in groups]


def _claim(
    parts: Path, *, source: Source, split: str, vocabulary: Vocabulary, shard_bytes: int
) -> None:
    """Say whose shards these are, or refuse to mix them with those of another job."""
    job = {
        "corpus": fingerprint(source, split),
        "source": repr(source),
        "split": split,
        "tokenizer": vocabulary.key,
        "shard_bytes": shard_bytes,
    }
    parts.mkdir(parents=True, exist_ok=True)
    path = parts / "job.json"
    if path.exists():
        earlier = json.loads(path.read_text(encoding="utf-8"))
        differ = [name for name in job if earlier.get(name) != job[name]]
        if differ:
            raise ValueError(
                f"{parts} was begun with a different {', '.join(differ)}; finish that job, or "
                "delete the folder and start again"
            )
        return
    temporary = parts / f"job.{uuid.uuid4().hex}.tmp"
    temporary.write_text(json.dumps(job, indent=1), encoding="utf-8")
    temporary.replace(path)


def _run(shards: list[_Shard], *, processes: int, progress: Progress | None) -> None:
    sizes = [sum(piece.stop - piece.start for piece in shard.pieces) for shard in shards]
    done = 0
    for number in _run_shards(shards, processes):
        done += sizes[number]
        if progress:
            progress(done, sum(sizes))


def _run_shards(shards: list[_Shard], processes: int) -> Iterator[int]:
    """Numbers of the shards as they are done."""
    if processes == 1 or len(shards) == 1:
        for number, shard in enumerate(shards):
            _tokenize_shard(shard)
            yield number
        return
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor, as_completed

    # Spawned, never forked: a fork of a process that runs JAX's threads can hang.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(processes, len(shards)), mp_context=context) as pool:
        jobs = {pool.submit(_tokenize_shard, shard): n for n, shard in enumerate(shards)}
        try:
            for job in as_completed(jobs):
                job.result()
                yield jobs[job]
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _tokenize_shard(shard: _Shard) -> None:
    try:
        open_token_file(shard.path, verify=True)
    except (FileNotFoundError, DamagedFile):
        write_token_file(
            shard.path,
            _encode(shard),
            vocab=shard.vocabulary.size,
            tokenizer=shard.vocabulary.key,
        )


def _encode(shard: _Shard) -> Iterator[TokenDocument]:
    eos = np.array([shard.vocabulary.eos], dtype=np.uint32)
    for batch in _batches(shard):
        texts = shard.vocabulary.encode_batch([document.text for document in batch])
        prompts = shard.vocabulary.encode_batch([document.prompt for document in batch])
        for prompt, text in zip(prompts, texts, strict=True):
            yield TokenDocument(np.concatenate((prompt, text, eos)), prompt=len(prompt))


def _batches(shard: _Shard, size: int = 256) -> Iterator[list[Document]]:
    batch = []
    for piece in shard.pieces:
        for document in shard.source.read(piece, shard.split):
            if document.text:
                batch.append(document)
            if len(batch) == size:
                yield batch
                batch = []
    if batch:
        yield batch


def _no_text(split: str, source: Source) -> str:
    return f"split {split!r} of {source} has no text; add documents, or change held_out"


def _merge(shards: list[_Shard], out: Path, parts: Path) -> None:
    files = [open_token_file(shard.path) for shard in shards]
    if not sum(len(file.tokens) for file in files):
        shutil.rmtree(parts)
        raise ValueError(_no_text(shards[0].split, shards[0].source))
    merge_token_files(files, out)
    shutil.rmtree(parts, ignore_errors=True)


@contextmanager
def progress_bar(description: str = "tokenising") -> Generator[Progress]:
    """A terminal bar with time left, to pass as `progress`."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(description), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns) as bar:
        task = bar.add_task(description, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
