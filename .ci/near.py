"""Prints the test files near what changed since a commit, for `.ci/run --quick`.

    python .ci/near.py COMMIT

A changed file of tests stands for itself. A changed module of jaxtrain/ROOM/ stands for the tests
named after it in tests/ROOM/, else for those that import it, MOST of them at most, else for all of
tests/ROOM/ or tests/test_ROOM.py, else for some that import anything of the room; so does a helper
of tests. Other files stand for the tests of ELSEWHERE.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Collection, Mapping
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[1]

ELSEWHERE = {
    ".ci": "tests/test_ci.py",
    "README.md": "tests/test_readme.py",
    "CHANGELOG.md": "tests/test_readme.py",
    "docs": "tests/test_readme.py",
    "experiments": "tests/test_readme.py",
    "pyproject.toml": "tests/test_readme.py",
    "constraints.txt": "tests/test_readme.py",
    "meshes": "tests/mesh/test_mesh.py",
}
"""First part of a path -> the tests of what is there."""

TESTED_IN = {"families": "weights/huggingface"}
"""Room -> the folder of its tests, where that has another name."""

MOST = 10


def near(changed: Collection[str], tests: Mapping[str, Collection[str]]) -> list[str]:
    """Of the files `tests`, each with the names that it imports, those near the files `changed`;
    paths from the repository's root."""
    return sorted({test for path in changed for test in _near(PurePosixPath(path), tests)})


def _near(changed: PurePosixPath, tests: Mapping[str, Collection[str]]) -> list[str]:
    if str(changed) in tests:
        return [str(changed)]
    if changed.parts[0] in ELSEWHERE:
        return [ELSEWHERE[changed.parts[0]]]
    if changed.parts[0] not in ("jaxtrain", "tests"):
        return []
    place = TESTED_IN.get(changed.parts[1], changed.parts[1])
    places = (f"tests/{place}/", f"tests/test_{place}.py")
    room = [test for test in tests if test.startswith(places)]
    named = [test for test in room if PurePosixPath(test).stem == f"test_{changed.stem}"]
    module = ".".join(changed.with_suffix("").parts)
    # Tests import helpers by their own name.
    wanted = module if changed.parts[0] == "jaxtrain" else changed.stem
    importing = [test for test, names in tests.items() if wanted in names]
    beside = [
        test
        for test, names in tests.items()
        if any(name.startswith(f"jaxtrain.{changed.parts[1]}.") for name in names)
    ]
    return named or importing[:MOST] or room or beside[:MOST]


def imported(source: str) -> set[str]:
    """Names that a program imports: of modules, and of what it takes from them."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{name.name}" for name in node.names)}
    return names


def git(*arguments: str) -> list[str]:
    """Lines of what git prints of this repository. Leaves with its words where it refuses."""
    command = ["git", "-C", str(ROOT), *arguments]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"near: {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout.splitlines()


if __name__ == "__main__":
    files = [path for path in git("ls-files", "tests/*test_*.py") if (ROOT / path).exists()]
    names = {path: imported((ROOT / path).read_text()) for path in files}
    print("\n".join(near(git("diff", "--name-only", sys.argv[1]), names)))
