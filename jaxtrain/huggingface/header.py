"""The header of a safetensors file in a store: which tensors it has, and where their bytes are."""

from __future__ import annotations

import math
import struct
from typing import Any, NamedTuple

from etils import epath

from jaxtrain.files.fetched import StoredFile, require_unchanged
from jaxtrain.files.json_text import parse_json
from jaxtrain.files.store import reading

LARGEST = 100_000_000
"""Bytes of a header, as the format has it."""


WIDTHS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64"), 8),
}
"""dtype -> bytes of a number."""


class HeaderEntry(NamedTuple):
    """A tensor of a safetensors file. start, stop: of its bytes in the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def header_of(file: StoredFile) -> dict[str, HeaderEntry]:
    """Returns the tensors of a file, by three requests. Raises OSError, and ValueError for what is
    no safetensors file, or not a whole one."""
    (length,) = struct.unpack("<Q", read_bytes(file.address, 0, 8))
    if length > LARGEST:
        raise ValueError(f"its header would have {length:,} bytes; it is no safetensors file")
    header = parse_json(read_bytes(file.address, 8, length).decode())
    try:
        entries = {
            name: _entry(entry, 8 + length)
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"its header names no tensors: {error!r}") from error
    stop = max((entry.stop for entry in entries.values()), default=8 + length)
    if stop != file.size:
        raise ValueError(f"it has {file.size:,} bytes, and by its header {stop:,}")
    require_unchanged([file])
    return entries


def _entry(entry: dict[str, Any], base: int) -> HeaderEntry:
    shape, offsets = entry["shape"], entry["data_offsets"]
    numbers = [*shape, *offsets] if isinstance(shape, list) and isinstance(offsets, list) else None
    if numbers is None or not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(f"shape {shape}, data_offsets {offsets}")
    start, stop = offsets
    width = WIDTHS.get(entry["dtype"])
    if width is not None and stop - start != math.prod(shape) * width:
        raise ValueError(f"{stop - start:,} bytes for shape {shape} of {entry['dtype']}")
    return HeaderEntry(str(entry["dtype"]), tuple(shape), base + start, base + stop)


def read_bytes(path: epath.Path, start: int, size: int) -> bytes:
    """Returns `size` bytes from `start`. Raises OSError, and ValueError where the file ends
    before."""
    with reading(path, start, size) as file:
        if file is None:
            raise ValueError(f"it ends before byte {start + size}")
        return file.read()
