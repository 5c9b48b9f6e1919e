"""Text files as documents."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from jaxtrain.sources.document import Document, Piece
from jaxtrain.sources.files import FileSource, read_bytes, undecodable


@dataclass(frozen=True)
class TextFiles(FileSource):
    """UTF-8 text files. A document is a file, or what stands between `separator`s in it.

    Reads a file whole. An undecodable file is refused with the offset of the byte.

    separator: a text between documents, "" for none. A line end in it is found as either system
    writes it.
    """

    separator: str = field(default="", kw_only=True)

    def read(self, piece: Piece, split: str) -> Iterator[Document]:
        data = read_bytes(piece)
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(undecodable(piece.path, error, offset=0)) from error
        line_ends = "\r?\n".join(map(re.escape, self.separator.split("\n")))
        for part in re.split(line_ends, text) if self.separator else (text,):
            if self.belongs(Document(part), split):
                yield Document(part)
