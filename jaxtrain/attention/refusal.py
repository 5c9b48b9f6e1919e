"""How a kernel says that it cannot compute what it is asked for."""

from __future__ import annotations

import jax

from jaxtrain.collectives.vary import varying_axes


def refuse(kernel: str, problems: list[str]) -> None:
    """Raise ValueError with all of them, if there are any."""
    if problems:
        raise ValueError(
            f"attention kernel {kernel} cannot compute this: {'; '.join(problems)}; "
            "use kernel=Blockwise(), or None for the platform's choice"
        )


def pallas_violations(q: jax.Array) -> list[str]:
    """Why a Pallas kernel cannot be called where `q` is."""
    told = "shard_map has check_vma=True, which Pallas refuses; set it False"
    return [told] if varying_axes(q) else []
