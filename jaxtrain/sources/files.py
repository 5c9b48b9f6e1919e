"""Files by name, folder or glob, compressed or not, and how they split."""

from __future__ import annotations

import glob
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, ClassVar, cast

from jaxtrain.files.fetched import (
    StoredFile,
    fetched,
    opened_in_place,
    stored_below,
    stored_matches,
)
from jaxtrain.files.pointer import given_address, unreadable
from jaxtrain.files.stores import address_violations, is_address
from jaxtrain.sources.document import (
    Document,
    Piece,
    check_fraction,
    check_split,
    is_held_out,
    piece_of,
)

COMPRESSED = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
"""Suffix of a compressed file -> the codec's name."""
BOM = b"\xef\xbb\xbf"


def check_paths(name: str, paths: str | tuple[str, ...]) -> list[str]:
    """Returns the violations of a field with a path or glob of files, or with a tuple of them."""
    violations = [
        f"{name} has {path!r}; a path or a glob is a text such as 'books/*.txt'"
        for path in as_tuple(paths)
        if not isinstance(path, str) or not path
    ]
    return violations or [v for path in as_tuple(paths) for v in address_violations(name, path)]


@dataclass(frozen=True)
class FileSource:
    """Files by name or glob (`**` too), and how they split.

    Without `held_out_patterns` a document is held out by a hash of its own text, so copies of it
    stay on one side. With them, those files are the held-out split and all others are trained on.

    A file may be compressed, as .gz, .zst or .bz2. A folder stands for the files in it, and in its
    folders, that have the suffixes of such a source; hidden ones are left out. All of them may be
    addresses in stores, which are read in place.

    patterns: the files. held_out: the fraction that is held out, in [0, 1). held_out_patterns:
    the files that are, in its stead.
    """

    suffixes: ClassVar[tuple[str, ...]] = ()
    """Of the files in a folder; () for any."""
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
        patterns, apart = as_tuple(self.patterns), as_tuple(self.held_out_patterns)
        files = split_files(patterns, apart, split, self.suffixes)
        if not files:
            raise ValueError(
                f"every file of patterns={self.patterns!r} is held out by "
                f"held_out_patterns={self.held_out_patterns!r}; narrow the second"
            )
        return tuple(part for file in files for part in self.split_file(file))

    def split_file(self, piece: Piece) -> Iterator[Piece]:
        """The pieces of one file; a source that reads ranges overrides it."""
        yield piece

    def belongs(self, document: Document, split: str) -> bool:
        if self.held_out_patterns:
            return True
        held_out = is_held_out(f"{document.prompt}\0{document.text}", self.held_out)
        return held_out == (split == "held_out")


def is_compressed(path: str) -> bool:
    """True if a file's name says that it is compressed."""
    return Path(path).suffix in COMPRESSED


@contextmanager
def open_bytes(piece: Piece, *, buffer: int | None = None) -> Iterator[BinaryIO]:
    """Opens the file of a piece to be read, decompressed. buffer: as of `opened_in_place`. Raises
    ValueError where it cannot be read, also later; StoreFailed for one in a store."""
    try:
        with _opened(piece, buffer) as file:
            yield file
    except OSError as error:
        if is_address(piece.path) and not is_damage(error):
            raise unreadable(piece.path, error) from error
        raise ValueError(f"{piece.path} cannot be read: {error.strerror or error}") from error


def is_damage(error: OSError) -> bool:
    """True for an error of pyarrow, by which bytes are not of their format."""
    return type(error) is OSError and error.errno is None


@contextmanager
def _opened(piece: Piece, buffer: int | None) -> Iterator[BinaryIO]:
    path = piece.path
    if is_address(path):
        address, version = given_address("path", path), str(piece.version)
        with opened_in_place(address, version, buffer=buffer) as stored:
            yield _decompressed(stored, path) if is_compressed(path) else stored
        return
    with _decompressed(path, path) if is_compressed(path) else open(path, "rb") as file:
        yield file


def _decompressed(source: str | BinaryIO, path: str) -> BinaryIO:
    import pyarrow as pa

    stream = pa.input_stream(source, compression=COMPRESSED[Path(path).suffix])
    return cast(BinaryIO, io.BufferedReader(stream))


def local_file(piece: Piece) -> Path:
    """Returns the path of a piece that is a whole file; one in a store is fetched into the cache,
    unless it was. Raises StoreFailed."""
    if not is_address(piece.path):
        return Path(piece.path)
    address = given_address("path", piece.path)
    try:
        return fetched(StoredFile(address, piece.stop, str(piece.version)))
    except OSError as error:
        raise unreadable(piece.path, error) from error


def read_bytes(piece: Piece) -> bytes:
    """Returns a file's bytes, decompressed, without a byte order mark. Raises ValueError as
    `open_bytes`."""
    with open_bytes(piece) as file:
        return file.read().removeprefix(BOM)


def undecodable(path: str, error: UnicodeDecodeError, *, offset: int) -> str:
    position, byte = offset + error.start, error.object[error.start]
    return (
        f"{path} is not UTF-8 at byte {position} (0x{byte:02x}, {error.reason}); "
        "convert the file or leave it out of the pattern"
    )


def matching_files(
    patterns: tuple[str, ...], suffixes: tuple[str, ...] = ()
) -> dict[str, list[Piece]]:
    """Returns the files that match each pattern, each as one piece. A pattern that is a folder
    matches the files below it, only those with one of `suffixes` if any are given. Raises
    ValueError with every pattern that matches no file; StoreFailed."""
    matches = {pattern: _matching(pattern, suffixes) for pattern in patterns}
    if empty := [pattern for pattern, files in matches.items() if not files]:
        raise ValueError(
            f"no file matches {', '.join(map(repr, empty))} (from {os.getcwd()}); "
            "check the path, or run from the directory it is relative to"
        )
    return matches


def _matching(pattern: str, suffixes: tuple[str, ...]) -> list[Piece]:
    if is_address(pattern):
        return _stored(pattern, suffixes)
    pattern = os.path.expanduser(pattern)
    if os.path.isdir(pattern):
        inside = glob.glob(os.path.join(glob.escape(pattern), "**", "*"), recursive=True)
        names = [name for name in inside if not suffixes or kind(name) in suffixes]
    else:
        names = glob.glob(pattern, recursive=True)
    return [piece_of(name, name=name) for name in names if os.path.isfile(name)]


def _stored(pattern: str, suffixes: tuple[str, ...]) -> list[Piece]:
    address = given_address("path", pattern)
    is_glob = glob.has_magic(pattern)
    try:
        files = stored_matches(address) if is_glob else stored_below(address)
        if is_glob and not files:  # a name may have brackets
            files, is_glob = stored_below(address), False
    except OSError as error:
        raise unreadable(pattern, error) from error
    names = {os.fspath(file.address): file for file in files}
    is_whole = is_glob or [*names] == [os.fspath(address)]
    return [
        Piece(name, name, 0, file.size, file.version)
        for name, file in names.items()
        if is_whole or not suffixes or kind(name) in suffixes
    ]


def kind(path: str) -> str:
    """Returns a file's suffix, of a compressed one that before it."""
    file = Path(path)
    return file.with_suffix("").suffix if is_compressed(path) else file.suffix


def split_files(
    patterns: tuple[str, ...], apart: tuple[str, ...], split: str, suffixes: tuple[str, ...] = ()
) -> list[Piece]:
    """Returns the files of a split, sorted. apart: patterns of the files that are held out; () for
    none. Raises as `matching_files`, for all patterns at once."""
    matches = matching_files((*patterns, *apart), suffixes)
    files = {piece.path: piece for pieces in matches.values() for piece in pieces}
    held_out = {piece.path for pattern in apart for piece in matches[pattern]}
    names = held_out if split == "held_out" and held_out else files.keys() - held_out
    return [files[name] for name in sorted(names)]


def as_tuple(patterns: str | tuple[str, ...]) -> tuple[str, ...]:
    return patterns if isinstance(patterns, tuple) else (patterns,)
