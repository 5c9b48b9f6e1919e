"""Sources of records with a text field: JSON Lines and Parquet, with prompts not learnt."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from jaxtrain.data.source import Document, FileSource, Piece, undecodable

if TYPE_CHECKING:
    import pyarrow

T = TypeVar("T")
Place = Callable[[], str]
"""Says where a record is: file and line, or row."""

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
        yield from line_ranges(piece)

    def read(self, piece: Piece, split: str) -> Iterator[Document]:
        for place, record in json_records(piece):
            document = located(place, self._document, record)
            if self.belongs(document, split):
                yield document

    def _document(self, record: dict[str, Any]) -> Document:
        prompt = _text_of(record, self.prompt_field) if self.prompt_field else ""
        return Document(text=_text_of(record, self.text_field), prompt=prompt)


def line_ranges(piece: Piece) -> Iterator[Piece]:
    """Ranges of a file of lines, which `json_records` reads by themselves."""
    for start in range(0, piece.stop, RANGE_BYTES):
        yield piece._replace(start=start, stop=min(start + RANGE_BYTES, piece.stop))


def json_records(piece: Piece) -> Iterator[tuple[Place, dict[str, Any]]]:
    """The objects of the lines that start in a piece of a JSON Lines file, each with its place.
    Raises ValueError for other lines."""
    for offset, line in _lines_that_start_in(piece):
        if line.strip():
            place = partial(_line_name, piece.path, offset)
            try:
                yield place, _object(line)
            except UnicodeDecodeError as error:
                raise ValueError(undecodable(piece.path, error, offset=offset)) from error
            except ValueError as error:
                raise ValueError(f"{place()}: {error}") from error


def located(place: Place, make: Callable[[dict[str, Any]], T], record: dict[str, Any]) -> T:
    """Returns make(record); a ValueError names the place."""
    try:
        return make(record)
    except ValueError as error:
        raise ValueError(f"{place()}: {error}") from error


def _object(line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except RecursionError:
        raise ValueError("nests too deep; take the line out") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} (column {error.colno})") from error
    if not isinstance(record, dict):
        raise ValueError(f"a line is an object, this one is {type(record).__name__}")
    return record


def _text_of(record: dict[str, Any], name: str) -> str:
    if name not in record:
        have = ", ".join(map(repr, record))
        raise ValueError(f"no field {name!r}; the line has {have}: name yours by text_field")
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


def _line_name(path: str, offset: int) -> str:
    with open(path, "rb") as file:
        number = 1 + file.read(offset).count(b"\n")
    return f"{path}:{number}"


@dataclass(frozen=True)
class Parquet(FileSource):
    """Rows of Parquet files, read a batch at a time. A missing column or a null is refused.

    text_field: the column of what is learnt. prompt_field: the column of what stands before it
    and is only read (its tokens have loss weight 0); None for no prompts.
    """

    text_field: str = field(default="text", kw_only=True)
    prompt_field: str | None = field(default=None, kw_only=True)

    def read(self, piece: Piece, split: str) -> Iterator[Document]:
        columns = [name for name in (self.text_field, self.prompt_field) if name]
        for place, record in parquet_records(piece, columns, _no_strings):
            document = located(place, self._document, record)
            if self.belongs(document, split):
                yield document

    def _document(self, record: dict[str, Any]) -> Document:
        text = record[self.text_field]
        prompt = record[self.prompt_field] if self.prompt_field else ""
        if text is None or prompt is None:
            name = self.text_field if text is None else self.prompt_field
            raise ValueError(f"null in {name!r}; fill it or drop the row")
        return Document(text=text, prompt=prompt)


def parquet_records(
    piece: Piece, columns: list[str], unsuitable: Callable[[pyarrow.Field], str | None]
) -> Iterator[tuple[Place, dict[str, Any]]]:
    """The rows of a Parquet file, each with its place. unsuitable: says what is wrong with a
    column, None for nothing. Raises ValueError for files and columns that cannot be read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(piece.path)
    except (pa.ArrowInvalid, OSError) as error:
        raise ValueError(f"{piece.path} cannot be read as Parquet: {error}") from error
    with file:
        schema = file.schema_arrow
        problems = [
            f"no column {name!r}" if name not in schema.names else unsuitable(schema.field(name))
            for name in columns
        ]
        if any(problems):
            have = ", ".join(f"{f.name} ({f.type})" for f in schema)
            reasons = "; ".join(filter(None, problems))
            raise ValueError(f"{piece.path}: {reasons}; the file has {have}")
        row = 0
        for batch in file.iter_batches(columns=columns):
            for record in batch.to_pylist():
                yield partial(_row_name, piece.path, row), record
                row += 1


def _row_name(path: str, row: int) -> str:
    return f"{path}: row {row}"


def _no_strings(column: pyarrow.Field) -> str | None:
    import pyarrow as pa

    strings = (pa.string(), pa.large_string(), pa.string_view())
    return None if column.type in strings else f"column {column.name!r} is no string"
