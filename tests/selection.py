"""Which tests are run: of slow cases that are alike one in so many, of all tests a part, and those
that begin within a time."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest


def part(text: str) -> tuple[int, int]:
    """The two numbers of "2/4": the second of four parts."""
    numbers = re.fullmatch(r"(\d+)/(\d+)", text)
    if not numbers or not 1 <= int(numbers[1]) <= int(numbers[2]):
        raise ValueError(f"--shard {text}: a part is K/N with 1 <= K <= N, such as 2/4")
    return int(numbers[1]), int(numbers[2])


def add_option(parser: pytest.Parser) -> None:
    parser.addoption(
        "--shard",
        metavar="K/N",
        help="of the tests chosen otherwise, run the Kth of N parts of each folder's",
    )
    parser.addoption(
        "--seconds", type=float, metavar="S", help="skip tests that would begin S seconds from now"
    )


def shard(items: list[pytest.Item], which: int, parts: int) -> list[pytest.Item]:
    """Of each folder's tests a run of one in `parts`: neighbours share what they compile."""
    folders: dict[Path, list[pytest.Item]] = {}
    for item in items:
        folders.setdefault(item.path.parent, []).append(item)
    return [
        item
        for each in folders.values()
        for item in each[len(each) * (which - 1) // parts : len(each) * which // parts]
    ]


class Selection:
    """A pytest plugin for `--shard`, `--seconds`, and the mark `sampled(n)`: of a test's cases that
    are not exhaustive anyway the first and every nth after it stay as they are marked, and so do
    all default ones; the other slow ones are exhaustive. An n that is odd meets both of two values
    that take turns."""

    def __init__(self, config: pytest.Config) -> None:
        shard, self._seconds = config.getoption("--shard"), config.getoption("--seconds")
        self._began = time.monotonic()
        try:
            self._shard = part(shard) if shard else None
        except ValueError as error:
            raise pytest.UsageError(str(error)) from None

    @pytest.hookimpl(wrapper=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> Iterator[None]:
        cases: Counter[str] = Counter()
        for item in items:  # before pytest's own `-m` chooses
            mark, slow = item.get_closest_marker("sampled"), item.get_closest_marker("slow")
            if mark is None or item.get_closest_marker("exhaustive") is not None:
                continue
            test = item.nodeid.partition("[")[0]
            if slow is not None and cases[test] % mark.args[0]:
                item.add_marker(pytest.mark.exhaustive)
            cases[test] += 1
        yield
        if self._shard is not None:  # of those that `-m` has left
            mine = shard(items, *self._shard)
            chosen = set(mine)
            config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
            items[:] = mine

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        if self._seconds is not None and time.monotonic() - self._began >= self._seconds:
            pytest.skip(f"would begin after the {self._seconds:g} s of --seconds")
