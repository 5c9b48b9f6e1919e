"""Import paths of public names, read from the stubs that export them: nothing is imported."""

from __future__ import annotations

import difflib
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent


@cache
def public_path(name: str) -> str | None:
    """Returns what a script writes for a public name, as `jaxtrain.train` or `jaxtrain.optim.Lamb`;
    None for another name."""
    top, *rooms = [ROOT, *sorted(ROOT.glob("*/"))]
    for room in (top, *rooms):
        if name in _names(room):
            return ".".join(["jaxtrain", *room.relative_to(ROOT).parts, name])
    return None


def hint(name: str) -> str:
    """Returns a hint: the path of a name that is not at the top, or a similar name; "" if
    neither."""
    if path := public_path(name):
        return f"; it is {path}"
    near = difflib.get_close_matches(name, _names(ROOT), n=1)
    return f"; did you mean {near[0]}?" if near else ""


@cache
def _names(room: Path) -> frozenset[str]:
    """Returns the names in a room's stub, or without a stub those of its `__all__`."""
    stub, module = room / "__init__.pyi", room / "__init__.py"
    if stub.is_file():
        return frozenset(
            re.findall(r" import \w+ as (\w+)$", stub.read_text("utf-8"), re.MULTILINE)
        )
    if not module.is_file():
        return frozenset()
    return frozenset(re.findall(r'^    "(\w+)",$', module.read_text("utf-8"), re.MULTILINE))
