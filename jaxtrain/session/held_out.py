"""Held-out rows in the pieces in which an evaluation reads them, after a check that it can."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.data import Dataset
from jaxtrain.experiment import Experiment
from jaxtrain.scoring.ended import WEIGHTS, Ended
from jaxtrain.session.other_data import OneSplit
from jaxtrain.session.rows import listed, open_split
from jaxtrain.step.assembly import Assembly
from jaxtrain.step.batches import fields_of
from jaxtrain.step.pipeline import evaluated_at_once

AT_ONCE = 32
"""Rows read at once in search of a weight above 0: most often the first has one."""


def open_held_out(
    experiment: Experiment,
    fields: Any,
    cache_dir: Path,
    *,
    otherwise: str = "use evaluation=None",
) -> Any:
    """Returns the held-out split of the experiment's data. Raises ValueError if it has no rows, or
    not the `fields` of a training batch, in their shapes and dtypes. otherwise: the last remedy."""
    data = experiment.data
    held_out = open_split(experiment, "held_out", cache_dir)
    data = data.data if isinstance(data, OneSplit) else data
    if len(held_out) == 0:
        raise ValueError(
            f"the held-out split has no rows; use a shorter seq, more held-out text, or {otherwise}"
        )
    found = fields_of(held_out, data)
    problems = [
        f"{name}: {_field(found.get(name))} for the {_field(field)} of training rows"
        for name, field in fields.items()
        if found.get(name) != field
    ]
    if problems:
        raise ValueError(
            f"the held-out rows of {type(data).__name__} are not what the model is trained on: "
            f"{'; '.join(problems)}; give them the fields of training rows, or {otherwise}"
        )
    return held_out


class HeldOutRows:
    """split: the held-out rows. padded: the same, with rows of weight 0 behind the last. at_once:
    pieces of a call of the evaluation step.

    A piece has a microbatch's rows, and so its memory; the rows do not depend on the number of
    microbatches.

    Raises ValueError if the experiment's evaluations would read behind the split's end and rows
    have no weights, or if no weight that they read is above 0.
    """

    def __init__(self, assembly: Assembly, held_out: Dataset) -> None:
        e, described = assembly.experiment, assembly.description
        self._assembly, self._weights = assembly, described.weights if described else WEIGHTS
        self._size = assembly.largest_batch // e.microbatches
        self.at_once = evaluated_at_once(assembly)
        self.split, self.padded = held_out, Ended(held_out, self._weights)
        if e.evaluation is not None:
            fewest = min(map(self.pieces, (e.evaluation.batches, e.evaluation.final_batches)))
            self._refuse_without_weight(fewest * self._size)

    def pieces(self, batches: int | None) -> int:
        """Returns the number of pieces that hold `batches` batches; None: the whole split."""
        available, micro = -(-len(self.split) // self._size), self._assembly.experiment.microbatches
        pieces = available if batches is None else min(available, batches * micro)
        is_cut = pieces * self._size > len(self.split) or pieces % self.at_once
        if is_cut and self._weights not in self._assembly.fields:
            raise ValueError(self._cut_message(self._size * self.at_once))
        return pieces

    def numbers(self, piece: int, pieces: int = 1) -> np.ndarray:
        """Returns the row numbers of pieces from `piece` on."""
        return np.arange(piece * self._size, (piece + pieces) * self._size)

    def _cut_message(self, piece: int) -> str:
        rows, most = len(self.split), len(self.split) // self._assembly.largest_batch
        fewer = f"use Evaluation(batches={most}, final_batches={most}) or fewer, " if most else ""
        return (
            f"an evaluation would read {-(-rows // piece) * piece} rows, in pieces of {piece}, of "
            f"a held-out split of {rows}: those behind its end need weights of 0, and rows have "
            f"{listed(self._assembly.fields)} and no {self._weights}; {fewer or 'use '}"
            f"a held-out split of a multiple of {piece} rows, or give rows weights, float32, by "
            f"which the model's loss multiplies"
        )

    def _refuse_without_weight(self, rows: int) -> None:
        numbers, name = np.arange(min(rows, len(self.split))), self._weights
        for first in range(0, len(numbers), AT_ONCE):
            batch = self.padded.rows(numbers[first : first + AT_ONCE])
            if name not in batch or np.any(batch[name]):
                return
        raise ValueError(
            f"no token of the {len(numbers)} held-out rows that an evaluation reads has a weight "
            "above 0, so there is no loss; use a larger Evaluation(batches=..., "
            "final_batches=...), held-out documents with text behind their prompts, or "
            "evaluation=None"
        )


def _field(field: Any) -> str:
    return "none" if field is None else f"{np.dtype(field[1]).name}{list(field[0])}"
