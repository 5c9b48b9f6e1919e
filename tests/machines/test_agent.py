"""What an agent does of what its launch says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from jaxtrain.machines.agent import Agent


@pytest.mark.parametrize("start", [1, 2, 3])
def test_a_signal_reaches_the_process_of_its_own_start_alone(start: int) -> None:
    """One that was meant for an earlier process may come late."""
    done: list[Any] = []
    made = Agent(("", 0), b"", name="a", program=[], wait_s=0, tell=print)
    worker: Any = SimpleNamespace(send=done.append, kill=lambda: done.append("kill"))
    made._start, made._worker = 2, worker
    channel: Any = None
    made._do({"do": "signal", "start": start, "number": 15}, channel)
    made._do({"do": "kill", "start": start}, channel)
    made._do({"do": "nothing"}, channel)
    assert done == ([15, "kill"] if start == 2 else [])
    made._worker = None
    made._do({"do": "kill", "start": 2}, channel)
