"""Sources of records with a text field: JSON Lines and Parquet, with prompts not learnt."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from jaxtrain.data.source import Document, FileSource, Piece, undecodable

if TYPE_CHECKING:
    import pyarrow

RANGE_BYTES = 16 << 20
"""JSON Lines files are read in ranges of this size, so that one long file is read in parallel."""


@dataclass(frozen=True)
class JsonLines(FileSource):
    """One JSON object a line; blank lines are skipped.

    Bad JSON, or a field that is missing or no string, is refused with file and line.

    text_field: the key of what is learnt. prompt_field: the key of what stands before it and is
    only read (its tokens have loss weight 0); None for no prompts.
    """

    text_field: str = field(default="text", kw_only=True)
    prompt_field: str | None = field(default=None, kw_only=True)

    def split_file(self, piece: Piece) -> Iterator[Piece]:
        for start in range(0, piece.stop, RANGE_BYTES):
            yield piece._replace(start=start, stop=min(start + RANGE_BYTES, piece.stop))

    def read(self, piece: Piece, split: str) -> Iterator[Document]:
        for offset, line in _lines_that_start_in(piece):
            if line.strip():
                document = self._document(piece.path, offset, line)
                if self.belongs(document, split):
                    yield document

    def _document(self, path: str, offset: int, line: bytes) -> Document:
        try:
            record = json.loads(line)
            prompt = _text_of(record, self.prompt_field) if self.prompt_field else ""
            return Document(text=_text_of(record, self.text_field), prompt=prompt)
        except UnicodeDecodeError as error:
            raise ValueError(undecodable(path, error, offset=offset)) from error
        except RecursionError:
            line_name = f"{path}:{_line_number(path, offset)}"
            raise ValueError(f"{line_name}: nests too deep; take the line out") from None
        except json.JSONDecodeError as error:
            line_name = f"{path}:{_line_number(path, offset)}"
            reason = f"not JSON: {error.msg} (column {error.colno})"
            raise ValueError(f"{line_name}: {reason}") from error
        except ValueError as error:
            raise ValueError(f"{path}:{_line_number(path, offset)}: {error}") from error


def _text_of(record: object, name: str) -> str:
    if not isinstance(record, dict):
        raise ValueError(f"a line is an object, this one is {type(record).__name__}")
    if name not in record:
        raise ValueError(f"no field {name!r}; the line has {', '.join(map(repr, record))}")
    value = record[name]
    if not isinstance(value, str):
        raise ValueError(f"field {name!r} is {type(value).__name__}, not a string")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"field {name!r} has half a surrogate at {error.start}") from error
    return value


def _lines_that_start_in(piece: Piece) -> Iterator[tuple[int, bytes]]:
    """(byte offset, line) of the lines that start in the range: each line is in one range."""
    with open(piece.path, "rb") as file:
        offset = 0
        if piece.start:
            # From one byte before: when a line ends just there, the next one is ours.
            file.seek(piece.start - 1)
            offset = piece.start - 1 + len(file.readline())
        while offset < piece.stop:
            line = file.readline()
            if not line:
                return
            yield offset, line
            offset += len(line)


def _line_number(path: str, offset: int) -> int:
    with open(path, "rb") as file:
        return 1 + file.read(offset).count(b"\n")


@dataclass(frozen=True)
class Parquet(FileSource):
    """Rows of Parquet files, read a batch at a time. A missing column or a null is refused.

    text_field: the column of what is learnt. prompt_field: the column of what stands before it
    and is only read (its tokens have loss weight 0); None for no prompts.
    """

    text_field: str = field(default="text", kw_only=True)
    prompt_field: str | None = field(default=None, kw_only=True)

    def read(self, piece: Piece, split: str) -> Iterator[Document]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        columns = [name for name in (self.text_field, self.prompt_field) if name]
        try:
            file = pq.ParquetFile(piece.path)
        except (pa.ArrowInvalid, OSError) as error:
            raise ValueError(f"{piece.path} cannot be read as Parquet: {error}") from error
        with file:
            _check_columns(piece.path, columns, file.schema_arrow)
            row = 0
            for batch in file.iter_batches(columns=columns):
                for record in batch.to_pylist():
                    if document := self._document(piece.path, row, record, split):
                        yield document
                    row += 1

    def _document(
        self, path: str, row: int, record: dict[str, str | None], split: str
    ) -> Document | None:
        text = record[self.text_field]
        prompt = record[self.prompt_field] if self.prompt_field else ""
        if text is None or prompt is None:
            name = self.text_field if text is None else self.prompt_field
            raise ValueError(f"{path}: row {row} has null in {name!r}; fill it or drop the row")
        document = Document(text=text, prompt=prompt)
        return document if self.belongs(document, split) else None


def _check_columns(path: str, columns: list[str], schema: pyarrow.Schema) -> None:
    import pyarrow as pa

    strings = (pa.string(), pa.large_string(), pa.string_view())
    problems = [
        f"no column {name!r}" if name not in schema.names else f"column {name!r} is no string"
        for name in columns
        if name not in schema.names or schema.field(name).type not in strings
    ]
    if problems:
        have = ", ".join(f"{f.name} ({f.type})" for f in schema)
        raise ValueError(f"{path}: {'; '.join(problems)}; the file has {have}")
