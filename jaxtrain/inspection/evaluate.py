"""The loss of a saved run on its own held-out rows, or on other data."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from jaxtrain.experiment import Evaluation
from jaxtrain.experiment.reading import Trust
from jaxtrain.experiment.stored import stored_field
from jaxtrain.files.cache import cache_directory
from jaxtrain.inspection.given import (
    data_for,
    stored_data,
    uses_kept_tokenizer,
    warn_of_other_rows,
    warn_of_other_sets,
)
from jaxtrain.inspection.opened import directory_of, mesh_spec, stored_model
from jaxtrain.mesh.mesh import MeshSpec
from jaxtrain.scoring.reference import read_references
from jaxtrain.session.evaluate import Evaluator
from jaxtrain.session.held_out_sets import for_each, own_data
from jaxtrain.session.rows import open_split
from jaxtrain.step.layer_order import AtRest
from jaxtrain.violations import count, raise_violations

SPLITS = ("held_out", "train")


def evaluate(
    run: str | Path,
    data: Any = None,
    *,
    mesh: MeshSpec | str | Path | None = None,
    split: str | None = None,
    batches: int | None = None,
    averaged: bool | None = None,
    microbatches: int | None = None,
    cache_dir: str | Path | None = None,
    trust: Trust = (),
) -> dict[str, float]:
    """Returns `eval_loss` (nats a weighted token) of a saved run, `bits_per_byte` where tokens
    stand for bytes, and the model's other sums: the numbers of the run's own evaluations, those of
    its `Evaluation.sets` too where neither data nor a split is given.

    run: RUN or RUN@STEP, a run directory and a saved step, its newest if none is given. data: files
    by name or pattern, or several; a source of texts, such as TextFiles, which the run's own
    tokenizer encodes; or a value with `open`, such as TextData; None for the run's own data. mesh:
    None for one device. split: of the data, "held_out" or "train"; None takes what is held out, and
    all of files that are given. batches: how many of the run's batch, None for all rows. averaged:
    the averaged weights; None where the run keeps any. microbatches: parts of a batch that are on
    the mesh one after another, None as in the run; a smaller mesh needs more. cache_dir: as for
    `train`. trust: modules of your own that the run may name. Warns if the run's own data has
    changed since. Raises ValueError for what does not fit, before anything is compiled, and
    DamagedCheckpoint.
    """
    numbers = {"batches": batches, "microbatches": microbatches}
    violations = [v for k, n in numbers.items() if n is not None for v in count(k, n, 1)]
    if split not in (None, *SPLITS):
        violations.append(f'split={split!r} is none; use "held_out" or "train"')
    raise_violations(violations)
    cache, spec = cache_directory(cache_dir), mesh_spec(mesh)
    path, _ = directory_of(run)
    rows = data_for(path, data, split, cache, trust)
    sets = _sets_of(path, cache, trust) if data is None and split is None else {}
    more: Any = dict(averaged=averaged, microbatches=microbatches, trust=trust)
    if sets:
        more["evaluation"] = Evaluation(batches=batches, final_batches=batches, sets=sets)
    stored = stored_model(run, rows, of_pairs=getattr(rows, "of_pairs", False), **more)
    dataset = open_split(stored.experiment, rows.split, cache)
    metadata = {} if data is not None or uses_kept_tokenizer(rows) else stored.manifest.metadata
    warn_of_other_rows(metadata, dataset, rows.split)
    assembly, mesh_of_devices = stored.on(spec, dataset)
    evaluator = Evaluator(assembly, mesh_of_devices, cache_dir=cache)
    with _or_without_sets() if sets else nullcontext():
        evaluator.open()
    if stored.experiment.objective is not None:
        read_references(path, evaluator.splits)
    warn_of_other_sets(metadata, evaluator.digests)
    return evaluator(stored.state(AtRest(assembly, mesh_of_devices)), batches=batches)


def _sets_of(run: Path, cache: Path, trust: Trust) -> dict[str, Any]:
    """Returns the data of a run's named held-out sets, as the run itself read them."""
    with _or_without_sets():
        evaluation = stored_field(run, "evaluation", trust=trust)
        named: dict[str, Any] = {} if evaluation is None else evaluation.named_sets
        if not named:
            return {}
        own = own_data(stored_data(run, trust), cache, str(run))
        return for_each(named, lambda other: own.split_of(other, None))


@contextmanager
def _or_without_sets() -> Iterator[None]:
    """Adds to a refusal that the run's own rows can be evaluated without its named sets."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f'{error}; or evaluate without named sets: split="held_out"') from error
