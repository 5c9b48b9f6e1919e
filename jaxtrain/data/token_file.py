"""Tokenised documents in memory-mapped files.

A token file is a sealed array file (`array_file.py`) of kind `tokens`:

    meta     format 1, vocab, tokenizer (the key of the vocabulary that wrote it; "" if unknown)
    tokens   [count] uint16, or uint32 where vocab > 65536: documents one after the other, each
             with the eos that ends it
    offsets  [documents + 1] int64: document i is tokens[offsets[i] : offsets[i + 1]]
    prompts  [documents] int64: its first so many tokens are read, but have loss weight 0
    learnt   [count] uint8, in files with conversations only: 0 for further tokens without loss
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxtrain.data.permutation import below, random_bits
from jaxtrain.files.array_file import (
    VERIFY_BYTES,
    ArraySpec,
    DamagedFile,
    open_arrays,
    whole,
    write_arrays,
)
from jaxtrain.sources.document import Piece, check_fraction, check_split
from jaxtrain.sources.files import as_tuple, check_paths, local_file, split_files

KIND = "tokens"
TOKENS = ".tokens"
"""Suffix of token files in a folder."""
FORMAT = 1


class TokenDocument(NamedTuple):
    ids: np.ndarray
    """[tokens] integers, eos included."""
    prompt: int = 0
    learnt: np.ndarray | None = None
    """[tokens] bool: the others are read only; None for all behind the prompt."""


class TokenFile(NamedTuple):
    path: Path
    vocab: int
    tokenizer: str
    digest: str
    tokens: np.ndarray
    offsets: np.ndarray
    prompts: np.ndarray
    learnt: np.ndarray | None = None
    conversations: str = ""
    """Names how its conversations were encoded, "" where it has none."""


def open_token_file(path: Path, *, verify: bool | None = None) -> TokenFile:
    """Memory-map it. Raises DamagedFile, and ValueError for an id that is not below `vocab`.

    `verify` reads every token; by default it does so up to 256 MiB. In longer files an id outside
    the vocabulary is found when its row is read.
    """
    file = open_arrays(path, kind=KIND, verify=verify)
    if file.meta.get("format") != FORMAT:
        raise DamagedFile(f"{path} has format {file.meta.get('format')}, this reads {FORMAT}")
    named = {"conversations": file.meta.get("conversations", "")}
    meta = (file.meta["vocab"], file.meta["tokenizer"], file.digest)
    opened = TokenFile(path, *meta, **file.arrays, **named)
    sizes = {len(part) for part in (opened.tokens, opened.learnt) if part is not None}
    if {opened.offsets[-1]} != sizes or len(opened.prompts) + 1 != len(opened.offsets):
        raise DamagedFile(f"{path} is damaged: its documents do not add up to its tokens")
    if opened.tokens.nbytes <= VERIFY_BYTES if verify is None else verify:
        check_ids(opened.tokens, vocab=opened.vocab, path=path, position=0)
    return opened


def token_dtype(vocab: int) -> str:
    return "uint16" if vocab <= 1 << 16 else "uint32"


def write_token_file(
    path: Path,
    documents: Iterable[TokenDocument],
    *,
    vocab: int,
    tokenizer: str = "",
    conversations: str = "",
) -> None:
    """Write documents that fit in memory; `merge_token_files` joins such files without limit.

    Raises ValueError for an id outside the vocabulary, naming its position in the file.
    """
    parts, prompts, count = [np.empty(0, dtype=token_dtype(vocab))], [], 0
    lengths, learnt = [0], []
    for document in documents:
        ids = np.asarray(document.ids)
        check_ids(ids, vocab=vocab, path=path, position=count)
        parts.append(ids.astype(token_dtype(vocab)))
        prompts.append(document.prompt)
        lengths.append(len(ids))
        if document.learnt is not None and len(document.learnt) != len(ids):
            raise ValueError(
                f"{path}: document {len(prompts) - 1} has {len(ids)} ids, and says of "
                f"{len(document.learnt)} whether they are learnt"
            )
        learnt.append(document.learnt)
        count += len(ids)
    arrays = {
        "tokens": whole(np.concatenate(parts)),
        "offsets": whole(np.cumsum(lengths, dtype=np.int64)),
        "prompts": whole(np.array(prompts, dtype=np.int64)),
    }
    if any(mask is not None for mask in learnt):
        sizes = zip(learnt, lengths[1:], strict=True)
        masks = [np.ones(size) if mask is None else mask for mask, size in sizes]
        arrays["learnt"] = whole(np.concatenate(masks).astype(np.uint8))
    meta = _meta(vocab, tokenizer, conversations)
    write_arrays(path, kind=KIND, meta=meta, arrays=arrays)


def _meta(vocab: int, tokenizer: str, conversations: str) -> dict[str, Any]:
    meta = {"format": FORMAT, "vocab": vocab, "tokenizer": tokenizer}
    return meta | ({"conversations": conversations} if conversations else {})


def merge_token_files(files: Sequence[TokenFile], path: Path) -> None:
    """Join files of one vocabulary, streaming; the result depends on the documents alone."""
    if len({(file.vocab, file.tokenizer, file.conversations) for file in files}) != 1:
        listed = ", ".join(f"{file.path} (vocab {file.vocab})" for file in files) or "none"
        raise ValueError(f"only token files of one tokenizer can be joined; found {listed}")
    tokens = [len(file.tokens) for file in files]
    documents = sum(len(file.prompts) for file in files)
    bases = list(accumulate(tokens, initial=0))
    ends = (file.offsets[1:] + base for file, base in zip(files, bases, strict=False))
    vocab, tokenizer = files[0].vocab, files[0].tokenizer
    arrays = {
        "tokens": ArraySpec(token_dtype(vocab), (sum(tokens),), (file.tokens for file in files)),
        "offsets": ArraySpec("int64", (documents + 1,), _chain(np.zeros(1, np.int64), ends)),
        "prompts": ArraySpec("int64", (documents,), (file.prompts for file in files)),
    }
    if any(file.learnt is not None for file in files):
        masks = (_mask(file) for file in files)
        arrays["learnt"] = ArraySpec("uint8", (sum(tokens),), masks)
    meta = _meta(vocab, tokenizer, files[0].conversations)
    write_arrays(path, kind=KIND, meta=meta, arrays=arrays)


def _mask(file: TokenFile) -> np.ndarray:
    return np.ones(len(file.tokens), dtype=np.uint8) if file.learnt is None else file.learnt


def _chain(first: np.ndarray, following: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
    yield first
    yield from following


def check_ids(ids: np.ndarray, *, vocab: int, path: Path, position: int) -> None:
    """Raises ValueError for the first id outside [0, vocab); ids[0] is token `position`."""
    if len(ids) and not 0 <= ids.min() <= ids.max() < vocab:
        first = int(np.argmax((ids < 0) | (ids >= vocab)))
        raise ValueError(
            f"{path}: token {position + first} is id {ids[first]}, outside the vocabulary of "
            f"{vocab}; use the tokenizer that made the file, or tokenise again"
        )


@dataclass(frozen=True)
class TokenFiles:
    """Documents that are tokenised already, by `tokenize` or `write_token_file`.

    Held out is a fraction of the documents by a hash of (file, number), or the files of
    `held_out_paths`. The tokenizer beside it must be the one that wrote the files.

    paths: the files, by name or glob. held_out: the fraction, in [0, 1).
    """

    paths: str | tuple[str, ...]
    held_out: float = field(default=0.05, kw_only=True)
    held_out_paths: str | tuple[str, ...] = field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        problems = check_fraction(self.held_out) + check_paths("paths", self.paths)
        problems += check_paths("held_out_paths", self.held_out_paths)
        if problems:
            raise ValueError("TokenFiles: " + "; ".join(problems))

    def store(self, split: str, *, vocab: int, tokenizer: str) -> TokenStore:
        """Raises ValueError listing every file that does not suit the tokenizer."""
        check_split(split)
        files = tuple(open_token_file(local_file(piece)) for piece in self.files(split))
        problems = [
            f"{file.path} was written by another tokenizer (key {file.tokenizer[:12]}, "
            f"the experiment's is {tokenizer[:12]})"
            for file in files
            if file.tokenizer not in ("", tokenizer)
        ]
        if problems:
            raise ValueError("; ".join(problems) + "; name the tokenizer they were made with")
        for file in files:
            if file.vocab > vocab:
                check_ids(file.tokens, vocab=vocab, path=file.path, position=0)
        return TokenStore(files=files, documents=self._select(files, split))

    def files(self, split: str) -> list[Piece]:
        """Returns the split's files. Raises ValueError with each pattern that matches none."""
        files = split_files(as_tuple(self.paths), as_tuple(self.held_out_paths), split, (TOKENS,))
        if not files:
            raise ValueError(f"every file of paths={self.paths!r} is in held_out_paths")
        return files

    def _select(self, files: tuple[TokenFile, ...], split: str) -> np.ndarray:
        """[documents of the split] int64: their numbers through all files."""
        numbers = np.arange(sum(len(file.prompts) for file in files), dtype=np.int64)
        if self.held_out_paths:
            return numbers
        bits = [random_bits(len(file.prompts), "held_out", file.digest) for file in files]
        return numbers[below(np.concatenate(bits), self.held_out) == (split == "held_out")]


class TokenStore:
    """Documents of one or more token files as one sequence.

    `starts` [documents] int64 are addresses, `lengths` and `prompts` [documents] int64 are tokens;
    `gather` reads any addresses.
    """

    def __init__(self, *, files: tuple[TokenFile, ...], documents: np.ndarray | None) -> None:
        self.files = files
        self.bases = np.cumsum([0, *(len(file.tokens) for file in files)])
        starts = _concatenate([f.offsets[:-1] + b for f, b in zip(files, self.bases, strict=False)])
        lengths = _concatenate([np.diff(file.offsets) for file in files])
        prompts = _concatenate([file.prompts for file in files])
        chosen = slice(None) if documents is None else documents
        self.starts, self.lengths, self.prompts = starts[chosen], lengths[chosen], prompts[chosen]
        if not self.lengths.sum():
            names = ", ".join(str(file.path) for file in files)
            raise ValueError(f"no document is left in this split of {names}; change held_out")
        masked = any(file.learnt is not None for file in files)
        self._masks = [_mask(file) for file in files] if masked else []
        hashed = sha256("".join(file.digest for file in files).encode())
        hashed.update(b"all" if documents is None else documents.tobytes())
        self.digest = hashed.hexdigest()

    def gather(self, addresses: np.ndarray) -> np.ndarray:
        """Tokens at `addresses`, int32, in the same shape."""
        return self._gather([file.tokens for file in self.files], addresses, np.int32)

    def learnt(self, document: np.ndarray, offset: np.ndarray) -> np.ndarray:
        """True for the tokens at `offset` in `document`, of the same shape, that have a loss."""
        learnt = offset >= self.prompts[document]
        if self._masks:
            learnt &= self._gather(self._masks, self.starts[document] + offset, np.bool_)
        return learnt

    def learns(self, sizes: np.ndarray) -> np.ndarray:
        """[documents] bool: behind its first token, and among its first `sizes` [documents] ones, a
        document has one with a loss."""
        first = np.maximum(self.prompts, 1)
        if not self._masks:
            return first < sizes
        counts = np.concatenate([[0], np.cumsum(np.concatenate(self._masks), dtype=np.int64)])
        stops = np.maximum(sizes, first)
        return counts[self.starts + stops] > counts[self.starts + first]

    @property
    def has_prompts(self) -> bool:
        """True if there are tokens that are only read."""
        return bool(self.prompts.any()) or bool(self._masks)

    def _gather(
        self, arrays: list[np.ndarray], addresses: np.ndarray, dtype: type[np.generic]
    ) -> np.ndarray:
        if len(arrays) == 1:
            return arrays[0][addresses].astype(dtype)
        owner = np.searchsorted(self.bases, addresses, side="right") - 1
        out = np.empty(addresses.shape, dtype=dtype)
        for number in np.unique(owner):
            own = owner == number
            out[own] = arrays[number][addresses[own] - self.bases[number]]
        return out

    def refuse(self, address: int, *, vocab: int) -> None:
        """Raise the error for the token at `address`, which is outside the vocabulary."""
        number = int(np.searchsorted(self.bases, address, side="right")) - 1
        position = address - int(self.bases[number])
        file = self.files[number]
        token = file.tokens[position : position + 1]
        check_ids(token, vocab=vocab, path=file.path, position=position)


def _concatenate(arrays: list[np.ndarray]) -> np.ndarray:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
