"""Errors of a kernel that cannot compute a problem."""

from __future__ import annotations

import jax

from jaxtrain.attention.online_softmax import Scoring
from jaxtrain.collectives.vary import varying_axes


def refuse(kernel: str, problems: list[str]) -> None:
    """Raise ValueError with all of them, if there are any."""
    if problems:
        raise ValueError(
            f"attention kernel {kernel} cannot compute this: {'; '.join(problems)}; "
            "use kernel=Blockwise(), or None for the platform's choice"
        )


def function_violations(scoring: Scoring) -> list[str]:
    """Returns the reason why a fused kernel cannot compute scores that have a function."""
    function = scoring.function
    return [] if function is None else [f"a function of scores, {function}, is not supported"]


def pallas_violations(q: jax.Array) -> list[str]:
    """Returns the reason why a Pallas kernel cannot be called on `q` inside this shard_map."""
    reason = "shard_map has check_vma=True, which Pallas refuses; set it False"
    return [reason] if varying_axes(q) else []
