"""Two steps of products in 8 bits on a mesh, and what is the same on every other one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

import jaxtrain
from jaxtrain.models.buffers import without_buffers
from jaxtrain.nn.stack import LayerLoop


def run(opened: Any, experiment: Any, axes: dict[str, int], how: dict[str, Any]) -> Any:
    """Losses of two steps, the parameters after them, as one vector, and leaves of scales."""
    sharding = jaxtrain.fsdp() | jaxtrain.tensor()
    if how.get("loop") == LayerLoop(remat="dots_and_attention"):
        sharding = sharding.whole_until_update()
    given = replace(experiment, execution=jaxtrain.Execution(**how), sharding=sharding)
    session = opened(given, **axes)
    losses = [float(session.step(session.loader.next()[1])["loss"]) for _ in range(2)]
    whole = session.state.params
    if "stage" in axes:
        layout = session.assembly.on_stages.layout
        natural = lambda k, p: layout.from_slots(p) if k.startswith("period") else p  # noqa: E731
        whole = {k: natural(k, p) for k, p in whole.items()}
    params = without_buffers(whole, session.assembly.buffers)
    scales = {k: np.asarray(leaf) for k, leaf in whole.items() if k not in params}
    return np.array(losses), np.concatenate([np.ravel(params[k]) for k in sorted(params)]), scales
