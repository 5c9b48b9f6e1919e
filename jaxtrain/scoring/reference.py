"""Losses of tokens in the model that a run began with, which a loss of pairs compares with.

They are computed once, before the first step, and kept in the run directory: no second copy of the
model is in memory, no step computes it again, and a resumed run has them where the weights that it
began with are gone. Rows that come later, such as another held-out set, need that model again. So
the greatest magnitude of each of its leaves is kept, the same bits on every mesh: a model that has
others is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.checkpoint.run_config import REFERENCE, REFERENCE_KIND
from jaxtrain.cluster.agreement import all_gather_text, share_failure
from jaxtrain.files.array_file import ArrayFile, DamagedFile, open_arrays, whole, write_arrays
from jaxtrain.mesh.sharding import named_sharding
from jaxtrain.notices import Share, notice
from jaxtrain.scoring.ended import Ended
from jaxtrain.scoring.score_step import make_score_step
from jaxtrain.scoring.texts import assembled_for
from jaxtrain.step.assembly import Assembly
from jaxtrain.step.pipeline import evaluated_at_once
from jaxtrain.step.state import TrainState

WEIGHTS_FILE = "weights"
"""What tells the model from others: the greatest magnitude of each of its leaves."""
LEAVES, STEP = "leaves", "step"
"""In that file: the leaves' names, and the step of the run that `FineTuning.start` names, null for
another start."""


class ReferenceFile(NamedTuple):
    """A file of a run directory: its name, and what it has. is_there: it was read from there."""

    name: str
    meta: Mapping[str, Any]
    arrays: Mapping[str, np.ndarray]
    is_there: bool = False


class ReferenceSource(NamedTuple):
    """Where losses are from. folder: it has some, None for none. is_own: it is the run's own.
    model: returns the state that the run began with, from this step of the run that
    `FineTuning.start` names, None for the step that it names: to compute losses that no folder has.
    step: that step, None if it is none of a run or is to be read."""

    folder: Path | None
    is_own: bool
    model: Callable[[int | None], TrainState]
    step: int | None


def set_references(
    assembly: Assembly, mesh: jax.sharding.Mesh, splits: Mapping[str, Any], source: ReferenceSource
) -> list[ReferenceFile]:
    """Gives each split that has no reference losses of its own those of the model that the run
    began with. Returns the files that the run keeps, for `keep_references`. splits: by names for
    messages. All processes call it. Raises ValueError where losses are neither kept nor to be
    computed."""
    model: ReferenceModel | None = None
    files: list[ReferenceFile] = []
    for name, dataset in splits.items():
        if not hasattr(dataset, "set_reference"):
            continue  # a user's own rows, which have them
        losses = None if source.folder is None else _read_together(source.folder, dataset)
        is_there = losses is not None and source.is_own
        if losses is None:
            model = model or _model(assembly, mesh, source, name)
            losses = model.losses(dataset, name)
        arrays, meta = {"losses": losses}, {"rows": dataset.content}
        files.append(ReferenceFile(_name(dataset), meta, arrays, is_there))
        dataset.set_reference(losses)
    weights = None if source.folder is None else _opened(source.folder / WEIGHTS_FILE)
    if weights is not None:
        files.append(ReferenceFile(WEIGHTS_FILE, weights.meta, weights.arrays, source.is_own))
    elif source.folder is None and model is not None:
        files.append(model.weights_file(source.step))
    return files


def keep_references(run: Path, files: Iterable[ReferenceFile]) -> None:
    """Writes files into a run directory, which this run holds, but for those that are there. For
    one process."""
    for name, meta, arrays, is_there in files:
        path = run / REFERENCE / name
        if not is_there or not path.exists():
            specs = {key: whole(arrays[key]) for key in sorted(arrays)}
            write_arrays(path, kind=REFERENCE_KIND, meta=meta, arrays=specs)


def read_references(run: Path, splits: Mapping[str, Any]) -> None:
    """Gives each split the reference losses that a run keeps. Raises ValueError where it keeps
    none of these rows."""
    for dataset in splits.values():
        if not hasattr(dataset, "set_reference"):
            continue
        losses = _read(run / REFERENCE, dataset)
        if losses is None:
            raise ValueError(
                f"{run} keeps no losses of these pairs in the model that it began with: "
                "a run's own pairs are evaluated without other data; of other texts, such as "
                'JsonLines("pairs.jsonl", text_field="chosen", prompt_field="prompt"), the loss of '
                "each token is"
            )
        dataset.set_reference(losses)


def _model(
    assembly: Assembly, mesh: jax.sharding.Mesh, source: ReferenceSource, name: str
) -> ReferenceModel:
    """Returns the model that the run began with. Raises ValueError where it is not there, or
    another."""
    if source.folder is None:
        return ReferenceModel(assembly, mesh, source.model(None))
    folder, anew = source.folder, "or begin anew, by --fresh or another --name"
    needs = f"the losses of {name} rows in the model that the run began with are not in {folder}"
    lost = f"{needs}; bring it back from a copy, {anew}"
    weights = share_failure(partial(_weights, folder, lost))
    try:
        state = source.model(weights.meta.get(STEP))
    except ValueError as error:
        raise ValueError(f"{needs}, and that model is not there: {error}") from error
    model = ReferenceModel(assembly, mesh, state)
    found = model.weights_file(None)
    same = np.array_equal(found.arrays["greatest"], weights.arrays["greatest"])
    if not same or found.meta[LEAVES] != weights.meta[LEAVES]:
        raise ValueError(
            f"{needs}, and what fine_tuning.start names is another model now; bring back the "
            f"weights that the run began with, {anew}"
        )
    return model


def _weights(folder: Path, otherwise: str) -> ArrayFile:
    """Returns what tells the model from others. Raises ValueError with `otherwise` where it is not
    kept."""
    file = _opened(folder / WEIGHTS_FILE)
    if file is None:
        raise ValueError(otherwise)
    return file


class ReferenceModel:
    """The model that a run began with, and the program that gives the loss of each token."""

    def __init__(self, assembly: Assembly, mesh: jax.sharding.Mesh, state: TrainState) -> None:
        self._assembly, self._mesh, self._state = _of_tokens(assembly), mesh, state
        self._weights = self._assembly.described.weights
        at_once = evaluated_at_once(self._assembly)
        experiment = self._assembly.experiment
        self._size = at_once * self._assembly.largest_batch // experiment.microbatches

    @cached_property
    def _step(self) -> Any:
        step = make_score_step(self._assembly, self._mesh, self._weights)
        return jax.jit(step, out_shardings=named_sharding(self._mesh, ()))

    def _losses_of(self, rows: Any, numbers: np.ndarray) -> np.ndarray:
        """Returns the losses of rows by their numbers, [rows, seq]."""
        assembly = self._assembly
        placed = assembly.placed(rows, self._mesh, evaluated_at_once(assembly))
        losses = self._step(self._state.params, self._state.model_state, placed.rows(numbers))
        losses = np.asarray(losses).reshape(len(numbers), -1)
        order = assembly.row_orders.get(self._weights)
        return losses if order is None else losses[:, np.argsort(order)]

    def losses(self, dataset: Any, name: str) -> np.ndarray:
        """Returns the loss of each target of a split, float32 [addresses], at the address of the
        target; 0 at other addresses. name: of the split, for a notice."""
        values, count = np.zeros(dataset.addresses, np.float32), len(dataset)
        notice(f"computing the losses of {count:,} {name} rows in the first model")
        tell, rows = Share("computing"), Ended(dataset, self._weights)
        for first in range(0, count, self._size):
            numbers = np.arange(first, first + self._size)
            real = numbers < count
            losses = self._losses_of(rows, np.minimum(numbers, count))[real]
            addresses = dataset.targets_at(numbers[real])
            values[addresses[addresses >= 0]] = losses[addresses >= 0]
            tell(min(first + self._size, count), count)
        return values

    def weights_file(self, step: int | None) -> ReferenceFile:
        """Returns the file that tells this model from others. step: as in `ReferenceSource`."""
        params = self._state.params
        greatest = jax.jit(
            lambda params: {k: jnp.max(jnp.abs(v)).astype(jnp.float32) for k, v in params.items()},
            out_shardings=named_sharding(self._mesh, ()),
        )(params)
        names = sorted(params)
        arrays = {"greatest": np.array([np.asarray(greatest[name]) for name in names])}
        return ReferenceFile(WEIGHTS_FILE, {LEAVES: names, STEP: step}, arrays)


class _Rows:
    """Data of an experiment that opens none: its rows come from elsewhere."""

    isolate_documents = True

    def __init__(self, seq: int) -> None:
        self.seq = seq

    def open(self, split: str, *, seed: int, cache_dir: Path) -> Any:
        raise NotImplementedError


def _of_tokens(assembly: Assembly) -> Assembly:
    """Returns the assembly with the loss of each token in place of that of pairs."""
    data = _Rows(assembly.experiment.data.seq)
    return replace(assembled_for(assembly, data, {}), fields=assembly.fields)


def _name(dataset: Any) -> str:
    return f"{dataset.content[:24]}.losses"


def _opened(path: Path) -> ArrayFile | None:
    """Returns a file of arrays, None if it is not there or damaged."""
    try:
        return open_arrays(path, kind=REFERENCE_KIND, verify=True)
    except FileNotFoundError:
        return None
    except DamagedFile as error:
        notice(f"NOTE {str(error).partition(';')[0]}: it is not used")
        return None


def _read(folder: Path, dataset: Any) -> np.ndarray | None:
    """Returns the losses of a split in a folder; None if it has none of these rows."""
    file = _opened(folder / _name(dataset))
    losses = None if file is None else file.arrays["losses"]
    return losses if losses is not None and len(losses) == dataset.addresses else None


def _read_together(folder: Path, dataset: Any) -> np.ndarray | None:
    """Returns what `_read` does, None unless every process has it."""
    losses = _read(folder, dataset)
    texts = all_gather_text(json.dumps(losses is not None))
    return losses if all(map(json.loads, texts)) else None
