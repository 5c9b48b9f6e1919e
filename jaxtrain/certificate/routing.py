"""Which experts tokens go through: a layout's choices are compared before anything else is.

A token near a tie between two experts takes the other one where a sum is rounded another way, a
*flip*, and no bound holds for what becomes of it. So a layout that chose otherwise than its
reference is run again with the reference's choices given (`moe.replay`), and that run is held to
the bounds. What it would have chosen is kept there too: each token's choice is judged after the
same ones before it, and one that rounding does not explain is told.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxtrain.data.dataset import Batch, Data, Dataset
from jaxtrain.models.routers import replays
from jaxtrain.moe.replay import Replay, Routing
from jaxtrain.step.assembly import Assembly
from jaxtrain.step.layer_order import params_in_natural_order
from jaxtrain.step.state import TrainState

StepRouting = Mapping[int, Routing]
"""Of each layer in a step; below all that is trained nothing is kept."""


class Flips(NamedTuple):
    """count: choices of a token in a layer in a step that were not the reference's. margin: by how
    much the reference preferred its own, the most of all; where: that one, in words."""

    count: int = 0
    margin: float = 0.0
    where: str = ""


def flips(found: list[StepRouting], reference: list[StepRouting]) -> Flips:
    """Those of a run. The order of a token's experts counts too: capacity hangs on it."""
    count, worst, where = 0, -1.0, ""
    for step, (mine, own) in enumerate(zip(found, reference, strict=True), start=1):
        for layer, (chosen, *_) in mine.items():
            wanted = own[layer].chosen
            elsewhere = (chosen != wanted).any(axis=-1)
            if not elsewhere.any():
                continue
            count += int(elsewhere.sum())
            margins = np.nan_to_num(own[layer].margins(chosen), nan=np.inf)
            token = int(np.argmax(np.where(elsewhere, margins, -1.0)))
            if margins[token] > worst:
                worst, pair = float(margins[token]), (chosen[token], wanted[token])
                experts = " for ".join(str(each.tolist()) for each in pair)
                where = f"step {step} layer {layer} token {token}: experts {experts} of one device"
    return Flips(count, max(worst, 0.0), where)


class Replays(NamedTuple):
    """The leaves of an assembly in which routing is kept, in a state that rests as `where` says."""

    assembly: Assembly
    where: TrainState

    def kept(self, gradients: Mapping[str, Any]) -> StepRouting:
        """What came as their gradients in a step."""
        of, found = self._leaves(), {}
        there = {k: np.asarray(gradients[k]) for k in of if k in gradients}
        for name, leaf in params_in_natural_order(self.assembly, there).items():
            replay, layers = of[name]
            of_layers = zip(layers, np.asarray(leaf).reshape(-1, replay.size), strict=True)
            found |= {layer: replay.routing(each) for layer, each in of_layers}
        return found

    def given(self, state: TrainState, routing: StepRouting) -> TrainState:
        """The state in which tokens go where `routing` has them."""
        leaves, pipeline = {}, self.assembly.pipeline
        for name, (replay, layers) in self._leaves().items():
            if not routing.keys() >= set(layers):
                continue
            stacked = "layers" in self.assembly.places[name].axes
            values = [replay.value(routing[layer].chosen) for layer in layers]
            leaf = np.stack(values) if stacked else values[0]
            if stacked and pipeline is not None:
                leaf = pipeline.layout.to_slots(leaf)
            leaves[name] = jax.device_put(leaf, self.where.params[name])
        return replace(state, params={**state.params, **leaves})

    def _leaves(self) -> dict[str, tuple[Replay, range]]:
        """Each by its name, and of which layers it is."""
        described = self.assembly.description
        return {} if described is None else replays(described)


@dataclass(frozen=True)
class Numbered:
    """`data` whose rows say of each token which place it has in a batch of `batch` rows."""

    data: Data
    batch: int

    def open(self, split: str, *, seed: int, cache_dir: Path) -> NumberedRows:
        return NumberedRows(self.data.open(split, seed=seed, cache_dir=cache_dir), self.batch)

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "data"), name)


class NumberedRows:
    """A dataset with the field `places`: rows that follow one another have other ones, up to as
    many as a batch has."""

    def __init__(self, dataset: Dataset, batch: int) -> None:
        self._dataset, self._batch = dataset, batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dataset, name)

    def __len__(self) -> int:
        return len(self._dataset)

    def rows(self, indices: np.ndarray) -> Batch:
        seq = self._dataset.seq
        places = (indices % self._batch)[:, None] * seq + np.arange(seq)
        return {**self._dataset.rows(indices), "places": places.astype(np.int32)}
