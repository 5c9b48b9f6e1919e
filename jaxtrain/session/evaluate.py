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
from jaxtrain.session.held_out import HeldOutRows, open_held_out
from jaxtrain.session.rows import WEIGHTS
from jaxtrain.step.assembly import Assembly
from jaxtrain.step.layer_order import placed
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
        self._held_out: HeldOutRows | None = None
        self._step: Any = None
        self._scales: Any = None

    def __call__(self, state: TrainState, *, batches: int | None) -> Values:
        """Returns eval_loss (nats per weighted token) and, where tokens stand for bytes,
        bits_per_byte; {} if no token has a weight.

        batches: how many of the experiment's (largest) batch, from the start of the split; None for
        the whole split, each row once.
        """
        held_out = self._opened()
        pieces = range(held_out.pieces(batches))
        params = self.params(state)
        parts: list[Any] = []
        end = len(held_out.numbers(0, len(pieces)))
        for first in pieces[:: held_out.at_once]:
            numbers = held_out.numbers(first, held_out.at_once)
            # Pieces after the last have rows of weight 0.
            rows = self._placed.rows(np.where(numbers < end, numbers, len(held_out.split)))
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
        values |= {f"eval_{name}": value / count for name, value in sums.others.items()}
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
        self._opened()

    def _opened(self) -> HeldOutRows:
        if self._held_out is None:
            assembly = self._assembly
            split = open_held_out(assembly.experiment, assembly.fields, self._cache_dir)
            self._held_out = HeldOutRows(assembly, split)
            padded, at_once = self._held_out.padded, self._held_out.at_once
            self._placed = assembly.placed(padded, self._mesh, at_once)
            self._step = jax.jit(make_evaluation_step(assembly, self._mesh))
        return self._held_out

    @property
    def digest(self) -> str | None:
        """Names the held-out rows; None if they are not open, or have no digest."""
        split = None if self._held_out is None else self._held_out.split
        return getattr(split, "digest", None)

    @property
    def program(self) -> jax.stages.Compiled | None:
        """The compiled evaluation of a piece; None before the first call."""
        return self._step if isinstance(self._step, jax.stages.Compiled) else None

    def compile(self, shardings: TrainState, compiler_options: dict[str, Any]) -> None:
        """Compiles now what the first call would compile, for a state with these shardings."""
        held_out, abstract = self._opened(), self._assembly.abstract
        arguments = jax.tree.map(
            placed,
            (averaged_params(abstract), abstract.rest),
            (averaged_params(shardings), shardings.rest),
        )
        rows = self._placed.rows(held_out.numbers(0, held_out.at_once))
        self._step = self._step.lower(*arguments, rows).compile(compiler_options=compiler_options)

    def _run(self, *arguments: Any) -> Any:
        """Runs one program at a time. Independent programs would run side by side, and simulated
        devices have too few threads for that: their collectives hang."""
        return jax.block_until_ready(self._step(*arguments))

    def _bytes_of(self, piece: int) -> float:
        """Bytes of text in the piece's targets, weighted as their losses are."""
        held_out = self._opened()
        table = getattr(held_out.split, "token_bytes", None)
        if table is None or not {"targets", WEIGHTS} <= self._assembly.fields.keys():
            return 0.0
        rows = held_out.padded.rows(held_out.numbers(piece))
        return float(np.sum(table[rows["targets"]] * rows[WEIGHTS]))
