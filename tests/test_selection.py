"""Which tests a mark leaves to be run by hand, and which a part of them has."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CONFTEST = """
import selection

def pytest_addoption(parser):
    selection.add_option(parser)

def pytest_configure(config):
    config.pluginmanager.register(selection.Selection(config))
"""
TESTS = """
import pytest
pytestmark = pytest.mark.filterwarnings("ignore")
slow, by_hand = pytest.mark.slow, pytest.mark.exhaustive
CASES = [0, *(pytest.param(n, marks=slow) for n in range(1, 8)), pytest.param(8, marks=by_hand)]

@pytest.mark.parametrize("n", CASES)
@pytest.mark.sampled(3)
def test_a(n):
    pass

@slow
@pytest.mark.parametrize("n", range(3))
def test_b(n):
    pass
"""


def chosen(folder: Path, *arguments: str) -> tuple[list[str], str]:
    """Names of the tests that pytest would run, and what it said."""
    said = run(folder, "--collect-only", *arguments)
    lines = said.splitlines()
    return [x.partition("::test_")[2] for x in lines if "::" in x], said


def run(folder: Path, *arguments: str) -> str:
    """What pytest said."""
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_it.py").write_text(TESTS)
    alone = {"PYTHONPATH": str(ROOT / "tests"), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir", str(folder), "-q",
         "-p", "no:cacheprovider", *arguments, str(folder)],
        env={**os.environ, **alone},
        capture_output=True, text=True,
    )  # fmt: skip
    return done.stdout + done.stderr


def test_of_a_tests_slow_cases_every_nth_stays_slow(tmp_path: Path) -> None:
    assert chosen(tmp_path, "-m", "not slow and not exhaustive")[0] == ["a[0]"]
    slow = ["a[3]", "a[6]", *(f"b[{n}]" for n in range(3))]
    assert chosen(tmp_path, "-m", "slow and not exhaustive")[0] == slow
    assert chosen(tmp_path, "-m", "exhaustive")[0] == [f"a[{n}]" for n in (1, 2, 4, 5, 7, 8)]


def test_the_parts_are_the_whole_and_have_nothing_in_common(tmp_path: Path) -> None:
    whole = chosen(tmp_path, "-m", "exhaustive")[0]
    parts = [chosen(tmp_path, "-m", "exhaustive", "--shard", f"{k}/3")[0] for k in (1, 2, 3)]
    assert list(chain(*parts)) == whole and len(whole) > 4
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_a_part_has_tests_of_every_folder(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"test_{name}.py").write_text(TESTS)
    found, _ = chosen(tmp_path, "-m", "slow and not exhaustive", "--shard", "2/3")
    assert found == 3 * ["a[6]", "b[0]"], "of its own, of `one` and of `two`"


@pytest.mark.parametrize("part", ["0/4", "5/4", "1", "a/b"])
def test_a_part_that_there_is_not_is_refused(part: str, tmp_path: Path) -> None:
    found, said = chosen(tmp_path, "--shard", part)
    assert not found
    assert f"--shard {part}: a part is K/N with 1 <= K <= N, such as 2/4" in said


def test_no_test_begins_after_its_time(tmp_path: Path) -> None:
    assert "12 passed" in run(tmp_path, "--seconds", "600")
    late = run(tmp_path, "--seconds", "0", "-rs")
    assert "12 skipped" in late and "SKIPPED [12]" in late
    assert "would begin after the 0 s of --seconds" in late
