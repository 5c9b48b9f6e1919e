"""A saved run as a function that scores texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxtrain.experiment.reading import Trust
from jaxtrain.inspection.opened import mesh_spec, stored_model
from jaxtrain.mesh.mesh import MeshSpec
from jaxtrain.scoring.texts import TextRows, TextScorer, TokenScore
from jaxtrain.session.evaluate import Evaluator
from jaxtrain.step.layer_order import AtRest

Scorer = Callable[[Sequence[Sequence[int]]], list[TokenScore]]
"""Scores texts of 1 to seq + 1 ids, of which several share a row."""


def run_scorer(
    run: str | Path,
    seq: int,
    *,
    mesh: MeshSpec | str | Path | None = None,
    averaged: bool | None = None,
    microbatches: int | None = None,
    trust: Trust = (),
) -> Scorer:
    """Returns the model of a saved run as a scorer, with rows of `seq` tokens. Other arguments and
    errors as of `score`; also raises ValueError for a model that computes its loss itself."""
    if jax.process_count() > 1:
        raise ValueError("texts are scored by one process, and this is one of several")
    rows = TextRows([], seq)
    more: Any = dict(averaged=averaged, microbatches=microbatches, trust=trust)
    stored = stored_model(run, rows, **more)
    assembly, devices = stored.on(mesh_spec(mesh), rows)
    scorer = TextScorer(assembly, devices)
    state = stored.state(AtRest(assembly, devices))
    params = Evaluator(assembly, devices, cache_dir=Path()).params(state)

    def score(texts: Sequence[Sequence[int]]) -> list[TokenScore]:
        return scorer(params, state.model_state, texts)

    return score
