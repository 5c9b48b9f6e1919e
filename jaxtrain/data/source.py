"""Sources of documents: Python's standard library, and text files.

A source lists *pieces* (a file, or a range of one) without reading them, and reads any piece by
itself. So a corpus is tokenised in parallel, and recognised by names, sizes and times alone.
"""

from __future__ import annotations

import glob
import hashlib
import os
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

from jaxtrain.data.dataset import check_split
from jaxtrain.files.stores import store_violations
from jaxtrain.tokenizers.chat import Conversation


class Document(NamedTuple):
    """text: what is learnt. prompt: comes before the text and is read, but not learnt: its tokens
    have loss weight 0. conversation: encoded in their stead, if there is one. place: says where the
    document is, for messages."""

    text: str
    prompt: str = ""
    conversation: Conversation | None = None
    place: Callable[[], str] | None = None


class Piece(NamedTuple):
    """Bytes `start` to `stop` of a file."""

    path: str
    name: str
    start: int
    stop: int
    modified_ns: int


class Source(Protocol):
    """Frozen dataclass; `pieces` in a fixed order, `read` pure."""

    def pieces(self, split: str) -> tuple[Piece, ...]: ...

    def read(self, piece: Piece, split: str) -> Iterator[Document]: ...


def documents(source: Source, split: str) -> Iterator[Document]:
    """Every document of the split that is not empty, in order."""
    for piece in source.pieces(split):
        yield from (document for document in source.read(piece, split) if document.text)


def fingerprint(source: Source, split: str) -> str:
    """Names the corpus without reading it: fields, and each file's name, size and time of change.

    Like make and rsync it takes a file of the same size and time to be the same file.
    """
    listed = [tuple(piece) for piece in source.pieces(split)]
    return hashlib.sha256(repr((source, split, listed)).encode()).hexdigest()


def is_held_out(key: str, fraction: float) -> bool:
    """True if the document with this `key` is in the `fraction` that is held out."""
    hashed = hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(hashed[:8], "big") < fraction * 2**64


def check_paths(name: str, paths: str | tuple[str, ...]) -> list[str]:
    """Returns the violations of a field with a path or glob of files, or with a tuple of them."""
    violations = [
        f"{name} has {path!r}; a path or a glob is a text such as 'books/*.txt'"
        for path in as_tuple(paths)
        if not isinstance(path, str) or not path
    ]
    return violations or store_violations(name, paths)


def check_fraction(held_out: float) -> list[str]:
    number = isinstance(held_out, int | float) and not isinstance(held_out, bool)
    if number and 0.0 <= held_out < 1.0:
        return []
    return [f"held_out={held_out!r} is a fraction of the documents; use 0 <= held_out < 1"]


TESTS_AND_INSTALLED = ("site-packages", "dist-packages", "test", "tests", "idle_test")
# Help texts and character tables, written by programs. The one file of help texts alone would be
# a third of what is held out, or of nothing, as its name's hash has it.
GENERATED = ("pydoc_data", "encodings", "__pycache__")
SKIPPED_DIRECTORIES = frozenset(TESTS_AND_INSTALLED + GENERATED)


@dataclass(frozen=True)
class StdlibSource:
    """The Python standard library's own source: real text that is always there, about 10 MB.

    A document is a file; tests, installed packages and generated files are left out, and so are
    the few that are not UTF-8. Held out is a fraction of the files, by a hash of
    the name relative to the library, so that the split is the same on every machine.

    held_out: the fraction, in [0, 1).
    """

    held_out: float = 0.05

    def __post_init__(self) -> None:
        if problems := check_fraction(self.held_out):
            raise ValueError(problems[0])

    def pieces(self, split: str) -> tuple[Piece, ...]:
        check_split(split)
        root = sysconfig.get_path("stdlib")
        pieces = []
        for name in sorted(_stdlib_names(root)):
            if is_held_out(name, self.held_out) == (split == "held_out"):
                path = os.path.join(root, name)
                pieces.append(_piece(path, name=name))
        if not pieces:
            raise ValueError(
                f"{root} holds no .py files for split {split!r} with held_out={self.held_out}; "
                "use a Python whose standard library is not zipped, or TextFiles"
            )
        return tuple(pieces)

    def read(self, piece: Piece, split: str) -> Iterator[Document]:
        try:
            yield Document(Path(piece.path).read_bytes().decode("utf-8"))
        except UnicodeDecodeError:
            return


def _stdlib_names(root: str) -> Iterator[str]:
    for directory, folders, files in os.walk(root):
        folders[:] = [
            name
            for name in folders
            if name not in SKIPPED_DIRECTORIES and not name.startswith("config-")
        ]
        for name in files:
            # Written when Python was built or installed: they differ from machine to machine.
            local = name.startswith("_sysconfigdata") or name == "sitecustomize.py"
            if name.endswith(".py") and not local:
                yield os.path.relpath(os.path.join(directory, name), root).replace(os.sep, "/")


def _piece(path: str, *, name: str) -> Piece:
    status = os.stat(path)
    return Piece(path, name, 0, status.st_size, status.st_mtime_ns)


@dataclass(frozen=True)
class FileSource:
    """Files by name or glob (`**` too), and how they split.

    Without `held_out_patterns` a document is held out by a hash of its own text, so copies of it
    stay on one side. With them, those files are the held-out split and all others are trained on.

    patterns: the files. held_out: the fraction that is held out, in [0, 1). held_out_patterns:
    the files that are, in its stead.
    """

    patterns: str | tuple[str, ...]
    held_out: float = field(default=0.05, kw_only=True)
    held_out_patterns: str | tuple[str, ...] = field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        problems = check_fraction(self.held_out) + check_paths("patterns", self.patterns)
        problems += check_paths("held_out_patterns", self.held_out_patterns)
        if not as_tuple(self.patterns):
            problems.append("patterns is empty; name at least one file or glob")
        if problems:
            raise ValueError(f"{type(self).__name__}: " + "; ".join(problems))

    def pieces(self, split: str) -> tuple[Piece, ...]:
        check_split(split)
        paths = split_files(as_tuple(self.patterns), as_tuple(self.held_out_patterns), split)
        if not paths:
            raise ValueError(
                f"every file of patterns={self.patterns!r} is held out by "
                f"held_out_patterns={self.held_out_patterns!r}; narrow the second"
            )
        return tuple(part for path in paths for part in self.split_file(_piece(path, name=path)))

    def split_file(self, piece: Piece) -> Iterator[Piece]:
        """The pieces of one file; a source that reads ranges overrides it."""
        yield piece

    def belongs(self, document: Document, split: str) -> bool:
        if self.held_out_patterns:
            return True
        held_out = is_held_out(f"{document.prompt}\0{document.text}", self.held_out)
        return held_out == (split == "held_out")


@dataclass(frozen=True)
class TextFiles(FileSource):
    """UTF-8 text files. A document is a file, or what stands between `separator`s in it.

    Reads a file whole. An undecodable file is refused with the offset of the byte.
    """

    separator: str = field(default="", kw_only=True)

    def read(self, piece: Piece, split: str) -> Iterator[Document]:
        data = read_bytes(piece.path)
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(undecodable(piece.path, error, offset=0)) from error
        for part in text.split(self.separator) if self.separator else (text,):
            if self.belongs(Document(part), split):
                yield Document(part)


def read_bytes(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error


def undecodable(path: str, error: UnicodeDecodeError, *, offset: int) -> str:
    position, byte = offset + error.start, error.object[error.start]
    return (
        f"{path} is not UTF-8 at byte {position} (0x{byte:02x}, {error.reason}); "
        "convert the file or leave it out of the pattern"
    )


def matching_files(patterns: tuple[str, ...]) -> list[str]:
    """Returns the sorted files that match; ValueError names every pattern that matches none."""
    matches = {
        pattern: [
            name
            for name in glob.glob(os.path.expanduser(pattern), recursive=True)
            if os.path.isfile(name)
        ]
        for pattern in patterns
    }
    if empty := [pattern for pattern, files in matches.items() if not files]:
        raise ValueError(
            f"no file matches {', '.join(map(repr, empty))} (from {os.getcwd()}); "
            "check the path, or run from the directory it is relative to"
        )
    return sorted({name for files in matches.values() for name in files})


def split_files(patterns: tuple[str, ...], apart: tuple[str, ...], split: str) -> list[str]:
    """Sorted files of a split: `apart` are held out, where there are any. ValueError as
    `matching_files` raises it, for all patterns at once."""
    everything, held_out = matching_files((*patterns, *apart)), matching_files(apart)
    if split == "held_out" and held_out:
        return held_out
    return sorted(set(everything) - set(held_out))


def as_tuple(patterns: str | tuple[str, ...]) -> tuple[str, ...]:
    return patterns if isinstance(patterns, tuple) else (patterns,)
