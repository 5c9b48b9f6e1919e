"""Checks a loss of pairs against its data and its model."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from jaxtrain.experiment.resolve import Resolved

EXAMPLE = 'TextData(Preferences("pairs.jsonl"), ...)'


def preference_violations(resolved: Resolved) -> list[str]:
    """Returns a violation if pairs of answers come without a loss of pairs, or such a loss without
    pairs or with a model that cannot have it."""
    experiment, described = resolved.experiment, resolved.description
    data, path = experiment.data, "fine_tuning.preferences"
    of_pairs = getattr(data, "of_pairs", None)
    if experiment.objective is None:
        if not of_pairs:
            return []
        return [
            "data.source=Preferences(...) has rejected answers, which the loss of each token takes "
            "for good ones; use fine_tuning=FineTuning(start, preferences=DPO()), or of the chosen "
            'answers alone JsonLines(..., text_field="chosen", prompt_field="prompt")'
        ]
    violations = []
    if of_pairs is False:
        violations.append(
            f"{path} compares pairs of answers, and {type(getattr(data, 'source', data)).__name__} "
            f"has none; use data={EXAMPLE}, or preferences=None"
        )
    if described is None or "objective" not in described.can:
        violations.append(
            f"{path}: this model has no loss of pairs (its describe() names none of it in `can`); "
            "use preferences=None"
        )
    elif any(call.tallied for call in described.expert_calls):
        violations.append(
            f"{path}: routers with a `balance` weigh by the tokens of a loss, and a loss of pairs "
            "counts pairs; use balance=None in the mixtures"
        )
    return violations


def pair_rows_violations(rows: Mapping[str, np.ndarray]) -> list[str]:
    """Returns what keeps rows [rows, seq] of a user's own data from being pairs of answers."""
    reference, segments = rows["reference"], rows["segments"]
    shape, violations = rows["segments"].shape, []
    if reference.shape != shape or not np.issubdtype(reference.dtype, np.floating):
        violations.append(
            f"'reference' is {reference.dtype} of shape {reference.shape}; give the loss of each "
            f"target in the reference model, float32 {shape}"
        )
    elif not np.isfinite(reference).all():
        violations.append(
            "'reference' has values that are not finite; use 0 where there is no loss"
        )
    for row, numbers in enumerate(segments):
        changed = np.append(True, numbers[1:] != numbers[:-1])
        documents = numbers[changed & (numbers > 0)]
        expected = np.arange(1, len(documents) + 1)
        if len(documents) % 2 or not np.array_equal(documents, expected):
            return [
                *violations,
                f"'segments' of row {row} number its documents {documents.tolist()}; number "
                "answers 1 (chosen), 2 (rejected), 3, 4, ..., and padding 0",
            ]
    return violations
