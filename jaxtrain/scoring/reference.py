"""Losses of tokens in the model that a run began with, which a loss of pairs compares with.

They are computed once, before the first step, and kept in the run directory: no second copy of the
model is in memory, no step computes it again, and a resumed run has them where the weights that it
began with are gone. Rows that come later, such as another held-out set, need that model again. So a
row is kept with its losses: a model that gives it others is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxtrain.checkpoint.run_config import REFERENCE, REFERENCE_KIND
from jaxtrain.cluster.agreement import all_gather_text, from_first, share_failure
from jaxtrain.files.array_file import ArrayFile, DamagedFile, open_arrays, whole, write_arrays
from jaxtrain.mesh.sharding import named_sharding
from jaxtrain.notices import Share, notice
from jaxtrain.optim.precision import BOUNDS
from jaxtrain.scoring.ended import Ended
from jaxtrain.scoring.score_step import make_score_step
from jaxtrain.step.assembly import Assembly, assemble
from jaxtrain.step.pipeline import evaluated_at_once
from jaxtrain.step.state import TrainState

FIRST_ROW = "first_row"
"""A row of the training data, by field, and its losses: what tells the model from others."""
STEP = "step"
"""In that file: the step of the run that `FineTuning.start` names, null for another start."""
LEAST_APART = 1e-4
"""Losses of one model on two meshes may be so far apart, or as far as `BOUNDS` are: by their root
mean squares."""


class ReferenceSource(NamedTuple):
    """Where losses are from. read: a folder that has some, None for none. write: the folder of this
    run, None if nothing is kept. model: returns the state that the run began with, from this step
    of the run that `FineTuning.start` names, None for the step that it names: to compute those that
    no folder has. step: that step, None if it is none of a run or is to be read."""

    read: Path | None
    write: Path | None
    model: Callable[[int | None], TrainState]
    step: int | None


def set_references(
    assembly: Assembly, mesh: jax.sharding.Mesh, splits: Mapping[str, Any], source: ReferenceSource
) -> None:
    """Gives each split that has no reference losses of its own those of the model that the run
    began with. splits: by names for messages, first that of training. All processes call it. Raises
    ValueError where they are neither kept nor to be computed."""
    needed = {name: data for name, data in splits.items() if hasattr(data, "set_reference")}
    model: ReferenceModel | None = None
    for name, dataset in needed.items():
        losses = None if source.read is None else _read_together(source.read, dataset)
        is_new = losses is None
        if losses is None:
            if model is None:
                model = _model(assembly, mesh, source, name)
            losses = model.losses(dataset, name)
        if source.write is not None and (is_new or source.write != source.read):
            meta, arrays = {"rows": dataset.content}, {"losses": losses}
            _write_first(_path(source.write, dataset), meta, arrays)
        dataset.set_reference(losses)
    if source.write is None or source.write == source.read or not needed:
        return
    if source.read is not None:
        from_first(partial(_copy_first_row, source.read, source.write))
    elif model is not None:
        row = model.first_row(next(iter(needed.values())))
        _write_first(source.write / FIRST_ROW, {STEP: source.step}, row)


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
    if source.read is None:
        return ReferenceModel(assembly, mesh, source.model(None))
    folder, anew = source.read, "or begin anew, by --fresh or another --name"
    needs = f"the losses of {name} rows in the model that the run began with are not in {folder}"
    first = share_failure(
        partial(_first_row, folder, f"{needs}; bring it back from a copy, {anew}")
    )
    seq, stored_seq = assembly.experiment.data.seq, first.arrays["losses"].shape[1]
    if seq != stored_seq:
        raise ValueError(
            f"{needs}, and the row that tells that model from others has {stored_seq} tokens, not "
            f"data.seq={seq}; use seq={stored_seq}, {anew}"
        )
    try:
        state = source.model(first.meta.get(STEP))
    except ValueError as error:
        raise ValueError(f"{needs}, and that model is not there: {error}") from error
    model = ReferenceModel(assembly, mesh, state)
    if not model.gives(first.arrays):
        raise ValueError(
            f"{needs}, and what fine_tuning.start names is another model now: it gives a row other "
            f"losses; bring back the weights that the run began with, {anew}"
        )
    return model


def _first_row(folder: Path, otherwise: str) -> ArrayFile:
    """Returns what tells the model from others. Raises ValueError with `otherwise` where it is not
    kept."""
    file = _opened(folder / FIRST_ROW)
    if file is None:
        raise ValueError(otherwise)
    return file


def _copy_first_row(folder: Path, into: Path) -> None:
    file = _opened(folder / FIRST_ROW)
    if file is not None:
        _write(into / FIRST_ROW, file.meta, file.arrays)


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
        losses = self._step(self._state.params, self._state.rest, placed.rows(numbers))
        losses = np.asarray(losses).reshape(len(numbers), -1)
        order = assembly.row_orders.get(self._weights)
        return losses if order is None else losses[:, np.argsort(order)]

    def losses(self, dataset: Any, name: str) -> np.ndarray:
        """Returns the losses of the targets of a split, by their addresses."""
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

    def first_row(self, dataset: Any) -> dict[str, np.ndarray]:
        """Returns the first row of a split by field, [1, seq], and its `losses`."""
        row = dataset.rows(np.zeros(1, np.int64))
        return {**row, "losses": self._losses_of(_OneRow(row), np.zeros(self._size, int))[:1]}

    def gives(self, first_row: Mapping[str, np.ndarray]) -> bool:
        """Returns True if this model gives a row the losses that it has."""
        row = {name: values for name, values in first_row.items() if name != "losses"}
        real, dtype = row["segments"] > 0, self._assembly.experiment.precision.compute
        losses = self._losses_of(_OneRow(row), np.zeros(self._size, int))[:1][real]
        stored = first_row["losses"][real]
        apart, size = (np.sqrt(np.mean(np.square(x))) for x in (losses - stored, stored))
        return bool(
            apart <= max(LEAST_APART, BOUNDS.get(np.dtype(dtype).name, BOUNDS["bfloat16"])) * size
        )


class _OneRow:
    """A dataset of one row."""

    def __init__(self, row: Mapping[str, np.ndarray]) -> None:
        self._row = row

    def __len__(self) -> int:
        return 1

    def rows(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        return {name: values[indices] for name, values in self._row.items()}


class _Rows:
    """Data of an experiment that opens none: its rows come from elsewhere."""

    isolate_documents = True

    def __init__(self, seq: int) -> None:
        self.seq = seq

    def open(self, split: str, *, seed: int, cache_dir: Path) -> Any:
        raise NotImplementedError


def _of_tokens(assembly: Assembly) -> Assembly:
    """Returns the assembly with the loss of each token in place of that of pairs."""
    e = assembly.experiment
    assert e.fine_tuning is not None, "it has preferences"
    tuning = replace(e.fine_tuning, preferences=None)
    plain = replace(e, fine_tuning=tuning, data=_Rows(e.data.seq), evaluation=None)
    return replace(assemble(plain, assembly.spec, {}), fields=assembly.fields)


def _path(folder: Path, dataset: Any) -> Path:
    return folder / f"{dataset.content[:24]}.losses"


def _write_first(path: Path, meta: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
    """Writes a file in the first process, of what all of them have. All of them call it."""
    from_first(lambda: _write(path, meta, arrays))


def _write(path: Path, meta: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
    specs = {name: whole(arrays[name]) for name in sorted(arrays)}
    write_arrays(path, kind=REFERENCE_KIND, meta=meta, arrays=specs)


def _opened(path: Path) -> ArrayFile | None:
    """Returns a file of arrays, None if it is not there or damaged."""
    try:
        return open_arrays(path, kind=REFERENCE_KIND)
    except FileNotFoundError:
        return None
    except DamagedFile as error:
        notice(f"NOTE {str(error).partition(';')[0]}: it is not used")
        return None


def _read(folder: Path, dataset: Any) -> np.ndarray | None:
    """Returns the losses of a split in a folder; None if it has none of these rows."""
    file = _opened(_path(folder, dataset))
    losses = None if file is None else file.arrays["losses"]
    return losses if losses is not None and len(losses) == dataset.addresses else None


def _read_together(folder: Path, dataset: Any) -> np.ndarray | None:
    """Returns what `_read` does, None unless every process has it."""
    losses = _read(folder, dataset)
    texts = all_gather_text(json.dumps(losses is not None))
    return losses if all(map(json.loads, texts)) else None
