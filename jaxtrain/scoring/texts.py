"""Scores of texts, several in a row: of each token its log-probability after those before it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxtrain.data.whole import RowPlan, plan_rows
from jaxtrain.losses.token_scores import MARKS
from jaxtrain.mesh.sharding import named_sharding
from jaxtrain.notices import notice
from jaxtrain.operations.block import mixtures
from jaxtrain.scoring.ended import WEIGHTS, Ended
from jaxtrain.scoring.score_step import make_token_step
from jaxtrain.step.assembly import Assembly, assemble
from jaxtrain.step.pipeline import evaluated_at_once

FIELDS: Mapping[str, Any] = {
    "tokens": np.int32,
    "targets": np.int32,
    WEIGHTS: np.float32,
    "segments": np.int32,
    "positions": np.int32,
}
"""Fields of rows of texts, [rows, seq]."""


class TokenScore(NamedTuple):
    """Scores of a text's ids after the first. log_probs: natural logarithms, fp32. likeliest: True
    if no other id was likelier."""

    log_probs: np.ndarray
    likeliest: np.ndarray


class TextRows:
    """A dataset of texts, packed best fit: each is whole and sees itself alone. texts: of 1 to
    seq + 1 ids. apart: each has a row of its own."""

    isolate_documents = True

    def __init__(self, texts: Sequence[Sequence[int]], seq: int, *, apart: bool = False) -> None:
        self.texts, self.seq = texts, seq
        places = np.array([len(text) - 1 for text in texts], int)
        self._plan = _one_a_row(places, seq) if apart else plan_rows(places, seq=seq)
        self._arrays = self._packed()

    def open(self, split: str, *, seed: int, cache_dir: Path) -> TextRows:
        return self

    def __len__(self) -> int:
        return self._plan.rows

    def rows(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        return {name: values[indices] for name, values in self._arrays.items()}

    def _packed(self) -> dict[str, np.ndarray]:
        plan = self._plan
        shape = max(plan.rows, 1), self.seq  # a row of padding tells what fields there are
        arrays = {
            name: np.zeros(shape, dtype) for name, dtype in {**FIELDS, MARKS: np.float32}.items()
        }
        flat = {name: values.reshape(-1) for name, values in arrays.items()}
        documents = np.zeros(plan.rows, int)
        for text, begin, length in zip(plan.documents, plan.begins, plan.lengths, strict=True):
            place, ids = slice(begin, begin + length), self.texts[text]
            documents[begin // self.seq] += 1
            flat["tokens"][place], flat["targets"][place] = ids[:-1], ids[1:]
            flat[WEIGHTS][place] = 1
            flat["segments"][place] = documents[begin // self.seq]
            flat["positions"][place] = np.arange(length)
        return arrays

    def of_texts(self, rows: np.ndarray) -> list[np.ndarray]:
        """Returns the parts of an array [rows, seq] that are each text's."""
        flat, parts = rows.reshape(-1), [np.empty(0, rows.dtype)] * len(self.texts)
        for text, begin, length in zip(
            self._plan.documents, self._plan.begins, self._plan.lengths, strict=True
        ):
            parts[text] = flat[begin : begin + length]
        return parts


def _one_a_row(places: np.ndarray, seq: int) -> RowPlan:
    """Returns a plan of a row for each document that takes places."""
    documents = np.flatnonzero(places)
    begins = np.arange(len(documents)) * seq
    return RowPlan(documents, begins, places[documents], len(documents))


def run_now(program: Callable[..., Any], *arguments: Any) -> Any:
    """Returns the results of a program."""
    return program(*arguments)


class TextScorer:
    """Scores texts by a model on a mesh. assembly: with the fields of `TextRows` in its batches.
    All processes call it with the same texts. Raises ValueError for a model whose `leave` does not
    honour `objective`. program: compiled at the first call. run: runs a program with its arguments,
    and returns its results."""

    def __init__(
        self, assembly: Assembly, mesh: jax.sharding.Mesh, run: Callable[..., Any] = run_now
    ) -> None:
        described = assembly.description
        if described is None or "objective" not in described.can:
            raise ValueError(
                f"a {type(assembly.experiment.model).__name__} computes its loss itself, so which "
                "ids are likeliest is not known: texts are scored by what `jaxtrain.load` returns, "
                "or give its `leave` an `objective` (docs/models.md)"
            )
        self._assembly, self._mesh, self._run = assembly, mesh, run
        # Tokens of a row compete for places.
        calls = [call for block in described.layers for call in mixtures(block)]
        self._apart = any(call.routing_group is not None for call in calls)
        self._at_once = evaluated_at_once(assembly)
        self._size = self._at_once * assembly.largest_batch // assembly.experiment.microbatches
        step = make_token_step(assembly, mesh, WEIGHTS)
        self._step = jax.jit(step, out_shardings=named_sharding(mesh, ()))
        self.program: jax.stages.Compiled | None = None

    def __call__(
        self,
        params: Mapping[str, Any],
        model_state: Mapping[str, Any],
        texts: Sequence[Sequence[int]],
    ) -> list[TokenScore]:
        """Returns the scores of texts of 1 to `seq` + 1 ids."""
        rows = TextRows(texts, self._assembly.experiment.data.seq, apart=self._apart)
        if len(rows) == 0:
            return [TokenScore(np.empty(0, np.float32), np.empty(0, bool)) for _ in texts]
        placed = self._assembly.placed(Ended(rows), self._mesh, self._at_once)
        parts: list[list[np.ndarray]] = [[], []]
        for first in range(0, len(rows), self._size):
            numbers = np.minimum(np.arange(first, first + self._size), len(rows))
            arguments = (params, model_state, placed.rows(numbers))
            if self.program is None:
                notice("compiling the scores of texts")
                self.program = self._step.lower(*arguments).compile()
            results = self._run(self.program, *arguments)
            for part, values in zip(parts, results, strict=True):
                part.append(np.asarray(values).reshape(self._size, -1))
        order = self._assembly.row_orders.get(WEIGHTS)
        losses, likeliest = (np.concatenate(part)[: len(rows)] for part in parts)
        if order is not None:
            losses, likeliest = (a[:, np.argsort(order)] for a in (losses, likeliest))
        of_each = zip(rows.of_texts(losses), rows.of_texts(likeliest), strict=True)
        return [TokenScore(-loss, mark > 0) for loss, mark in of_each]


def assembled_for(assembly: Assembly, data: Any, fields: Any) -> Assembly:
    """Returns the assembly of the same model for other rows, with the loss of each token. fields:
    of their batches. Raises ValueError where the model's kernels do not take these rows."""
    e = assembly.experiment
    tuning = None if e.fine_tuning is None else replace(e.fine_tuning, preferences=None)
    plain = replace(e, fine_tuning=tuning, data=data, evaluation=None, checkpoints=None)
    return assemble(plain, assembly.spec, fields)
