"""What a test run reports of itself, what CI makes of such reports, and what CI runs when quick."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
CONFTEST = """
import report
report.WORKER_BYTES, report.DROP_BYTES = {limit}, {drop}

def pytest_configure(config):
    config.pluginmanager.register(report.Report(config))
"""
MODULES = {
    "shared.py": "import jax\ndouble = jax.jit(lambda x: 2 * x)\n",
    "test_first.py": """
from shared import double

def test_compiles():
    assert double(1) == 2

def test_shares():
    assert double._cache_size() == 1

def test_garbage_is_looked_for_among_what_tests_make():
    import gc

    assert gc.get_freeze_count() > 10_000
""",
    "test_second.py": """
import pytest
from shared import double

def test_compiles_again():
    assert double._cache_size() == 0

@pytest.mark.skip(reason="there is no moon here")
def test_tides():
    pass

def test_fails():
    assert not 1
""",
}


def run_tests(
    folder: Path, limit: float, *arguments: str, drop: float = 1e12
) -> tuple[int, str, dict[str, Any]]:
    """Exit status, output and report of pytest with one worker on MODULES."""
    conftest = CONFTEST.format(limit=limit, drop=drop)
    for name, text in {**MODULES, "conftest.py": conftest}.items():
        (folder / name).write_text(text)
    report = folder / "report.json"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir", str(folder), "-p", "xdist",
         "-n", "1", "-p", "no:cacheprovider", *arguments, str(folder)],
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT / "tests"),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "JAXTRAIN_TEST_REPORT": str(report),
        },
        capture_output=True, text=True,
    )  # fmt: skip
    return done.returncode, done.stdout, json.loads(report.read_text())


def test_programs_are_dropped_behind_each_module_and_outcomes_reported(tmp_path: Path) -> None:
    status, output, report = run_tests(tmp_path, 1e12)
    assert report["failed"] == ["test_second.py::test_fails"], output
    assert report["skipped"] == {"test_second.py::test_tides": "there is no moon here"}
    assert len(report["seconds"]) == 6 and all(s >= 0 for s in report["seconds"].values())
    assert 50e6 < report["largest_bytes"] < 2e9, "Python with JAX imported"
    assert status == 1


def test_a_worker_that_takes_too_much_fails_the_run(tmp_path: Path) -> None:
    status, output, report = run_tests(tmp_path, 1e6, "-k", "compiles or shares")
    assert status == 1 and not report["failed"]
    assert re.search(r"largest process .* GB, in test_first.py::\S+; it may take 0.001 GB", output)


def test_a_process_that_has_grown_drops_its_programs_behind_each_test(tmp_path: Path) -> None:
    _, output, report = run_tests(tmp_path, 1e12, drop=0)
    assert "test_first.py::test_shares" in report["failed"], output


def summary(folder: Path, known: str, reports: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    """.ci/summary.py, with other known reasons for skips."""
    (folder / "reports").mkdir()
    script = folder / "summary.py"
    script.write_text((ROOT / ".ci" / "summary.py").read_text(encoding="utf-8"))
    (folder / "skips.txt").write_text(known)
    for step, report in reports.items():
        (folder / "reports" / f"{step}.json").write_text(json.dumps(report))
    return subprocess.run(
        [sys.executable, str(script), str(folder / "reports")], capture_output=True, text=True
    )


REPORTS = {
    "tests": {
        "seconds": {f"t::test_{i}": float(i) for i in range(20)},
        "skipped": {"a::b": "there is no moon here", "a::c": "there is no moon here"},
        "failed": ["a::d"],
        "largest_bytes": 2_400_000_000,
    },
    "slow tests": {
        "seconds": {"s::slowest": 40.0, "x::a": 0.0, "y": 0.0},
        "skipped": {"x::a": "another step runs it", "y": "another step runs tests of it"},
        "failed": [],
        "largest_bytes": 10**9,
    },
    "older": {"seconds": {"x::a": 1, "y::b": 1}, "skipped": {}, "failed": [], "largest_bytes": 1},
}  # fmt: skip


def test_ci_ends_with_what_was_slow_large_skipped_and_failed(tmp_path: Path) -> None:
    done = summary(tmp_path, "# why\nthere is no moon\n\n", REPORTS)
    assert done.returncode == 0
    told = done.stdout.splitlines()
    assert told[0] == "slowest tests:" and told[1].strip() == "40.0 s  slow tests: s::slowest"
    assert [line.split("::")[1] for line in told[2:16]] == [f"test_{i}" for i in range(19, 5, -1)]
    assert "slow tests 1.00 GB, tests 2.40 GB" in told[16]
    assert told[17:19] == ["skipped in every step: 2", "     2  there is no moon here"]
    assert told[19:] == ["failed: 1", "  tests: a::d"]


@pytest.mark.parametrize("known", ["", "# there is no moon here\n", "there is no sun\n"])
def test_a_skip_for_an_unwritten_reason_fails_ci(known: str, tmp_path: Path) -> None:
    done = summary(tmp_path, known, REPORTS)
    assert done.returncode == 1
    assert "NOT in .ci/skips.txt: there is no moon here" in done.stdout


def near_module() -> Any:
    spec = importlib.util.spec_from_file_location("near", ROOT / ".ci" / "near.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_quick_ci_runs_the_tests_near_what_changed() -> None:
    near = near_module().near
    files = ["tests/a/b/test_y.py", "tests/a/test_x.py", "tests/c/test_x.py", "tests/test_z.py"]
    tests = dict.fromkeys(files, ())
    room = files[:2]
    assert near(["jaxtrain/a/x.py"], tests) == ["tests/a/test_x.py"]
    assert near(["jaxtrain/a/b/y.py", "tests/c/test_x.py"], tests) == [files[0], files[2]]
    assert near(["jaxtrain/a/none.py"], tests) == near(["tests/a/help.py"], tests) == room
    assert near(["tests/test_z.py"], tests) == near(["jaxtrain/z/none.py"], tests) == [files[3]]
    assert near(["LICENSE", "jaxtrain/__init__.py", "tests/d/gone.py"], tests) == []
    assert near([".ci/run", "docs/a.md"], tests) == ["tests/test_ci.py", "tests/test_readme.py"]
    # Those that import a module come before all of a room.
    tests |= {files[0]: {"jaxtrain.a.none"}, files[3]: {"jaxtrain.d", "jaxtrain.d.e", "help"}}
    assert near(["jaxtrain/a/none.py"], tests) == [files[0]]
    assert near(["jaxtrain/d/e.py"], tests) == near(["tests/help.py"], tests) == [files[3]]


def test_what_a_test_imports_is_read() -> None:
    source = "import a.b\nfrom c.d import (\n    e,\n)\ndef f():\n    from g import h\n"
    assert near_module().imported(source) == {"a.b", "c.d", "c.d.e", "g", "g.h"}


def test_every_module_has_tests_near_it() -> None:
    """A change must not look tested where no test is near; what every test stands on has none."""
    ours = near_module()
    tests = {
        str(path.relative_to(ROOT)): ours.imported(path.read_text())
        for path in (ROOT / "tests").rglob("test_*.py")
    }
    modules = [path.relative_to(ROOT) for path in (ROOT / "jaxtrain").rglob("*.py")]
    alone = [str(path) for path in modules if not ours.near([str(path)], tests)]
    whole = {"__init__", "__main__", "arrays", "backends", "public", "reprs"}
    assert {*alone} <= {f"jaxtrain/{name}.py" for name in whole}, alone


def test_a_commit_that_is_not_there_is_told(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    ours = near_module()
    ours.ROOT = tmp_path  # what CI runs in is no repository
    with pytest.raises(SystemExit, match="near: diff --name-only no-such-commit: fatal: "):
        ours.git("diff", "--name-only", "no-such-commit")


def test_ci_refuses_what_it_does_not_know() -> None:
    done = subprocess.run([ROOT / ".ci" / "run", "--fast"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "usage: .ci/run [--quick [COMMIT]]" in done.stderr
