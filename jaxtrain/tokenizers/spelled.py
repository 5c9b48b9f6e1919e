"""Finds texts of special tokens in other texts."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import reduce
from typing import Any

NEVER = re.compile(r"(?!)")


def pattern_of(tokens: Iterable[str]) -> re.Pattern[str]:
    """Returns a pattern that matches each of the tokens, the longest first; nothing if there is
    none. It is a tree of their beginnings: alternatives side by side would all be tried at each
    character, and vocabularies have thousands of special tokens."""
    tree: dict[str, Any] = {}
    for token in filter(None, tokens):
        reduce(lambda branch, letter: branch.setdefault(letter, {}), token, tree)[""] = {}
    return re.compile(_pattern(tree)) if tree else NEVER


def _pattern(tree: dict[str, Any]) -> str:
    branches = [re.escape(letter) + _pattern(below) for letter, below in tree.items() if letter]
    if not branches:
        return ""
    joined = branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"
    return f"(?:{joined})?" if "" in tree else joined


def beginnings(tokens: Iterable[str]) -> frozenset[str]:
    """Returns all texts with which a token begins, but not the tokens."""
    return frozenset(token[:size] for token in tokens for size in range(1, len(token)))
