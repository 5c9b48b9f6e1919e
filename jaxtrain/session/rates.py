"""Step time, tokens a second and MFU: means over the steps since the last written line."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from jaxtrain.data import batch_of
from jaxtrain.step.assembly import Assembly
from jaxtrain.telemetry.flops import mfu

DocumentsOf = Callable[[int], Mapping[int, float] | None]
"""step -> document length in its batch -> number of documents; None if they are not counted."""


def counts_flops(assembly: Assembly) -> bool:
    """True if MFU is reported. It is not with frozen leaves (the FLOPs of the gradients they save
    are not counted), for a model without a description, and on simulated devices."""
    return assembly.description is not None and not assembly.spec.simulated and not assembly.frozen


class Rates:
    """Speeds of finished steps, without evaluation and saving: each value is a mean over the steps
    since the last written line.

    The first step of a run has none: it includes the program's first run.
    """

    def __init__(
        self,
        assembly: Assembly,
        documents: DocumentsOf = lambda step: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._assembly, self._documents, self._clock = assembly, documents, clock
        self._began: tuple[float, float, float] | None = None
        """Clock, pause and wait at the written line; `_latest`: at the step that ended last."""
        self._latest = (0.0, 0.0, 0.0)
        self._paused = 0.0
        self._steps = self._rows = 0
        self._lengths: Counter[int] = Counter()

    @contextmanager
    def paused(self) -> Iterator[None]:
        began = self._clock()
        yield
        self._paused += self._clock() - began

    def of(self, step: int, wait_s: float) -> dict[str, float | None]:
        """Returns speeds after `step`, which just finished: step_s, data_s (waiting for data),
        tokens_per_s (examples_per_s for rows without tokens), mfu_full and mfu_causal; and
        documents_per_row where they are counted.

        wait_s: seconds that this start has waited for data, in all.
        """
        assembly = self._assembly
        tokens = None if assembly.tokens is None else assembly.fields[assembly.tokens]
        speed = "examples_per_s" if tokens is None else "tokens_per_s"
        documents = self._documents(step)
        self._latest = (self._clock(), self._paused, wait_s)
        if self._began is None:
            self._began = self._latest
            return {speed: None, "step_s": None, "data_s": wait_s}
        now, paused, waited = (a - b for a, b in zip(self._latest, self._began, strict=True))
        seconds, seq = now - paused, 1 if tokens is None else tokens[0][0]
        self._steps += 1
        self._rows += batch_of(assembly.experiment.batch, step - 1)
        self._lengths.update(documents or {})
        values: dict[str, float | None] = {
            speed: self._rows * seq / seconds,
            "step_s": seconds / self._steps,
            "data_s": waited / self._steps,
        }
        if self._lengths:
            values["documents_per_row"] = sum(self._lengths.values()) / self._rows
        if counts_flops(assembly):
            values |= self._mfu(seq, seconds)
        return values

    def written(self) -> None:
        """The line of the latest step was written: the next means begin there."""
        self._began, self._steps, self._rows = self._latest, 0, 0
        self._lengths.clear()

    def _mfu(self, seq: int, seconds: float) -> dict[str, float]:
        assembly = self._assembly
        flops = assembly.described.flops(
            seq=seq, sequences=self._rows, documents=self._lengths or None
        )
        return {
            f"mfu_{name}": mfu(
                count,
                step_s=seconds,
                peak_flops_per_device=assembly.peak_flops,
                devices=assembly.spec.devices,
            )
            for name, count in (("full", flops.train_full), ("causal", flops.train_causal))
        }
