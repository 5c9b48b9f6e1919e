"""Prints the test files near what changed since a commit, for `.ci/run --quick`.

    python .ci/near.py COMMIT

A changed file of tests stands for itself. A changed module of jaxtrain/ROOM/ stands for the tests
named after it in tests/ROOM/, or for all of tests/ROOM/ where none is; so does a helper of tests.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path, PurePosixPath


def near(changed: list[str], tests: list[str]) -> list[str]:
    """Of the files `tests`, those near the files `changed`; paths from the repository's root."""
    return sorted({test for path in changed for test in _near(PurePosixPath(path), tests)})


def _near(changed: PurePosixPath, tests: list[str]) -> list[str]:
    if str(changed) in tests:
        return [str(changed)]
    if changed.parts[0] not in ("jaxtrain", "tests") or len(changed.parts) < 3:
        return []
    room = [test for test in tests if test.startswith(f"tests/{changed.parts[1]}/")]
    named = [test for test in room if PurePosixPath(test).stem == f"test_{changed.stem}"]
    return named or room


def git(*arguments: str) -> list[str]:
    """Lines of what git prints of this repository."""
    command = ["git", "-C", str(Path(__file__).parents[1]), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


if __name__ == "__main__":
    files = git("ls-files", "tests/*test_*.py")
    print("\n".join(near(git("diff", "--name-only", sys.argv[1]), files)))
