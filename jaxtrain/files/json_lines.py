"""JSON objects in a file, one a line, appended by one process at a time.

The writer may be killed within a line, or the disk may be full. Readers skip such an unfinished
last line, and the next write removes it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxtrain.files.regular import append_whole, open_regular


def add_line(path: Path, value: Mapping[str, object]) -> None:
    """Appends a line; its folder is created if missing. Raises OSError, and ValueError as
    `open_regular`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open_regular(path, "a+b") as file:
        file.seek(0)
        complete, torn = _cut(file.readall())
        lacks_end = _whole(torn)
        if torn and not lacks_end:
            file.truncate(len(complete))
        append_whole(file, b"\n" * lacks_end + json.dumps(value).encode() + b"\n")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Returns the objects of all complete lines. Raises OSError, and ValueError for a finished line
    that is not an object."""
    with open_regular(path, "rb") as file:
        complete, torn = _cut(file.readall())
    lines = complete.split(b"\n")[:-1] + [torn] * _whole(torn)
    for number, line in enumerate(lines, 1):
        if not _whole(line):
            raise ValueError(f"{path}, line {number} is no JSON object; remove that line")
    return [json.loads(line) for line in lines]


def _cut(data: bytes) -> tuple[bytes, bytes]:
    """Returns the complete lines, and the bytes after the last of them."""
    ends = data.rfind(b"\n") + 1
    return data[:ends], data[ends:]


def _whole(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False
