"""A saved run as a function that scores texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxtrain.experiment.reading import Trust
from jaxtrain.experiment.stored import stored_field
from jaxtrain.inspection.opened import directory_of, mesh_spec, row_length, stored_model
from jaxtrain.mesh.mesh import MeshSpec
from jaxtrain.scoring.texts import TextRows, TextScorer, TokenScore
from jaxtrain.session.evaluate import Evaluator
from jaxtrain.step.layer_order import AtRest


class RunScorer(NamedTuple):
    """score: returns the scores of texts of 2 to `seq` + 1 ids, several in a row."""

    score: Callable[[Sequence[Sequence[int]]], list[TokenScore]]
    seq: int


def run_scorer(
    run: str | Path,
    *,
    mesh: MeshSpec | str | Path | None = None,
    averaged: bool | None = None,
    microbatches: int | None = None,
    trust: Trust = (),
) -> RunScorer:
    """Returns the model of a saved run as a scorer. Arguments and errors as of `score`; also raises
    ValueError for a model that computes its loss itself."""
    if jax.process_count() > 1:
        raise ValueError("texts are scored by one process, and this is one of several")
    path, _ = directory_of(run)
    seq = row_length(stored_field(path, "data", trust=trust), path)
    rows = TextRows([], seq)
    more: Any = dict(averaged=averaged, microbatches=microbatches, trust=trust)
    stored = stored_model(run, rows, **more)
    assembly, devices = stored.on(mesh_spec(mesh), rows)
    scorer = TextScorer(assembly, devices)
    state = stored.state(AtRest(assembly, devices))
    params = Evaluator(assembly, devices, cache_dir=Path()).params(state)

    def score(texts: Sequence[Sequence[int]]) -> list[TokenScore]:
        return scorer(params, state.model_state, texts)

    return RunScorer(score, seq)
