"""Tokenise a corpus: in parallel, restartable, with the same bytes in the file either way.

The corpus is cut into shards by its files alone. Each shard is a token file of its own, written
atomically beside the output, so an interrupted job goes on with the shards that are missing.
"""

from __future__ import annotations

import json
import logging
import shutil
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import chain, groupby, islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxtrain.data.token_file import (
    TokenDocument,
    TokenFile,
    merge_token_files,
    open_token_file,
    write_token_file,
)
from jaxtrain.files.array_file import DamagedFile, UnwritableFile
from jaxtrain.files.stores import local_path
from jaxtrain.sources import (
    Conversations,
    Document,
    Piece,
    Preferences,
    Source,
    fingerprint,
)
from jaxtrain.sources.document import no_text
from jaxtrain.tokenizers import Vocabulary
from jaxtrain.tokenizers.chat import ChatEncoder
from jaxtrain.tokenizers.spelled import pattern_of

log = logging.getLogger(__name__)

SHARD_BYTES = 16 << 20
ENCODING = "prompt and text as one"
"""How documents are encoded: caches and shards of an older way are not read."""
TellProgress = Callable[[int, int], None]
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
    progress: TellProgress | None = None,
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
        return _open_finished(out, vocabulary, source)
    parts = out.with_name(out.name + ".parts")
    groups = _group(source.pieces(split), shard_bytes)
    if not groups:
        raise ValueError(no_text(split, source))
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
    return _open_finished(out, vocabulary, source)


def chat_key(vocabulary: Vocabulary) -> str:
    """Names how a vocabulary encodes conversations, "" where it does not."""
    template = getattr(vocabulary, "chat", None)
    return "" if template is None else template.key


def _conversations_key(source: Source, vocabulary: Vocabulary) -> str:
    """Names how a source's conversations are encoded, "" for one that has none."""
    is_one = isinstance(source, Conversations | Preferences)
    return f"{chat_key(vocabulary)} {source.learn}" if is_one else ""


def _open_finished(out: Path, vocabulary: Vocabulary, source: Source) -> TokenFile:
    file = open_token_file(out)
    if file.conversations != _conversations_key(source, vocabulary):
        raise ValueError(f"{out} exists and was written by another chat template; delete it first")
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
        "encoding": ENCODING,
    }
    if conversations := _conversations_key(source, vocabulary):
        job["conversations"] = conversations
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


def _run(shards: list[_Shard], *, processes: int, progress: TellProgress | None) -> None:
    sizes = [sum(piece.stop - piece.start for piece in shard.pieces) for shard in shards]
    done, warned = 0, False
    for number, spelled in _run_shards(shards, processes):
        done += sizes[number]
        if progress:
            progress(done, sum(sizes))
        if spelled is not None and not warned:
            warned = True
            log.warning(
                "texts have special tokens written out, such as %r: they are learnt as the "
                "characters that they have; for conversations use Conversations(...), by which a "
                "chat template writes such tokens",
                spelled,
            )


def _run_shards(shards: list[_Shard], processes: int) -> Iterator[tuple[int, str | None]]:
    """Numbers of the shards as they are done, with a special token that their texts spell."""
    if processes == 1 or len(shards) == 1:
        for number, shard in enumerate(shards):
            yield number, _tokenize_shard(shard)
        return
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor, as_completed

    # Spawned, never forked: a fork of a process that runs JAX's threads can hang.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(processes, len(shards)), mp_context=context) as pool:
        jobs = {pool.submit(_tokenize_shard, shard): n for n, shard in enumerate(shards)}
        try:
            for job in as_completed(jobs):
                yield jobs[job], job.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _tokenize_shard(shard: _Shard) -> str | None:
    """Writes a shard's file, if it is not there. Returns a special token that its texts spell."""
    spelled: list[str] = []
    try:
        open_token_file(shard.path, verify=True)
    except (FileNotFoundError, DamagedFile):
        write_token_file(
            shard.path,
            _encode(shard, spelled),
            vocab=shard.vocabulary.size,
            tokenizer=shard.vocabulary.key,
            conversations=_conversations_key(shard.source, shard.vocabulary),
        )
    return next(iter(spelled), None)


def _encode(shard: _Shard, spelled: list[str]) -> Iterator[TokenDocument]:
    """Encodes documents; puts the first special token that a text spells into `spelled`."""
    special = pattern_of(shard.vocabulary.special)
    refused: list[str] = []
    with ExitStack() as stack:
        chat = None
        groups = (groupby(batch, lambda d: d.conversation is None) for batch in _batches(shard))
        for are_texts, group in chain.from_iterable(groups):
            if are_texts:
                batch = [answer for document in group for answer in document.answers]
                texts = (text for document in batch for text in document[:2])
                matches = filter(None, map(special.search, texts if not spelled else ()))
                spelled += (match[0] for match in islice(matches, 1))
                yield from _encode_texts(shard, batch)
                continue
            chat = chat or stack.enter_context(ChatEncoder(shard.vocabulary))
            for document in group:
                try:  # both answers of a pair, or none
                    answers = document.answers
                    if refused:  # a place is looked for in the file, from its beginning
                        answers = [answer._replace(place=None) for answer in answers]
                    yield from [encode_conversation(chat, answer) for answer in answers]
                except ValueError as error:
                    # Of a template that is ended every later conversation would be refused.
                    if getattr(shard.source, "on_bad", "refuse") != "skip" or not chat.is_open:
                        raise
                    refused.append(str(error))
        if refused:
            log.warning("%d conversations are left out, the first: %s", len(refused), refused[0])


def encode_conversation(chat: ChatEncoder, document: Document) -> TokenDocument:
    """Returns a document's conversation as tokens. Raises ValueError with its place in a file."""
    assert document.conversation is not None
    try:
        ids, learnt = chat.encode(document.conversation)
    except ValueError as error:
        place = "" if document.place is None else f"{document.place()}: "
        raise ValueError(f"{place}{error}") from error
    return TokenDocument(ids, prompt=int(np.argmax(learnt)), learnt=learnt)


def _encode_texts(shard: _Shard, batch: list[Document]) -> Iterator[TokenDocument]:
    vocabulary = shard.vocabulary
    bos = np.array([] if vocabulary.bos is None else [vocabulary.bos], dtype=np.uint32)
    eos = np.array([vocabulary.eos] if vocabulary.add_eos else [], dtype=np.uint32)
    texts, prompts = [document.text for document in batch], [document.prompt for document in batch]
    if not any(prompts):
        for ids in vocabulary.encode_batch(texts):
            yield TokenDocument(np.concatenate((bos, ids, eos)))
        return
    for ids, count in vocabulary.encode_pairs(prompts, texts):
        prompt = len(bos) + count if count else 0
        yield TokenDocument(np.concatenate((bos, ids, eos)), prompt=prompt)


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


def _merge(shards: list[_Shard], out: Path, parts: Path) -> None:
    files = [open_token_file(shard.path) for shard in shards]
    if not sum(len(file.tokens) for file in files):
        shutil.rmtree(parts)
        raise ValueError(no_text(shards[0].split, shards[0].source))
    merge_token_files(files, out)
    shutil.rmtree(parts, ignore_errors=True)
