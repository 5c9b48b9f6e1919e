"""Compares the experts that a layout chooses for tokens, before all other results.

A token near a tie between two experts may choose the other one if a sum is rounded differently, a
*flip*, and no bound holds for its later values. So a layout with flips runs again with its
reference's choices given (`moe.replay`), and that run is compared within the bounds. The layout's
own choices are recorded there too: each token's choice is judged after identical earlier ones, and
a flip that rounding does not explain is reported.
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
from jaxtrain.step.layer_order import params_in_natural_order, to_rest_order
from jaxtrain.step.state import TrainState

StepRouting = Mapping[int, Routing]
"""Routing of each layer in a step; layers below all trained leaves are left out."""


class Flips(NamedTuple):
    """count: choices, of a token in a layer in a step, that differ from the reference's. margin:
    the largest margin by which the reference preferred its own choice. location: the flip with that
    margin, in words."""

    count: int = 0
    margin: float = 0.0
    location: str = ""


def flips(routing: list[StepRouting], reference: list[StepRouting]) -> Flips:
    """Returns the flips of a run. The order of a token's experts counts too: capacity depends on
    it."""
    count, worst, location = 0, -1.0, ""
    for step, (choices, reference_choices) in enumerate(
        zip(routing, reference, strict=True), start=1
    ):
        for layer, (chosen, *_) in choices.items():
            expected = reference_choices[layer].chosen
            flipped = (chosen != expected).any(axis=-1)
            if not flipped.any():
                continue
            count += int(flipped.sum())
            margins = np.nan_to_num(reference_choices[layer].margins(chosen), nan=np.inf)
            token = int(np.argmax(np.where(flipped, margins, -1.0)))
            if margins[token] > worst:
                worst, pair = float(margins[token]), (chosen[token], expected[token])
                experts = " for ".join(str(expert_ids.tolist()) for expert_ids in pair)
                location = (
                    f"step {step} layer {layer} token {token}: experts {experts} of one device"
                )
    return Flips(count, max(worst, 0.0), location)


class Replays(NamedTuple):
    """The leaves of an assembly that record routing. shardings: the state's sharding at rest."""

    assembly: Assembly
    shardings: TrainState

    def read_routing(self, gradients: Mapping[str, Any]) -> StepRouting:
        """Returns the routing of a step. The step returns it as these leaves' gradients."""
        leaves, routing = self._leaves(), {}
        recorded = {k: np.asarray(gradients[k]) for k in leaves if k in gradients}
        for name, leaf in params_in_natural_order(self.assembly, recorded).items():
            replay, layers = leaves[name]
            of_layers = zip(layers, np.asarray(leaf).reshape(-1, replay.size), strict=True)
            routing |= {layer: replay.routing(row) for layer, row in of_layers}
        return routing

    def with_routing(self, state: TrainState, routing: StepRouting) -> TrainState:
        """Returns the state in which tokens use the experts of `routing`."""
        leaves = {}
        for name, (replay, layers) in self._leaves().items():
            if not routing.keys() >= set(layers):
                continue
            axes = self.assembly.places[name].axes
            values = [replay.value(routing[layer].chosen) for layer in layers]
            leaf = np.stack(values) if "layers" in axes else values[0]
            leaf = to_rest_order(self.assembly, leaf, axes)
            leaves[name] = jax.device_put(leaf, self.shardings.params[name])
        return replace(state, params={**state.params, **leaves})

    def _leaves(self) -> dict[str, tuple[Replay, range]]:
        """Returns each leaf's replay and its layers, by name."""
        described = self.assembly.description
        return {} if described is None else replays(described)


@dataclass(frozen=True)
class Numbered:
    """`data` with one more field, `places`: of each token its index among those of its batch, of
    `batch` rows."""

    data: Data
    batch: int

    def open(self, split: str, *, seed: int, cache_dir: Path) -> NumberedRows:
        return NumberedRows(self.data.open(split, seed=seed, cache_dir=cache_dir), self.batch)

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "data"), name)


class NumberedRows:
    """A dataset with the field `places`: consecutive rows have different places, up to a batch's
    rows."""

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
