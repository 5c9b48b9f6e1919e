"""Figures of the house, to be held against those of another commit:

python tests/house.py [ROOT]

Files and lines of each package, import cycles, annotated parameters that are a bare `Any`, the
longest function, fields of public dataclasses that no docstring names, and by package the share of
little words among the names and of docstrings that begin with a question or relative word.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from test_architecture import cycle_violations, modules


def functions(root: Path) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for path, tree, _ in modules(root):
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield path, node


def bare_any(root: Path) -> tuple[int, int]:
    """(annotated parameters that are `Any`, all that are annotated)."""
    annotations = [
        ast.unparse(argument.annotation)
        for _, node in functions(root)
        for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
        if argument.annotation is not None
    ]
    return annotations.count("Any"), len(annotations)


def longest(root: Path) -> tuple[int, str]:
    return max(
        ((node.end_lineno or 0) - node.lineno + 1, f"{path}:{node.lineno} {node.name}")
        for path, node in functions(root)
    )


def public_names(root: Path) -> set[str]:
    """The names that the stubs of the package and of its rooms hand out."""
    stubs = [ast.parse(stub.read_text(encoding="utf-8")) for stub in root.rglob("__init__.pyi")]
    return {
        alias.name
        for node in (each for stub in stubs for each in ast.walk(stub))
        if isinstance(node, ast.ImportFrom) and node.level
        for alias in node.names
    }


def undescribed_fields(root: Path) -> list[str]:
    """`Class.field` of public classes, and of those they inherit from, where neither a docstring of
    theirs says `name: what it is` (or has the name in backticks) nor one stands below it."""
    classes = {
        node.name: node
        for _, tree, _ in modules(root)
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    found = []
    for public in sorted(public_names(root) & set(classes)):
        bases = [ast.unparse(base) for base in classes[public].bases]
        family = [classes[name] for name in (public, *bases) if name in classes]
        said = " ".join(ast.get_docstring(node) or "" for node in family)
        for node in family:
            for item, following in zip(node.body, [*node.body[1:], None], strict=True):
                if not isinstance(item, ast.AnnAssign) or not isinstance(item.target, ast.Name):
                    continue
                below = isinstance(following, ast.Expr)
                if not below and not re.search(
                    rf"\b{item.target.id}\b(, \w+)*:|`{item.target.id}`", said
                ):
                    found.append(f"{public}.{item.target.id}")
    return found


LITTLE_WORDS = frozenset(
    [
        "found",
        "told",
        "said",
        "given",
        "made",
        "taken",
        "each",
        "mine",
        "at",
        "by",
        "which",
        "there",
        "here",
        "known",
        "of",
        "beside",
        "whole",
        "rest",
        "after",
        "before",
        "how",
        "what",
        "where",
        "who",
        "met",
        "asked",
        "kept",
        "held",
        "one",
        "others",
    ]
)
"""Names that say nothing of what they hold."""
BEGINNINGS = frozenset(
    ["What", "Whether", "Those", "Of", "As", "How", "Where", "Which", "So", "That", "All"]
)
"""First words of docstrings that put off what is returned or done."""


@dataclass
class Words:
    """Counts of bound names and docstrings, and the places (`file:line word`) of those to mend."""

    names: int = 0
    docstrings: int = 0
    little: list[str] = field(default_factory=list)
    questions: list[str] = field(default_factory=list)

    def add(self, path: str, node: ast.AST) -> None:
        name = None
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        elif isinstance(node, ast.arg):
            name = node.arg
        if name is not None:
            self.names += 1
            if name in LITTLE_WORDS:
                self.little.append(f"{path}:{node.lineno} {name}")
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                self.docstrings += 1
                if text.split()[0].strip("`.,:;") in BEGINNINGS:
                    line = getattr(node, "lineno", 1)
                    self.questions.append(f"{path}:{line} {text.splitlines()[0]}")


def room_of(path: str) -> str:
    """The package, or module, right below the root that a file belongs to."""
    return path.split("/")[0].removesuffix(".py")


def words(root: Path) -> dict[str, Words]:
    """The words of each package, or module, right below `root`."""
    rooms: dict[str, Words] = {}
    for path, tree, _ in modules(root):
        room = rooms.setdefault(room_of(path), Words())
        for node in ast.walk(tree):
            room.add(path, node)
    return rooms


def share(some: list[str], count: int) -> str:
    return f"{len(some) / max(count, 1):.1%} of {count}"


def main(root: Path) -> None:
    rooms: dict[str, list[int]] = {}
    for path, _, text in modules(root):
        rooms.setdefault(room_of(path), []).append(len(text.splitlines()))
    figures = words(root)
    for room, lines in sorted(rooms.items(), key=lambda room: -sum(room[1])):
        spoken = figures[room]
        print(
            f"{room:16} {len(lines):3} files {sum(lines):6} lines, the longest {max(lines):3}; "
            f"little words {share(spoken.little, spoken.names)}, "
            f"docstrings that begin with a question {share(spoken.questions, spoken.docstrings)}"
        )
    anys, annotated = bare_any(root)
    print(f"import cycles: {cycle_violations(root) or 0}")
    print(f"bare Any: {anys} of {annotated} annotated parameters ({anys / annotated:.1%})")
    print("longest function: {} lines, {}".format(*longest(root)))
    fields = undescribed_fields(root)
    print(f"fields of public classes that no docstring names: {len(fields)}")
    print("  " + " ".join(fields))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).parents[1] / "jaxtrain")
