"""Whether all begin again: waits that double, a budget, and crashes that would come again."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

import pytest

from jaxtrain.checkpoint.storage import check_writable
from jaxtrain.fault_tolerance.restarts import Exhausted, Failure, RestartHistory, Restarts


def failure(
    step: int,
    cause: str = "",
    *,
    at: float = 0,
    kind: str = "crashed",
    phase: str = "step",
    process: int = 0,
    first: int = 0,
    wrong: tuple[int, ...] = (),
) -> Failure:
    what = f"process {process} {kind}"
    return Failure(process, kind, what, phase, step, at, first, cause, wrong=wrong)


def early(cause: str, *, phase: str = "open", **more) -> Failure:
    """Before a step was won."""
    return failure(4, cause, phase=phase, first=4, **more)


def decide(failures, **rule) -> list[float | Exhausted]:
    history = RestartHistory(Restarts(**rule))
    return [history.decide(each) for each in failures]


def test_waits_double_until_a_step_is_won() -> None:
    kills = [failure(step, kind="killed") for step in (5, 5, 5, 5, 9, 9, 3)]
    assert decide(kills, first_wait_s=2, longest_wait_s=9) == [2, 4, 8, 9, 2, 4, 8]


def test_the_budget_is_of_a_window_of_time() -> None:
    times = (0, 10, 20, 101, 102, 103)
    found = decide([failure(n, at=at) for n, at in enumerate(times)], most=3, within_s=100)
    assert found[:4] == [1, 1, 1, 1], "the first is forgotten at 101"
    assert isinstance(found[4], Exhausted) and not found[4].deterministic
    assert "3 restarts within 100 s are used up (--restarts 3)" in found[4].why
    assert isinstance(decide([failure(1)], most=0)[0], Exhausted)


SAME = {
    "a crash, on whatever process": (failure(7), failure(7, process=1), True),
    "a step further": (failure(7), failure(8), False),
    "killed, as by a lack of memory elsewhere": (
        failure(7, kind="killed"), failure(7, kind="killed"), False,
    ),
    "a hang": (failure(7, kind="hangs"), failure(7, kind="hangs"), False),
    "another phase": (failure(7, phase="load"), failure(7), False),
    "before they meet": (
        early("RuntimeError: not logged in", phase="start"),
        early("RuntimeError: not logged in", phase="start"), True,
    ),
    "where processes meet": (failure(0, phase="join"), failure(0, phase="join"), False),
    "said in other words, steps won": (failure(7, "KeyError: 1"), failure(7, "KeyError: b"), True),
    "lost a peer at the same step, steps won": (
        failure(7, "Connection reset"), failure(7, "Connection reset"), True,
    ),
    "before a step is won, for the same reason": (
        early("exit code 1: KeyError: 'x'"), early("exit code 1: KeyError: 'x'"), True,
    ),
    "but for addresses and numbers": (
        early("KeyError: object at 0x7f3a, pid 31", process=1),
        early("KeyError: object at 0x55bc, pid 407"), True,
    ),
    "for another reason": (early("KeyError: 'x'"), early("ValueError: 'x'"), False),
    "before it knew of steps": (failure(0, "a", first=-1), failure(0, "b", first=-1), False),
    "a file system away, twice": (
        early("OSError: [Errno 5] Input/output error: 'c'"),
        early("OSError: [Errno 5] Input/output error: 'c'"), False,
    ),
    "a service away, twice, in the first step": (
        early("JaxRuntimeError: UNAVAILABLE: x", phase="first step"),
        early("JaxRuntimeError: UNAVAILABLE: x", phase="first step"), False,
    ),
    "one of the two had won steps": (failure(4, "a", first=0), failure(4, "b", first=4), False),
    "wrong numbers of the same process": (
        failure(7, kind="wrong", wrong=(1,)), failure(7, kind="wrong", wrong=(1,)), True,
    ),
    "wrong numbers of another": (
        failure(7, kind="wrong", wrong=(1,)), failure(7, kind="wrong", wrong=(2,)), False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SAME)
def test_a_crash_that_comes_again_at_the_same_step_ends_it(name: str) -> None:
    first, second, ends = SAME[name]
    found = decide([first, second])
    assert not isinstance(found[0], Exhausted)
    assert (isinstance(found[1], Exhausted) and found[1].deterministic) == ends


@pytest.mark.parametrize("code", [errno.EROFS, errno.EDQUOT, errno.ENOSPC, errno.EIO, errno.ESTALE])
def test_a_disk_that_refuses_two_starts_may_be_mended(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(**_: object) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch, pytest.raises(ValueError) as unwritable:
        patch.setattr(tempfile, "NamedTemporaryFile", fails)
        check_writable(tmp_path, 0)
    with pytest.raises(ValueError) as full:
        check_writable(tmp_path, 10**18)
    for refusal in (unwritable, full):
        two = [early(str(refusal.value), kind="refused", phase="start") for _ in range(2)]
        assert ends_of(*two) == [False, False], refusal.value


def ends_of(*failures: Failure) -> list[bool]:
    return [isinstance(found, Exhausted) and found.deterministic for found in decide(failures)]


def test_a_run_that_fails_in_the_first_step_of_every_start_ends() -> None:
    """As with a callback that always raises: the run saves the step, and then leaves."""
    words = "exit code 1: ValueError: row 9 of rank 0x7f"
    every = [failure(30, words), failure(31, words, first=30), failure(32, words, first=31)]
    assert ends_of(*every) == [False, False, True]
    assert ends_of(*every[1:], failure(33, words, first=32)) == [False, False, True]
    for other in (
        failure(33, words, first=31),  # gained two
        failure(32, "exit code 1: KeyError", first=31),
        failure(32, words, first=31, phase="save"),
        failure(32, words, first=31, kind="killed"),
        failure(32, words, first=-1),
    ):
        assert ends_of(*every[:2], other) == [False] * 3, other
    passing = [each._replace(cause="Connection reset by peer") for each in every]
    assert ends_of(*passing) == [False] * 3
    # The row begins anew with whatever is unlike.
    between = [
        *every[:2],
        failure(31, words, first=31, kind="killed"),
        failure(32, words, first=31),
    ]
    assert ends_of(*between) == [False] * 4
    assert (
        ends_of(*every[:2], failure(40, words, first=31), failure(41, words, first=40))
        == [False] * 4
    )


def test_a_rule_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match=r"most=-1 .*; within_s=0 .*; first_wait_s=-1"):
        Restarts(most=-1, within_s=0, first_wait_s=-1)
