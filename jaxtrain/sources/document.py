"""Documents, and the interface of what lists and reads them.

A source lists *pieces* (a file, or a range of one) without reading them, and reads any piece by
itself. So a corpus is tokenised in parallel, and recognised by names, sizes and times alone.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from itertools import islice
from typing import NamedTuple, Protocol

from jaxtrain.tokenizers.chat import Conversation

SPLITS = ("train", "held_out")


def check_split(split: str) -> None:
    if split not in SPLITS:
        raise ValueError(f"split={split!r} does not exist; use one of {', '.join(SPLITS)}")


class Document(NamedTuple):
    """text: what is learnt. prompt: comes before the text and is read, but not learnt: its tokens
    have loss weight 0. conversation: encoded in their stead, if there is one. place: says where the
    document is, for messages. rejected: of a pair, of which this is the chosen answer; it follows
    this document wherever it goes."""

    text: str
    prompt: str = ""
    conversation: Conversation | None = None
    place: Callable[[], str] | None = None
    rejected: Document | None = None

    @property
    def answers(self) -> list[Document]:
        """The document, and the rejected one of a pair, which is in the same place."""
        if self.rejected is None:
            return [self]
        return [self, self.rejected._replace(place=self.place)]


class Piece(NamedTuple):
    """Bytes `start` to `stop` of a file. path: or its address in a store. version: the time of its
    last change in ns; of one in a store a text that is another one once it is written again."""

    path: str
    name: str
    start: int
    stop: int
    version: int | str


class Source(Protocol):
    """Frozen dataclass; `pieces` in a fixed order, `read` pure."""

    def pieces(self, split: str) -> tuple[Piece, ...]: ...

    def read(self, piece: Piece, split: str) -> Iterator[Document]: ...


def documents(source: Source, split: str) -> Iterator[Document]:
    """Every document of the split that is not empty, in order."""
    for piece in source.pieces(split):
        yield from (document for document in source.read(piece, split) if document.text)


def fingerprint(source: Source, split: str) -> str:
    """Names the corpus without reading it: fields, and each file's name, size and version.

    Like make and rsync it takes a file of the same size and time to be the same file.
    """
    listed = [tuple(piece) for piece in source.pieces(split)]
    return hashlib.sha256(repr((source, split, listed)).encode()).hexdigest()


def holds_none_out(source: Source) -> bool:
    """True if no document of a source is held out."""
    return getattr(source, "held_out", None) == 0 and not getattr(source, "held_out_patterns", ())


def no_text(split: str, source: Source) -> str:
    """Returns the message for a split without a document."""
    if holds_none_out(source) and split == "held_out":
        return f"held_out=0 of {source} holds no document out: use evaluation=None, or held_out=0.1"
    other = islice(documents(source, "train"), 2) if split == "held_out" else ()
    if (count := len(list(other))) == 1:
        return (
            "the corpus is one document, which is trained on, and none is held out: cut it into "
            'documents (TextFiles(..., separator="\\n\\n")), or use evaluation=None and held_out=0'
        )
    few = "" if not count else "; documents are held out by a hash of each, and these are few"
    return f"split {split!r} of {source} has no text{few}: add documents, or change held_out"


def is_held_out(key: str, fraction: float) -> bool:
    """True if the document with this `key` is in the `fraction` that is held out."""
    hashed = hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(hashed[:8], "big") < fraction * 2**64


def piece_of(path: str, *, name: str) -> Piece:
    status = os.stat(path)
    return Piece(path, name, 0, status.st_size, status.st_mtime_ns)


def check_fraction(held_out: float) -> list[str]:
    number = isinstance(held_out, int | float) and not isinstance(held_out, bool)
    if number and 0.0 <= held_out < 1.0:
        return []
    return [f"held_out={held_out!r} is a fraction of the documents; use 0 <= held_out < 1"]
