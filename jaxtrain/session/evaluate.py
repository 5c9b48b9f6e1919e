"""Held-out loss, in nats a token and bits a byte."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxtrain.cluster.agreement import share_failure
from jaxtrain.models.scales import scales_of_weights
from jaxtrain.notices import notice
from jaxtrain.quantization.delayed import SCALES
from jaxtrain.scoring.ended import WEIGHTS
from jaxtrain.session.held_out import HeldOutRows
from jaxtrain.session.held_out_sets import OWN, for_each, open_all
from jaxtrain.session.tasks import EvaluatedTasks, tasks_of
from jaxtrain.step.assembly import Assembly
from jaxtrain.step.layer_order import placed
from jaxtrain.step.state import TrainState, averaged_params
from jaxtrain.step.train_step import make_evaluation_step
from jaxtrain.tasks.running import OpenTasks

EvalMetrics = dict[str, float]


class Evaluator:
    """Evaluates on the same held-out rows every time: of the experiment's own data, and of
    `Evaluation.sets`, by one program. The loss does not depend on the mesh.

    Built at the first call, or by `open`: a run that never evaluates compiles nothing for it.
    """

    def __init__(self, assembly: Assembly, mesh: jax.sharding.Mesh, *, cache_dir: Path) -> None:
        self._assembly, self._mesh, self._cache_dir = assembly, mesh, cache_dir
        self._bytes = cache(self._bytes_of)  # the same rows every time: read for it once
        self._dispatcher = ThreadPoolExecutor(1)
        self._sets: dict[str, HeldOutRows] = {}
        self._tasks: EvaluatedTasks | None = None
        self._step: Any = None
        self._scales: Any = None

    def __call__(self, state: TrainState, *, batches: int | None) -> EvalMetrics:
        """Returns eval_loss (nats per weighted token) and, where tokens stand for bytes,
        bits_per_byte; none if no token has a weight. Values of a set have its name, as in
        eval_loss/code.

        batches: how many of the experiment's (largest) batch, from the start of the split; None for
        the whole split, each row once.
        """
        self.open()
        params, values = self.params(state), {}
        for name in self._sets:
            end = f"/{name}" if name else ""
            of_set = self._evaluate(name, params, state.model_state, batches)
            values |= {f"{metric}{end}": value for metric, value in of_set.items()}
        return values if self._tasks is None else values | self._tasks(params, state.model_state)

    def _evaluate(
        self, name: str, params: Any, model_state: Any, batches: int | None
    ) -> EvalMetrics:
        held_out, placed_rows = self._sets[name], self._placed[name]
        pieces = range(held_out.pieces(batches))
        parts: list[Any] = []
        end = len(held_out.numbers(0, len(pieces)))
        for first in pieces[:: held_out.at_once]:
            numbers = held_out.numbers(first, held_out.at_once)
            # Pieces after the last have rows of weight 0.
            rows = placed_rows.rows(np.where(numbers < end, numbers, len(held_out.split)))
            for part in parts[-1:]:
                part.result()
            if self.program is None:
                notice("compiling the evaluation")
                self._step = self._step.lower(params, model_state, rows).compile()
            parts.append(self._dispatcher.submit(self._run, params, model_state, rows))
        results = [part.result() for part in parts]
        sums = jax.tree.map(lambda *parts: sum(map(float, parts)), *results)
        total, count = sums.loss, sums.count
        if not count:
            return {}
        values = {"eval_loss": total / count}
        values |= {f"eval_{other}": value / count for other, value in sums.others.items()}
        text_bytes = sum(self._bytes(name, piece) for piece in pieces)
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

    def open(self, *, losses_alone: bool = False, tasks: OpenTasks | None = None) -> None:
        """Opens the held-out data, and the tasks unless it is for losses alone; later calls do
        nothing. tasks: the experiment's, None to open them. Raises ValueError if there is no data,
        or if it lacks fields that evaluations read; and where tasks cannot be evaluated."""
        self._opened()
        evaluation = self._assembly.experiment.evaluation
        has_tasks = evaluation is not None and evaluation.tasks is not None
        if has_tasks and not losses_alone and self._tasks is None:
            opened = tasks or share_failure(lambda: tasks_of(self._assembly.experiment))
            vocabulary = getattr(self._sets[OWN].split, "vocabulary", None)
            more = (self._assembly, self._mesh, vocabulary, self._alone)
            self._tasks = EvaluatedTasks(opened, *more)

    def _opened(self) -> dict[str, HeldOutRows]:
        if not self._sets:
            assembly = self._assembly
            splits = open_all(assembly.experiment, assembly.fields, self._cache_dir)
            self._sets = for_each(splits, partial(HeldOutRows, assembly))
            self._placed = {
                name: assembly.placed(rows.padded, self._mesh, rows.at_once)
                for name, rows in self._sets.items()
            }
            self._step = jax.jit(make_evaluation_step(assembly, self._mesh))
        return self._sets

    @property
    def splits(self) -> dict[str, Any]:
        """The held-out rows of each set; {} if they are not open."""
        return {name: rows.split for name, rows in self._sets.items()}

    @property
    def digests(self) -> dict[str, str | None]:
        """Names the rows of each set, None for those without a digest; {} if they are not open."""
        return {name: getattr(rows.split, "digest", None) for name, rows in self._sets.items()}

    @property
    def program(self) -> jax.stages.Compiled | None:
        """The compiled evaluation of a piece; None before the first call."""
        return self._step if isinstance(self._step, jax.stages.Compiled) else None

    @property
    def programs(self) -> list[jax.stages.Compiled | None]:
        """All programs of a call, None for those that are not compiled yet."""
        return [self.program] if self._tasks is None else [self.program, self._tasks.program]

    def compile(self, shardings: TrainState, compiler_options: dict[str, Any]) -> None:
        """Compiles now what the first call would compile, for a state with these shardings."""
        held_out, abstract = self._opened()[OWN], self._assembly.abstract
        arguments = jax.tree.map(
            placed,
            (averaged_params(abstract), abstract.model_state),
            (averaged_params(shardings), shardings.model_state),
        )
        rows = self._placed[OWN].rows(held_out.numbers(0, held_out.at_once))
        self._step = self._step.lower(*arguments, rows).compile(compiler_options=compiler_options)

    def _alone(self, program: Callable[..., Any], *arguments: Any) -> Any:
        """Returns the results of a program, which runs when no evaluation does."""
        run = partial(program, *arguments)
        return self._dispatcher.submit(lambda: jax.block_until_ready(run())).result()

    def _run(self, *arguments: Any) -> Any:
        """Runs one program at a time. Independent programs would run side by side, and simulated
        devices have too few threads for that: their collectives hang."""
        return jax.block_until_ready(self._step(*arguments))

    def _bytes_of(self, name: str, piece: int) -> float:
        """Bytes of text in the targets of a set's piece, weighted as their losses are."""
        held_out = self._sets[name]
        table = getattr(held_out.split, "token_bytes", None)
        if self._assembly.experiment.objective is not None:
            return 0.0  # a loss of pairs is none of text
        if table is None or not {"targets", WEIGHTS} <= self._assembly.fields.keys():
            return 0.0
        rows = held_out.padded.rows(held_out.numbers(piece))
        return float(np.sum(table[rows["targets"]] * rows[WEIGHTS]))
