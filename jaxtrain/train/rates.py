"""Step time, tokens a second and MFU of finished steps."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from jaxtrain.data import batch_of
from jaxtrain.telemetry.flops import mfu
from jaxtrain.train.assembly import Assembly


class Rates:
    """Times between finished steps, evaluation and saving left out.

    The first step of a run has none: it holds the program's first run.
    """

    def __init__(self, assembly: Assembly) -> None:
        self._assembly = assembly
        self._last: float | None = None
        self._paused = 0.0

    @contextmanager
    def paused(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._paused += time.perf_counter() - began

    def of(self, step: int) -> dict[str, float | None]:
        """tokens_per_s, step_s, mfu_full and mfu_causal of `step`, which just finished."""
        now, last = time.perf_counter(), self._last
        self._last, paused, self._paused = now, self._paused, 0.0
        if last is None:
            return {"tokens_per_s": None, "step_s": None}
        step_s = now - last - paused
        e = self._assembly.experiment
        rows = batch_of(e.batch, step - 1)
        seq = self._assembly.fields["tokens"][0][0] if "tokens" in self._assembly.fields else 1
        values: dict[str, float | None] = {"tokens_per_s": rows * seq / step_s, "step_s": step_s}
        # Of frozen leaves no gradients are made: how much of a step that saves is not counted.
        if not self._assembly.built_in or self._assembly.spec.simulated or self._assembly.frozen:
            return values
        flops = e.model.flops(seq=seq, sequences=rows)
        peak = self._assembly.peak_flops
        for name, count in (("full", flops.train_full), ("causal", flops.train_causal)):
            values[f"mfu_{name}"] = mfu(
                count,
                step_s=step_s,
                peak_flops_per_device=peak,
                devices=self._assembly.spec.devices,
            )
        return values
