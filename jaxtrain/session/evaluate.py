"""Held-out loss, in nats a token and bits a byte."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxtrain.models.scales import scales_of_weights
from jaxtrain.notices import notice
from jaxtrain.quantization.delayed import SCALES
from jaxtrain.session.rows import WEIGHTS, Ended, open_split, refuse_cut_off, refuse_other_fields
from jaxtrain.step.assembly import Assembly
from jaxtrain.step.layer_order import placed
from jaxtrain.step.pipeline import evaluated_at_once
from jaxtrain.step.state import TrainState, averaged_params
from jaxtrain.step.train_step import make_evaluation_step

Values = dict[str, float]


class Evaluator:
    """Evaluates on the same held-out rows every time; the loss does not depend on the mesh.

    Built at the first call, or by `open`: a run that never evaluates compiles nothing for it.
    """

    def __init__(self, assembly: Assembly, mesh: jax.sharding.Mesh, *, cache_dir: Path) -> None:
        self._assembly, self._mesh, self._cache_dir = assembly, mesh, cache_dir
        self._bytes = cache(self._bytes_of)  # the same rows every time: read for it once
        self._dispatcher = ThreadPoolExecutor(1)
        self._at_once = evaluated_at_once(assembly)
        self._data: Any = None
        self._step: Any = None
        self._scales: Any = None

    def __call__(self, state: TrainState, *, batches: int | None) -> Values:
        """Returns eval_loss (nats per weighted token) and, where tokens stand for bytes,
        bits_per_byte; {} if no token has a weight.

        batches: how many of the experiment's (largest) batch, from the start of the split; None for
        the whole split, each row once.
        """
        self.open()
        pieces = range(self._pieces(batches, self._data))
        params = self.params(state)
        parts: list[Any] = []
        for first in pieces[:: self._at_once]:
            numbers = self._numbers(first, self._at_once)
            # Pieces after the last have rows of weight 0.
            rows = self._placed.rows(
                np.where(numbers < len(pieces) * self._size, numbers, len(self._data))
            )
            for part in parts[-1:]:
                part.result()
            if self.program is None:
                notice("compiling the evaluation")
                self._step = self._step.lower(params, state.rest, rows).compile()
            parts.append(self._dispatcher.submit(self._run, params, state.rest, rows))
        results = [part.result() for part in parts]
        sums = jax.tree.map(lambda *parts: sum(map(float, parts)), *results)
        total, count = sums.loss, sums.count
        if not count:
            return {}
        values = {"eval_loss": total / count}
        values |= {f"eval_{name}": value / count for name, value in sums.beside.items()}
        text_bytes = sum(map(self._bytes, pieces))
        if text_bytes:
            values["bits_per_byte"] = total / math.log(2) / text_bytes
        return values

    def params(self, state: TrainState) -> dict[str, jax.Array]:
        """Returns the parameters to evaluate: averages where they exist, with 8-bit scales that fit
        them."""
        params, scales = averaged_params(state), self._assembly.buffers.scales
        averaged = {k for k in scales if k.removesuffix(SCALES) in state.ema}
        if not averaged:
            return params
        if self._scales is None:
            products = self._assembly.experiment.precision.products
            make = partial(scales_of_weights, scales=averaged, products=products)
            shardings = {k: params[k].sharding for k in averaged}
            self._scales = jax.jit(make, out_shardings=shardings)
        return params | jax.block_until_ready(self._scales(params))

    def wait(self) -> None:
        """Waits until no evaluation runs: an interrupted call leaves its program running."""
        self._dispatcher.submit(int).result()

    def open(self) -> None:
        """Opens the held-out data; later calls do nothing. Raises ValueError if there is none, or
        if it lacks fields that evaluations read."""
        if self._data is not None:
            return
        e = self._assembly.experiment
        data = open_split(e, "held_out", self._cache_dir)
        if len(data) == 0:
            raise ValueError(
                "the held-out split has no rows; use a shorter seq, more held-out text, or "
                "evaluation=None"
            )
        refuse_other_fields(data, e, self._assembly.fields)
        self._size = self._assembly.largest_batch // e.microbatches
        if e.evaluation is not None:
            numbers = (e.evaluation.batches, e.evaluation.final_batches)
            fewest = min(self._pieces(batches, data) for batches in numbers)
            self._refuse_without_weight(data, fewest * self._size)
        self._data = Ended(data, self._weights)
        self._placed = self._assembly.placed(self._data, self._mesh, self._at_once)
        self._step = jax.jit(make_evaluation_step(self._assembly, self._mesh))

    @property
    def digest(self) -> str | None:
        """Names the held-out rows; None if they are not open, or have no digest."""
        return None if self._data is None else getattr(self._data.dataset, "digest", None)

    @property
    def program(self) -> jax.stages.Compiled | None:
        """The compiled evaluation of a piece; None before the first call."""
        return self._step if isinstance(self._step, jax.stages.Compiled) else None

    def compile(self, shardings: TrainState, compiler_options: dict[str, Any]) -> None:
        """Compiles now what the first call would compile, for a state with these shardings."""
        self.open()
        abstract = self._assembly.abstract
        arguments = jax.tree.map(
            placed,
            (averaged_params(abstract), abstract.rest),
            (averaged_params(shardings), shardings.rest),
        )
        rows = self._placed.rows(self._numbers(0, self._at_once))
        self._step = self._step.lower(*arguments, rows).compile(compiler_options=compiler_options)

    def _run(self, *arguments: Any) -> Any:
        """Runs one program at a time. Independent programs would run side by side, and simulated
        devices have too few threads for that: their collectives hang."""
        return jax.block_until_ready(self._step(*arguments))

    def _pieces(self, batches: int | None, data: Any) -> int:
        """Number of pieces that hold `batches` batches. A piece has a microbatch's rows, and so its
        memory; the rows do not depend on the number of microbatches."""
        rows, micro = len(data), self._assembly.experiment.microbatches
        available = -(-rows // self._size)
        pieces = available if batches is None else min(available, batches * micro)
        if pieces * self._size > rows or pieces % self._at_once:
            fields, batch = self._assembly.fields, self._assembly.largest_batch
            refuse_cut_off(rows, self._size * self._at_once, batch, fields, self._weights)
        return pieces

    def _refuse_without_weight(self, data: Any, rows: int) -> None:
        """Raises ValueError if none of a split's first `rows` rows has a weight above 0."""
        numbers, name = np.arange(min(rows, len(data))), self._weights
        for first in range(0, len(numbers), self._size):
            batch = data.rows(numbers[first : first + self._size])
            if name not in batch or np.any(batch[name]):
                return
        raise ValueError(
            f"no token of the {len(numbers)} held-out rows that an evaluation reads has a weight "
            "above 0, so there is no loss; use a larger Evaluation(batches=..., "
            "final_batches=...), held-out documents with text behind their prompts, or "
            "evaluation=None"
        )

    @property
    def _weights(self) -> str:
        """Name of the field that gives padding rows weight 0."""
        described = self._assembly.description
        return WEIGHTS if described is None else described.weights

    def _numbers(self, piece: int, pieces: int = 1) -> np.ndarray:
        return np.arange(piece * self._size, (piece + pieces) * self._size)

    def _bytes_of(self, piece: int) -> float:
        """Bytes of text in the piece's targets, weighted as their losses are."""
        table = getattr(self._data.dataset, "token_bytes", None)
        if table is None or not {"targets", WEIGHTS} <= self._assembly.fields.keys():
            return 0.0
        rows = self._data.rows(self._numbers(piece))
        return float(np.sum(table[rows["targets"]] * rows[WEIGHTS]))
