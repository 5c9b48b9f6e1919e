"""What a run says of its finished steps: on the screen, in its files and in memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

import jax

from jaxtrain.run.history import History
from jaxtrain.run.rates import Rates
from jaxtrain.run.session import Session
from jaxtrain.telemetry.metrics import DelayedMetrics, MetricsWriter
from jaxtrain.telemetry.progress import Progress

SKIPPED_AT_MOST = 20
"""So many steps skipped in a row, not counting those that look for a loss scale, end a run: the
parameters have not moved since, and nothing says that they will."""


class RunLog:
    """Metrics of a run that is to end at step `last`, each read a step late. The files have a line
    for every `Logging.every`-th step, the first, the last and those that were evaluated."""

    def __init__(self, session: Session, run_dir: Path | None, stream: TextIO, last: int) -> None:
        self.session, self.run_dir, self.last = session, run_dir, last
        self.history = History()
        self.rates = Rates(session.assembly, session.documents)
        self.progress = Progress(last, session.start, stream, session.experiment.logging.every)
        self._delayed = DelayedMetrics()
        self._writer = self._opened(session.start + 1)
        self._skipped, self._in_a_row = int(session.state.skipped), 0
        self._tripped = session.guard.tripped
        self._held: tuple[int, dict[str, Any]] | None = None

    def tell(self, text: str) -> None:
        self.progress.message(text)

    def push(self, done: int, metrics: Mapping[str, Any]) -> None:
        """Metrics of the step that was just dispatched; those of the step before are logged."""
        self._log(self._delayed.push(done, metrics))

    def flush(self) -> None:
        """Log the step that is not logged yet."""
        self._log(self._delayed.flush())

    def hold(self) -> None:
        """As `flush`, but the line waits for what is evaluated after that step."""
        self._log(self._delayed.flush(), hold=True)

    def evaluated(self, values: Mapping[str, float]) -> None:
        """Write the line that was held, with `values`."""
        held, self._held = self._held, None
        if held is not None:
            self._write(held[0], {**held[1], **values})

    def write_again(self) -> None:
        """Go on in new files: the old ones were removed."""
        if self._writer is not None:
            self._close(self._writer)
            last = self.history.lines[-1]["step"] if self.history.lines else self.session.start
            self._writer = self._opened(last + 1)

    def close(self) -> None:
        self.progress.close()
        if self._writer is not None:
            self._close(self._writer)

    def _close(self, writer: MetricsWriter) -> None:
        try:
            writer.close()
        except OSError as error:  # it would hide what ends the run
            self.tell(f"NOT LOGGED the last steps: {error}")

    def _opened(self, start: int) -> MetricsWriter | None:
        if self.run_dir is None:
            return None
        tensorboard = self.session.experiment.logging.tensorboard
        process = jax.process_index()
        return MetricsWriter(self.run_dir, start=start, tensorboard=tensorboard, process=process)

    def _log(self, found: tuple[int, dict[str, Any]] | None, *, hold: bool = False) -> None:
        if found is None:
            return
        step, values = found
        self._count_skipped(values)
        values = {**values, **self.rates.of(step, self.session.loader.wait_s)}
        self.history.add({"step": step, **values})
        self.progress.update(step, values)
        self._tell_trip(values)
        ends = (self.session.start + 1, self.last)
        if hold:
            self._held = (step, values)
        elif step % self.session.experiment.logging.every == 0 or step in ends:
            self._write(step, values)

    def _write(self, step: int, values: dict[str, Any]) -> None:
        self.rates.written()
        if self._writer is None:
            return
        try:
            self._writer.write(step, values)
        except OSError as error:  # a full disk; the run is worth more than its log
            self.tell(f"NOT LOGGED step {step}: {error}; the run goes on")

    def _count_skipped(self, values: dict[str, Any]) -> None:
        """Steps skipped in a row; one that only lowers the loss scale is not counted."""
        scale, skipped = self.session.experiment.precision.loss_scale, int(values["skipped"])
        if skipped == self._skipped:
            self._in_a_row = 0
        elif scale is None or scale.factor == 1 or values["loss_scale"] <= scale.minimum:
            self._in_a_row += 1
        self._skipped = skipped

    def refuse_skipping(self) -> None:
        """Raises ValueError when nothing but skipped steps is left."""
        if self._in_a_row < SKIPPED_AT_MOST:
            return
        scaled, last = self.session.experiment.precision.loss_scale, self.history.lines[-1]
        least = "" if scaled is None else ", at the least loss scale"
        rate = last.get("learning_rate")
        at = "" if rate is None else f"learning rate {rate:.3g}, "
        raise ValueError(
            f"the gradients of {self._in_a_row} steps in a row, up to step {last['step']}, "
            f"were not finite{least} ({at}loss {last['loss']:.3g}); each was skipped, so the "
            "parameters are those before them; use a lower learning rate, a longer warmup or "
            f"clip_norm=1.0{', or bf16' * bool(scaled)}, or look in the model and its data for "
            "values that are not finite"
        )

    def _tell_trip(self, values: dict[str, Any]) -> None:
        """Once; steps are counted from 0 in the metric and from 1 in what is told. The step after
        the one that was sampled was already on its way."""
        tripped = int(values.get("guard_tripped", -1))
        if tripped < 0 or self._tripped >= 0:
            return
        self._tripped = tripped
        error, cosine = (values.get(f"reducer_{name}", math.nan) for name in ("error", "cosine"))
        self.tell(
            f"step {tripped + 1} compressed sums are beyond the guard's bounds (error {error:.3g}, "
            f"cosine {cosine:.3g}): sums are exact from step {tripped + 3} on"
        )
