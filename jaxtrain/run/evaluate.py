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
from jaxtrain.nn.quantized.delayed import SCALES
from jaxtrain.run.rows import WEIGHTS, Ended, open_split, refuse_cut_off, refuse_other_fields
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
        """eval_loss (nats a weighted token) and, where tokens stand for bytes, bits_per_byte; {}
        where no token has a weight.

        batches: of the experiment's (largest) batch, from the start of the split; None for all of
        it, each row once.
        """
        self.open()
        chosen = range(self._pieces(batches, self._data))
        params = self._evaluated(state)
        parts: list[Any] = []
        for first in chosen[:: self._at_once]:
            numbers = self._numbers(first, self._at_once)
            # Pieces behind the last are rows of weight 0.
            rows = self._placed.rows(
                np.where(numbers < len(chosen) * self._size, numbers, len(self._data))
            )
            for part in parts[-1:]:
                part.result()
            if self.program is None:
                self._step = self._step.lower(params, state.rest, rows).compile()
            parts.append(self._dispatcher.submit(self._run, params, state.rest, rows))
        found = [part.result() for part in parts]
        sums = jax.tree.map(lambda *parts: sum(map(float, parts)), *found)
        total, count = sums.loss, sums.count
        if not count:
            return {}
        values = {"eval_loss": total / count}
        values |= {f"eval_{name}": each / count for name, each in sums.beside.items()}
        seen = sum(map(self._bytes, chosen))
        if seen:
            values["bits_per_byte"] = total / math.log(2) / seen
        return values

    def _evaluated(self, state: TrainState) -> dict[str, jax.Array]:
        """The parameters, averaged where an average is kept; then with scales of its own."""
        params, scales = averaged_params(state), self._assembly.buffers.scales
        averaged = {k for k in scales if k.removesuffix(SCALES) in state.ema}
        if not averaged:
            return params
        if self._scales is None:
            products = self._assembly.experiment.precision.products
            make = partial(scales_of_weights, scales=averaged, products=products)
            where = {k: params[k].sharding for k in averaged}
            self._scales = jax.jit(make, out_shardings=where)
        return params | jax.block_until_ready(self._scales(params))

    def wait(self) -> None:
        """Return when nothing is evaluated: an interrupt of a call leaves a program on its way."""
        self._dispatcher.submit(int).result()

    def open(self) -> None:
        """Open the held-out data. Raises ValueError when there is none, and where it does not have
        what evaluations read; later calls do nothing."""
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
    def program(self) -> jax.stages.Compiled | None:
        """The compiled evaluation of a piece; None before the first call."""
        return self._step if isinstance(self._step, jax.stages.Compiled) else None

    def compile(self, shardings: TrainState, compiler_options: dict[str, Any]) -> None:
        """Compile now, for a state that rests so, what the first call would."""
        self.open()
        abstract = self._assembly.abstract
        given = jax.tree.map(
            placed,
            (averaged_params(abstract), abstract.rest),
            (averaged_params(shardings), shardings.rest),
        )
        rows = self._placed.rows(self._numbers(0, self._at_once))
        self._step = self._step.lower(*given, rows).compile(compiler_options=compiler_options)

    def _run(self, *arguments: Any) -> Any:
        """One at a time: programs that do not wait for each other's results would run side by side,
        and simulated devices have no thread for each of each: their collectives hang."""
        return jax.block_until_ready(self._step(*arguments))

    def _pieces(self, batches: int | None, data: Any) -> int:
        """How many pieces of a microbatch's rows hold so many batches: they take its memory, and
        the rows are the same whatever a step cuts its batch into."""
        rows, micro = len(data), self._assembly.experiment.microbatches
        whole = -(-rows // self._size)
        pieces = whole if batches is None else min(whole, batches * micro)
        if pieces * self._size > rows or pieces % self._at_once:
            fields, batch = self._assembly.fields, self._assembly.largest_batch
            refuse_cut_off(rows, self._size * self._at_once, batch, fields, self._weights)
        return pieces

    def _refuse_without_weight(self, data: Any, rows: int) -> None:
        """Raises ValueError where none of the first `rows` of a split has a token that counts."""
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
        """The field by which rows that nobody asked for are given no weight."""
        described = self._assembly.description
        return WEIGHTS if described is None else described.weights

    def _numbers(self, piece: int, pieces: int = 1) -> np.ndarray:
        return np.arange(piece * self._size, (piece + pieces) * self._size)

    def _bytes_of(self, piece: int) -> float:
        """Bytes of text that the piece's targets stand for, weighted as their losses are."""
        table = getattr(self._data.dataset, "token_bytes", None)
        if table is None or not {"targets", WEIGHTS} <= self._assembly.fields.keys():
            return 0.0
        rows = self._data.rows(self._numbers(piece))
        return float(np.sum(table[rows["targets"]] * rows[WEIGHTS]))
