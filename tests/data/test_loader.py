"""The loader: same batches as without it, a bounded lead, and errors where they are seen."""

from __future__ import annotations

import signal
import threading
import time
import traceback
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxtrain.data.loader import Loader


def rows(indices: np.ndarray) -> dict[str, np.ndarray]:
    return {"tokens": indices[:, None] * 10}


DATASET: Any = SimpleNamespace(rows=rows)


def rows_of_step(step: int) -> np.ndarray:
    return np.arange(step * 3, step * 3 + 3)


def loader(place: Any = lambda batch: batch, **options: Any) -> Loader:
    return Loader(DATASET, rows_of_step, place, **options)


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("start", [0, 7])
@pytest.mark.parametrize("ahead", [1, 2, 5])
def test_batches_come_in_order_and_equal_those_made_directly(start: int, ahead: int) -> None:
    with loader(start=start, ahead=ahead) as batches:
        for step in range(start, start + 12):
            found, placed = next(batches)
            assert found == step
            np.testing.assert_array_equal(placed["tokens"], rows(rows_of_step(step))["tokens"])


@pytest.mark.parametrize("ahead", [1, 3])
def test_the_lead_is_used_and_bounded(ahead: int) -> None:
    placed: list[int] = []
    with loader(lambda batch: placed.append(1), ahead=ahead) as batches:
        wait_until(lambda: len(placed) == ahead)
        for taken in range(1, 5):
            batches.next()
            wait_until(lambda taken=taken: len(placed) == taken + ahead)
        time.sleep(0.02)
        assert len(placed) == 4 + ahead
    assert not [t for t in threading.enumerate() if t.name == "jaxtrain-loader"]


def test_an_error_is_raised_after_the_batches_before_it_with_its_traceback() -> None:
    def broken_place(batch: dict[str, np.ndarray]) -> Any:
        if batch["tokens"][0, 0] == 60:
            raise RuntimeError("no such device")
        return batch

    with loader(broken_place, ahead=4) as batches:
        assert [batches.next()[0] for _ in range(2)] == [0, 1]
        for _ in range(2):
            with pytest.raises(RuntimeError, match="no such device") as caught:
                batches.next()
            frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
            assert "broken_place" in frames


def test_waiting_is_measured() -> None:
    release = threading.Event()
    times = iter([0.0, 5.0, 10.0, 10.25])

    def slow(batch: Any) -> Any:
        release.wait(60)
        return batch

    with loader(slow, clock=lambda: next(times)) as batches:
        threading.Timer(0.05, release.set).start()
        batches.next()
        assert batches.wait_s == 5.0
        batches.next()
        assert batches.wait_s == 5.25


def test_batches_that_were_looked_at_come_again_and_were_not_waited_for() -> None:
    """More of them than the loader holds ahead."""
    with loader(start=3, clock=iter(range(1000)).__next__) as batches:
        assert [step for step, _ in batches.peek(5)] == [3, 4, 5, 6, 7]
        assert batches.wait_s == 0.0
        assert [step for step, _ in batches.peek(2)] == [3, 4]
        for step in range(3, 12):
            found, placed = batches.next()
            assert found == step and placed["tokens"][0, 0] == 30 * step


def test_an_interrupt_while_waiting_loses_nothing() -> None:
    release = threading.Event()

    def slow(batch: Any) -> Any:
        release.wait(60)
        return batch

    with loader(slow) as batches:
        main = threading.main_thread().ident
        assert main is not None
        timer = threading.Timer(0.1, lambda: signal.pthread_kill(main, signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            batches.next()
        timer.join()
        release.set()
        assert [batches.next()[0] for _ in range(3)] == [0, 1, 2]


def test_a_closed_loader_says_so_and_closes_again() -> None:
    batches = loader()
    batches.close()
    batches.close()
    with pytest.raises(ValueError, match="the loader is closed"):
        batches.next()
    with pytest.raises(ValueError, match="ahead=0"):
        loader(ahead=0)
