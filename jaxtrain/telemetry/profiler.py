"""Profiler traces of chosen steps, written to the run directory for xprof and TensorBoard."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax


@dataclass(frozen=True)
class Steps:
    """The steps `first` to `last`, both included: `profile=Steps(10, 12)`.

    Raises `ValueError` unless 0 <= first <= last.
    """

    first: int
    last: int

    def __post_init__(self) -> None:
        if not 0 <= self.first <= self.last:
            raise ValueError(
                f"Steps({self.first}, {self.last}) must have 0 <= first <= last; "
                f"use Steps({max(0, self.first)}, {max(0, self.first, self.last)})"
            )

    def __contains__(self, step: int) -> bool:
        return self.first <= step <= self.last


class Profiler:
    """Starts and stops one trace around the requested steps, into `run_dir/profile`.

    Call `before(step, arrays)` and `after(step, arrays)` around the dispatch of every step, with
    arrays that the device was asked for (such as metrics). They are waited for only at both ends of
    the trace, so that it has exactly those steps. A run that resumes inside the range traces the
    remaining steps. Cost outside the range: two comparisons.
    """

    def __init__(self, steps: Steps | None, run_dir: str | Path) -> None:
        self.path = Path(run_dir) / "profile"
        self._steps = steps
        self._tracing = False
        self._annotation: jax.profiler.StepTraceAnnotation | None = None

    def before(self, step: int, arrays: Any = ()) -> None:
        """Start the trace if `step` is in the range, after `arrays` of the step before are done."""
        if self._steps is None or step not in self._steps:
            return
        if not self._tracing:
            jax.block_until_ready(arrays)
            self.path.mkdir(parents=True, exist_ok=True)
            jax.profiler.start_trace(str(self.path))
            self._tracing = True
        self._annotation = jax.profiler.StepTraceAnnotation("train", step_num=step)
        self._annotation.__enter__()

    def after(self, step: int, arrays: Any = ()) -> bool:
        """End the step; True when the trace was written (the step was the last of the range)."""
        self._leave()
        if not self._tracing or self._steps is None or step < self._steps.last:
            return False
        jax.block_until_ready(arrays)
        self.close()
        return True

    def close(self) -> None:
        """Write what was traced so far; for an interrupted run. Does nothing when not tracing."""
        self._leave()
        if self._tracing:
            self._tracing = False
            jax.profiler.stop_trace()

    def _leave(self) -> None:
        if self._annotation is not None:
            self._annotation.__exit__(None, None, None)
            self._annotation = None
