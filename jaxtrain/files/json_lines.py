"""Objects of JSON in a file, a line for each, appended by one process at a time.

Its writer may be killed within a line, or the disk be full: what is left of that line, which has no
end, is passed over by readers and removed before the next one is written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxtrain.files.regular import append_whole, open_regular


def add_line(path: Path, value: Mapping[str, object]) -> None:
    """Append it, in a folder that is made for it. Raises OSError, and ValueError as
    `open_regular`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open_regular(path, "a+b") as file:
        file.seek(0)
        whole, torn = _cut(file.readall())
        lacks_end = _whole(torn)
        if torn and not lacks_end:
            file.truncate(len(whole))
        append_whole(file, b"\n" * lacks_end + json.dumps(value).encode() + b"\n")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """All of them. Raises OSError, and ValueError for a line that is no object and has an end."""
    with open_regular(path, "rb") as file:
        whole, torn = _cut(file.readall())
    lines = whole.split(b"\n")[:-1] + [torn] * _whole(torn)
    for number, line in enumerate(lines, 1):
        if not _whole(line):
            raise ValueError(f"{path}, line {number} is no JSON object; remove that line")
    return [json.loads(line) for line in lines]


def _cut(data: bytes) -> tuple[bytes, bytes]:
    """Whole lines, and what follows the last of them."""
    ends = data.rfind(b"\n") + 1
    return data[:ends], data[ends:]


def _whole(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False
