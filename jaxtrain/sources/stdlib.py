"""The Python standard library as a corpus."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from jaxtrain.sources.document import (
    Document,
    Piece,
    check_fraction,
    check_split,
    is_held_out,
    piece_of,
)

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
                pieces.append(piece_of(path, name=name))
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
