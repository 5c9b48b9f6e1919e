"""The metrics of finished steps, read one step late and handed on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jaxtrain.cluster.pace import Pace
from jaxtrain.optim.precision import searched
from jaxtrain.run.history import History
from jaxtrain.session.rates import Rates
from jaxtrain.session.session import Session
from jaxtrain.telemetry.metrics import DelayedMetrics

SKIPPED_AT_MOST = 20
"""Steps skipped in a row that end a run: its parameters no longer move. Steps skipped while a loss
scale is searched do not count. At a run's end there come no others to wait for, and more than half
of its steps are enough."""


class Readings:
    """Reads the metrics of each step after the next was dispatched, adds its speeds, and passes
    (step, values) to `tell`. `history` keeps them in memory. `pace` adds metrics of slow
    processes."""

    def __init__(
        self,
        session: Session,
        rates: Rates,
        pace: Pace,
        tell: Callable[[int, Mapping[str, Any]], None],
    ) -> None:
        self.session, self.history = session, History()
        self._rates, self._pace, self._tell, self._delayed = rates, pace, tell, DelayedMetrics()
        self._count_from(session.start)
        self._dispatched: tuple[int, Mapping[str, Any]] | None = None

    def take(self, done: int, metrics: Mapping[str, Any]) -> None:
        """Keeps the metrics of the step that was just dispatched."""
        self._dispatched = (done, metrics)

    def read(self) -> None:
        """Reads the metrics of the previous step and passes them on."""
        dispatched, self._dispatched = self._dispatched, None
        if dispatched is not None:
            self._give(self._delayed.push(*dispatched))

    def flush(self) -> None:
        """Reads all metrics that are not read yet."""
        self.read()
        self._give(self._delayed.flush())

    def go_back(self, step: int) -> None:
        """The steps after `step` come again: drops their metrics, read or not."""
        self._delayed, self._dispatched = DelayedMetrics(), None
        self._count_from(step)
        self.history.go_back(step)

    def read_again(self, lines: Iterable[dict[str, Any]]) -> None:
        """Takes the metrics of all the run's steps from its file."""
        self._done = self._skipped = self._in_a_row = 0
        for line in lines:
            self._count_skipped(line["step"], line)
            self.history.add(line)

    def _give(self, reading: tuple[int, dict[str, Any]] | None) -> None:
        if reading is None:
            return
        step, values = reading
        if not values["weight"]:
            values["loss"] = None  # no trained token: a mean of nothing, not 0
        self._count_skipped(step, values)
        speeds = self._rates.of(step, self.session.loader.wait_s)
        values = {**values, **speeds, **self._pace.metrics()}
        self.history.add({"step": step, **values})
        self._tell(step, values)

    def _count_from(self, step: int) -> None:
        """Counts anew, from the state after `step` steps: all of them if all were skipped."""
        self._done, self._skipped = step, int(self.session.state.skipped)
        scale = searched(self.session.experiment.precision.loss_scale)
        self._in_a_row = step if self._skipped == step and scale is None else 0

    def _count_skipped(self, step: int, values: Mapping[str, Any]) -> None:
        """Counts steps skipped in a row; a step that only lowers the loss scale does not count.

        A metrics file may lack the steps before `step`. All of them were skipped if the count of
        skipped ones grew by as many; with a loss scale to search only `step` itself counts then.
        """
        scale = searched(self.session.experiment.precision.loss_scale)
        skipped = int(values["skipped"])
        steps = step - self._done
        if skipped - self._skipped < steps:
            self._in_a_row = 0
        elif scale is None:
            self._in_a_row += steps
        elif values["loss_scale"] <= scale.minimum:
            self._in_a_row += 1
        self._done, self._skipped = step, skipped

    def refuse_skipping(self, *, ends: bool = False) -> None:
        """Raises ValueError if too many steps in a row were skipped. ends: the experiment's last
        step is done, and all metrics are read."""
        half = self._done // 2 + 1
        if self._in_a_row < (min(half, SKIPPED_AT_MOST) if ends else SKIPPED_AT_MOST):
            return
        scaled, last = self.session.experiment.precision.loss_scale, self.history.lines[-1]
        least = "" if scaled is None else ", at the least loss scale"
        rate = last.get("learning_rate")
        rate_text = "" if rate is None else f"learning rate {rate:.3g}, "
        loss = "none" if last["loss"] is None else f"{last['loss']:.3g}"
        steps = f"{self._in_a_row} steps in a row" if self._in_a_row > 1 else "the only step"
        raise ValueError(
            f"the gradients of {steps}, up to step {last['step']}, were "
            f"not finite{least} ({rate_text}loss {loss}); each was skipped, so the "
            "parameters are those before them; use a lower learning rate, a longer warmup or "
            f"clip_norm=1.0{', or bf16' * bool(scaled)}, or look in the model and its data for "
            "values that are not finite"
        )
