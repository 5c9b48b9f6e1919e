"""A trace holds the steps asked for and no others."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxtrain.telemetry.profiler import Profiler, Steps


class Recorder:
    """Stands in for jax.profiler's start and stop."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        monkeypatch.setattr(jax.profiler, "start_trace", lambda path: self.events.append("start"))
        monkeypatch.setattr(jax.profiler, "stop_trace", lambda: self.events.append("stop"))


@pytest.mark.parametrize(
    ("steps", "ran", "expected"),
    [
        (Steps(2, 3), range(6), [0, 1, "start", 2, 3, "stop", 4, 5]),
        (Steps(0, 0), range(2), ["start", 0, "stop", 1]),
        (Steps(2, 4), range(3, 6), ["start", 3, 4, "stop", 5]),  # resumed inside the range
        (Steps(2, 4), range(5, 7), [5, 6]),  # resumed after it
        (Steps(2, 9), range(1, 4), [1, "start", 2, 3, "stop"]),  # ended inside it
        (None, range(2), [0, 1]),
    ],
)
def test_the_trace_is_around_its_steps(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    steps: Steps | None,
    ran: range,
    expected: list,
) -> None:
    recorder = Recorder(monkeypatch)
    profiler = Profiler(steps, tmp_path)
    written = []
    for step in ran:
        profiler.before(step)
        recorder.events.append(step)
        if profiler.after(step):
            written.append(step)
    profiler.close()
    profiler.close()
    assert recorder.events == expected
    assert written == ([steps.last] if steps and steps.last in ran else [])


def test_a_real_trace_lands_in_the_run_directory(tmp_path: Path) -> None:
    profiler = Profiler(Steps(1, 1), tmp_path)
    step = jax.jit(lambda x: x @ x)
    x = jnp.eye(8)
    for i in range(3):
        profiler.before(i, x)
        x = step(x)
        profiler.after(i, x)
    assert [path.suffix for path in profiler.path.rglob("*.xplane.pb")] == [".pb"]


@pytest.mark.parametrize(("first", "last"), [(3, 2), (-1, 2), (-5, -3)])
def test_steps_that_are_no_range(first: int, last: int) -> None:
    with pytest.raises(ValueError, match="0 <= first <= last") as error:
        Steps(first, last)
    suggested = str(error.value).split("use ")[1]
    assert isinstance(eval(suggested), Steps)
