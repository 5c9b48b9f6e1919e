"""Sources of records with a text field: JSON Lines, CSV and Parquet, with prompts not learnt."""

from __future__ import annotations

import csv
import io
import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from jaxtrain.files.stores import is_address
from jaxtrain.sources.document import Document, Piece
from jaxtrain.sources.files import (
    BOM,
    FileSource,
    is_compressed,
    is_damage,
    open_bytes,
    undecodable,
)

if TYPE_CHECKING:
    import pyarrow
    import pyarrow.parquet

log = logging.getLogger(__name__)

PlaceOf = Callable[[], str]
"""Says where a record is: file and line, or row."""

RANGE_BYTES = 16 << 20
"""Files of lines are read in ranges of this size, so that one long file is read in parallel."""
LOOK_BYTES = 1 << 20
"""Of a file in which lines are counted, read at once."""
LONGEST_FIELD = 1 << 30
"""Characters in a field of CSV."""
ON_BAD = ("refuse", "skip")


@dataclass(frozen=True)
class RecordFiles(FileSource, ABC):
    """Files of records, each of which is a document.

    on_bad: what becomes of a record that is none: `refuse` ends the run, `skip` leaves it out, and
    a warning counts.
    """

    on_bad: str = field(default="refuse", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.on_bad not in ON_BAD:
            raise ValueError(f"{type(self).__name__}: on_bad={self.on_bad!r}; use refuse or skip")

    @abstractmethod
    def records(self, piece: Piece) -> Iterator[tuple[PlaceOf, Any]]:
        """Yields the records of a piece, before `document` reads them, each with its place. Raises
        ValueError if the rest of the piece cannot be read."""

    @abstractmethod
    def document(self, record: Any) -> Document:
        """Returns a record's document. Raises ValueError for a record that is none."""

    def read(self, piece: Piece, split: str) -> Iterator[Document]:
        bad, first = 0, ""
        for place, record in self.records(piece):
            try:
                document = self.document(record)
            except ValueError as error:
                if self.on_bad == "refuse":
                    raise ValueError(f"{place()}: {error}") from error
                # A place is looked for in the file, from its beginning.
                bad, first = bad + 1, first or f"{place()}: {error}"
                continue
            if self.belongs(document, split):
                yield document._replace(place=place)
        if bad and split == "train":
            log.warning("%s: %d records are left out, the first: %s", piece.path, bad, first)


@dataclass(frozen=True)
class TextRecords(RecordFiles, ABC):
    """Records with a text. A field within an object is named by a path, such as `meta.text`.

    text_field: the field of what is learnt. prompt_field: the field of what stands before it and is
    only read (its tokens have loss weight 0); None for no prompts.
    """

    text_field: str = field(default="text", kw_only=True)
    prompt_field: str | None = field(default=None, kw_only=True)

    @property
    def fields(self) -> list[str]:
        return [name for name in (self.text_field, self.prompt_field) if name]

    def document(self, record: Any) -> Document:
        prompt = _text_at(record, self.prompt_field) if self.prompt_field else ""
        return Document(text=_text_at(record, self.text_field), prompt=prompt)


@dataclass(frozen=True)
class JsonLines(TextRecords):
    """One JSON object a line; blank lines are skipped.

    Bad JSON, or a field that is missing or no text, is refused with file and line.
    """

    suffixes: ClassVar[tuple[str, ...]] = (".jsonl", ".json", ".ndjson")

    def split_file(self, piece: Piece) -> Iterator[Piece]:
        yield from line_ranges(piece)

    def records(self, piece: Piece) -> Iterator[tuple[PlaceOf, bytes]]:
        yield from lines_of(piece)

    def document(self, record: bytes) -> Document:
        return super().document(json_object(record))


def line_ranges(piece: Piece) -> Iterator[Piece]:
    """Ranges of a file of lines, each read by itself; a compressed file is one."""
    step = piece.stop if is_compressed(piece.path) else RANGE_BYTES
    for start in range(0, piece.stop, step):
        yield piece._replace(start=start, stop=min(start + step, piece.stop))


def lines_of(piece: Piece) -> Iterator[tuple[PlaceOf, bytes]]:
    """The lines that start in a piece and are not blank, each with its place."""
    for offset, line in _lines_that_start_in(piece):
        line = line.removeprefix(BOM) if offset == 0 else line
        if line.strip():
            yield partial(_line_name, piece, offset), line


def json_object(line: bytes) -> dict[str, Any]:
    """Returns the object in a line. Raises ValueError where it is none."""
    try:
        record = json.loads(line)
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start} of the line ({error.reason})") from error
    except RecursionError:
        raise ValueError("nests too deep; take the line out") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} (column {error.colno})") from error
    if not isinstance(record, dict):
        raise ValueError(f"a line is an object, this one is {type(record).__name__}")
    return record


def value_at(record: dict[str, Any], name: str, named_by: str = "text_field") -> Any:
    """Returns the value of a field, or at a path of fields. Raises ValueError where there is none.
    named_by: what names the field, for the message."""
    if name in record:
        return record[name]
    value: Any = record
    for part in name.split("."):
        if not isinstance(value, dict) or part not in value:
            have = ", ".join(map(repr, record)) or "none"
            raise ValueError(f"no field {name!r}; there is {have}: name yours by {named_by}")
        value = value[part]
    return value


def _text_at(record: dict[str, Any], name: str) -> str:
    value = value_at(record, name)
    if value is None:
        raise ValueError(f"null in {name!r}; fill it, or leave such records out: on_bad='skip'")
    if not isinstance(value, str):
        raise ValueError(f"field {name!r} is {type(value).__name__}, not a string")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"field {name!r} has half a surrogate at {error.start}") from error
    return value


def _lines_that_start_in(piece: Piece) -> Iterator[tuple[int, bytes]]:
    """(byte offset, line) of the lines that start in the range: each line is in one range."""
    with open_bytes(piece) as file:
        if is_compressed(piece.path):
            yield from _lines_from(file, 0, None)
            return
        offset = 0
        if piece.start:
            # From one byte before: when a line ends just there, the next one is ours.
            file.seek(piece.start - 1)
            offset = piece.start - 1 + len(file.readline())
        yield from _lines_from(file, offset, piece.stop)


def _lines_from(file: Any, offset: int, stop: int | None) -> Iterator[tuple[int, bytes]]:
    while stop is None or offset < stop:
        line = file.readline()
        if not line:
            return
        yield offset, line
        offset += len(line)


def _line_name(piece: Piece, offset: int) -> str:
    number = 1
    with open_bytes(piece) as file:
        while block := file.read(min(offset, LOOK_BYTES)):
            number += block.count(b"\n")
            offset -= len(block)
    return f"{piece.path}:{number}"


@dataclass(frozen=True)
class Csv(TextRecords):
    """Rows of comma-separated values, whose first line names the fields. A field in quotes may have
    line ends. A row of another length than the first is refused with file and line.
    """

    suffixes: ClassVar[tuple[str, ...]] = (".csv",)

    def records(self, piece: Piece) -> Iterator[tuple[PlaceOf, dict[str, Any]]]:
        csv.field_size_limit(LONGEST_FIELD)
        with open_bytes(piece) as file:
            text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
            rows = csv.DictReader(text, strict=True)
            try:
                for row in rows:
                    yield partial(_row_line, piece.path, rows.line_num), row
            except UnicodeDecodeError as error:
                raise ValueError(undecodable(piece.path, error, offset=0)) from error
            except csv.Error as error:
                raise ValueError(f"{piece.path}:{rows.line_num}: no CSV: {error}") from error

    def document(self, record: dict[str, Any]) -> Document:
        if None in record or None in record.values():
            raise ValueError("the row has another number of fields than the first line")
        return super().document(record)


def _row_line(path: str, number: int) -> str:
    return f"{path}:{number}"


@dataclass(frozen=True)
class Parquet(TextRecords):
    """Rows of Parquet files, read a batch at a time. A missing column or a null is refused."""

    suffixes: ClassVar[tuple[str, ...]] = (".parquet",)

    def records(self, piece: Piece) -> Iterator[tuple[PlaceOf, dict[str, Any]]]:
        yield from parquet_records(piece, self.fields, _no_strings)


def parquet_records(
    piece: Piece, columns: list[str], unsuitable: Callable[[str, pyarrow.DataType], str | None]
) -> Iterator[tuple[PlaceOf, dict[str, Any]]]:
    """The rows of a Parquet file, each with its place. unsuitable: says what is wrong with a column
    of a type, None for nothing. Raises ValueError for files and columns that cannot be read."""
    with _parquet(piece) as file:
        schema = file.schema_arrow
        types = {name: _type_at(schema, name) for name in columns}
        problems = [
            f"no column {name!r}" if kind is None else unsuitable(name, kind)
            for name, kind in types.items()
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


@contextmanager
def _parquet(piece: Piece) -> Iterator[pyarrow.parquet.ParquetFile]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    stored = is_address(piece.path)  # a column is asked for alone
    with open_bytes(piece, buffer=0) if stored else nullcontext(piece.path) as source:
        try:
            file = pq.ParquetFile(source)
        except (pa.ArrowInvalid, OSError) as error:
            if stored and isinstance(error, OSError) and not is_damage(error):
                raise
            raise ValueError(f"{piece.path} cannot be read as Parquet: {error}") from error
        with file:
            yield file


def _type_at(schema: pyarrow.Schema, name: str) -> pyarrow.DataType | None:
    """Returns the type of a column, or of a field within one; None where there is none."""
    import pyarrow as pa

    if name in schema.names:
        return schema.field(name).type
    kind: pyarrow.DataType = pa.struct(list(schema))
    for part in name.split("."):
        if not pa.types.is_struct(kind) or kind.get_field_index(part) < 0:
            return None
        kind = kind.field(part).type
    return kind


def _row_name(path: str, row: int) -> str:
    return f"{path}: row {row}"


def _no_strings(name: str, kind: pyarrow.DataType) -> str | None:
    import pyarrow as pa

    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    strings = (pa.string(), pa.large_string(), pa.string_view())
    return None if kind in strings else f"column {name!r} is no string"
