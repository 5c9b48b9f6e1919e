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

from jaxtrain.files.stores import store_violations
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
    return violations or store_violations(name, paths)


@dataclass(frozen=True)
class FileSource:
    """Files by name or glob (`**` too), and how they split.

    Without `held_out_patterns` a document is held out by a hash of its own text, so copies of it
    stay on one side. With them, those files are the held-out split and all others are trained on.

    A file may be compressed, as .gz, .zst or .bz2. A folder stands for the files in it, and in its
    folders, that have the suffixes of such a source; hidden ones are left out.

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
        paths = split_files(patterns, apart, split, self.suffixes)
        if not paths:
            raise ValueError(
                f"every file of patterns={self.patterns!r} is held out by "
                f"held_out_patterns={self.held_out_patterns!r}; narrow the second"
            )
        return tuple(part for path in paths for part in self.split_file(piece_of(path, name=path)))

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
def open_bytes(path: str) -> Iterator[BinaryIO]:
    """Opens a file to be read, decompressed. Raises ValueError where it cannot be read, also
    later."""
    try:
        with _opened(path) as file:
            yield file
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from error


def _opened(path: str) -> BinaryIO:
    if not is_compressed(path):
        return open(path, "rb")
    import pyarrow as pa

    stream = pa.input_stream(path, compression=COMPRESSED[Path(path).suffix])
    return cast(BinaryIO, io.BufferedReader(stream))


def read_bytes(path: str) -> bytes:
    """Returns a file's bytes, decompressed, without a byte order mark. Raises ValueError as
    `open_bytes`."""
    with open_bytes(path) as file:
        return file.read().removeprefix(BOM)


def undecodable(path: str, error: UnicodeDecodeError, *, offset: int) -> str:
    position, byte = offset + error.start, error.object[error.start]
    return (
        f"{path} is not UTF-8 at byte {position} (0x{byte:02x}, {error.reason}); "
        "convert the file or leave it out of the pattern"
    )


def matching_files(patterns: tuple[str, ...], suffixes: tuple[str, ...] = ()) -> list[str]:
    """Returns the files that match a pattern, sorted. A pattern that is a folder matches the files
    below it, only those with one of `suffixes` if any are given. Raises ValueError with every
    pattern that matches no file."""
    matches = {pattern: _matching(os.path.expanduser(pattern), suffixes) for pattern in patterns}
    if empty := [pattern for pattern, files in matches.items() if not files]:
        raise ValueError(
            f"no file matches {', '.join(map(repr, empty))} (from {os.getcwd()}); "
            "check the path, or run from the directory it is relative to"
        )
    return sorted({name for files in matches.values() for name in files})


def _matching(pattern: str, suffixes: tuple[str, ...]) -> list[str]:
    if os.path.isdir(pattern):
        inside = glob.glob(os.path.join(glob.escape(pattern), "**", "*"), recursive=True)
        return [n for n in inside if os.path.isfile(n) and (not suffixes or kind(n) in suffixes)]
    return [name for name in glob.glob(pattern, recursive=True) if os.path.isfile(name)]


def kind(path: str) -> str:
    """Returns a file's suffix, of a compressed one that before it."""
    file = Path(path)
    return file.with_suffix("").suffix if is_compressed(path) else file.suffix


def split_files(
    patterns: tuple[str, ...], apart: tuple[str, ...], split: str, suffixes: tuple[str, ...] = ()
) -> list[str]:
    """Sorted files of a split: `apart` are held out, where there are any. ValueError as
    `matching_files` raises it, for all patterns at once."""
    everything = matching_files((*patterns, *apart), suffixes)
    held_out = matching_files(apart, suffixes)
    if split == "held_out" and held_out:
        return held_out
    return sorted(set(everything) - set(held_out))


def as_tuple(patterns: str | tuple[str, ...]) -> tuple[str, ...]:
    return patterns if isinstance(patterns, tuple) else (patterns,)
