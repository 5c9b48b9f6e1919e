"""Memory of a test run's processes, and its durations, skips and failures, in a file for CI."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import psutil
import pytest

REPORT = "JAXTRAIN_TEST_REPORT"
"""The environment variable that names the file to write."""
WORKER_BYTES = 2.5e9
"""What a process that runs tests may take: more fails the run."""
DROP_BYTES = 1.5e9
"""Above it compiled programs are dropped behind each test, and not behind each module alone."""


def peak_bytes() -> int:
    """The most memory that this process has held so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


def give_back() -> None:
    """Has glibc's allocator give freed memory back, which it keeps by itself: a process that has
    once passed DROP_BYTES would stay above it."""
    with suppress(AttributeError, OSError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


class Report:
    """A pytest plugin. It drops compiled programs behind each module, whose tests share them."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._peak = (0, "")
        """Of this process: bytes, and the test that was the first to take as many."""
        self._largest = (0, "")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        # Modules and tests stay: looking through them took 0.3 s at each collection of garbage.
        gc.collect()
        gc.freeze()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, item: pytest.Item, nextitem: Any) -> Iterator[None]:
        yield
        if peak_bytes() > self._peak[0]:
            self._peak = (peak_bytes(), item.nodeid)
        last_of_module = nextitem is None or nextitem.path != item.path
        if last_of_module or psutil.Process().memory_info().rss > DROP_BYTES:
            jax.clear_caches()
            gc.collect()
            give_back()

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        told = getattr(node, "workeroutput", {}).get("peak", (0, ""))
        self._largest = max(self._largest, tuple(told))

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        output = getattr(self._config, "workeroutput", None)
        if output is not None:
            output["peak"] = self._peak
            return
        self._largest = max(self._largest, self._peak)
        if self._largest[0] > WORKER_BYTES:
            session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        largest, test = self._largest
        excess = f"; it may take {WORKER_BYTES / 1e9} GB" * (largest > WORKER_BYTES)
        where = f", in {test}" if test else ""
        terminalreporter.line(f"largest process of tests: {largest / 1e9:.2f} GB{where}{excess}")
        if os.environ.get(REPORT):
            report = {"largest_bytes": largest, **_outcomes(terminalreporter.stats)}
            Path(os.environ[REPORT]).write_text(json.dumps(report), encoding="utf-8")


def _outcomes(stats: dict[str, list[Any]]) -> dict[str, Any]:
    """Seconds of each test, setup and teardown in them; why each was skipped; which failed."""
    seconds: dict[str, float] = {}
    for reports in stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid] = seconds.get(report.nodeid, 0.0) + report.duration
    return {
        "seconds": seconds,
        "skipped": {r.nodeid: _reason(r) for r in stats.get("skipped", [])},
        "failed": [r.nodeid for kind in ("failed", "error") for r in stats.get(kind, [])],
    }


def _reason(report: Any) -> str:
    return str(report.longrepr[2]).removeprefix("Skipped: ")
