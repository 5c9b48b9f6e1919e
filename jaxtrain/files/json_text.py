"""JSON that somebody else wrote."""

from __future__ import annotations

import json
from typing import Any

DEEPEST = 100
"""Levels; a config or a tokenizer has fewer than twenty."""


def parse_json(text: str | bytes) -> Any:
    """The value. Raises ValueError where it is no JSON, or nests deeper than DEEPEST levels."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(f"it nests more than {DEEPEST} levels deep") from None
    level, depth = [value], 0
    while level := [inner for each in level for inner in _inner(each)]:
        if (depth := depth + 1) > DEEPEST:
            raise ValueError(f"it nests more than {DEEPEST} levels deep")
    return value


def _inner(value: object) -> list[Any]:
    """The lists and objects directly in one."""
    held = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [each for each in held if isinstance(each, dict | list)]
