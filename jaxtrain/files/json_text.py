"""Parses JSON from an untrusted source."""

from __future__ import annotations

import json
from typing import Any

DEEPEST = 100
"""Levels; a config or a tokenizer has fewer than twenty."""


def parse_json(text: str | bytes) -> Any:
    """Returns the value. Raises ValueError for invalid JSON, or more than DEEPEST nested levels."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(f"it nests more than {DEEPEST} levels deep") from None
    level, depth = [value], 0
    while level := [inner for item in level for inner in _inner(item)]:
        if (depth := depth + 1) > DEEPEST:
            raise ValueError(f"it nests more than {DEEPEST} levels deep")
    return value


def _inner(value: object) -> list[Any]:
    """Returns the lists and objects directly inside a value."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [item for item in items if isinstance(item, dict | list)]
