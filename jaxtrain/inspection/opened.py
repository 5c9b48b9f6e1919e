"""A saved step of a run on a mesh: its model, its data's form and its parameters."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from jaxtrain.checkpoint.run_config import NAME
from jaxtrain.collectives.lax_form import Lax
from jaxtrain.experiment import Evaluation, Experiment
from jaxtrain.experiment.reading import Trust
from jaxtrain.experiment.stored import stored_field
from jaxtrain.mesh.mesh import MeshSpec, load_mesh, make_mesh, mesh_from_axes
from jaxtrain.optim.optimizer import SGD
from jaxtrain.session.lineage import refuse_no_directory
from jaxtrain.session.restore import restore_for_evaluation
from jaxtrain.state_format.manifest import Manifest
from jaxtrain.step.assembly import Assembly, active_mesh, assemble
from jaxtrain.step.batches import fields_of
from jaxtrain.step.layer_order import AtRest
from jaxtrain.step.losses import trace_loss
from jaxtrain.step.state import TrainState
from jaxtrain.tokenizers import HuggingFaceVocabulary, Vocabulary
from jaxtrain.weights import loading
from jaxtrain.weights.run_step import FORM, run_and_step
from jaxtrain.weights.start import manifest_of, uses_averages
from jaxtrain.weights.tokenizer_files import run_tokenizer

KEPT = ("model", "precision", "sharding", "execution", "batch", "microbatches", "seed")
"""Fields of a run's experiment that decide what its model computes, and in which pieces."""


@dataclass(frozen=True)
class StoredModel:
    """A step of a run. experiment: with its model, and an optimizer that has no state."""

    run: Path
    step: int
    manifest: Manifest
    experiment: Experiment

    def on(self, spec: MeshSpec, dataset: Any = None) -> tuple[Assembly, jax.sharding.Mesh]:
        """Returns the model on a mesh, for batches with the fields of this dataset. Raises
        ValueError with all that does not fit."""
        assembly = assemble(self.experiment, spec, {})
        if dataset is not None:
            assembly = replace(assembly, fields=fields_of(dataset, self.experiment.data))
            if assembly.description is None:
                trace_loss(assembly)
        return assembly, active_mesh(make_mesh(spec), assembly.sizes)

    def state(self, at_rest: AtRest) -> TrainState:
        """Returns the state without what only training needs. Raises DamagedCheckpoint, and
        ValueError where the step has other leaves."""
        return restore_for_evaluation(at_rest, self.manifest, self.run, self.step)


def stored_model(
    run: str | Path,
    data: Any,
    *,
    averaged: bool | None = None,
    microbatches: int | None = None,
    evaluation: Evaluation | None = None,
    of_pairs: bool = False,
    trust: Trust = (),
) -> StoredModel:
    """Returns a step of a run with this data; its weights are read later.

    run: RUN or RUN@STEP, its newest step if none is given. averaged: its averaged weights; None
    where it keeps any. microbatches, evaluation: in place of the run's. of_pairs: with the run's
    loss of pairs, if it has one, and not each token's. trust: modules of the caller's own that the
    run may name. Raises ValueError where there is no such step or average, or
    the run names what is not trusted.
    """
    path, number = directory_of(run)
    step, manifest = manifest_of(path, number)
    averaged = uses_averages(path, step, manifest, averaged)
    tuning = stored_field(path, "fine_tuning", trust=trust)
    if tuning is not None:
        tuning = replace(tuning, start=None, preferences=tuning.preferences if of_pairs else None)
    fields = {name: stored_field(path, name, trust=trust) for name in KEPT}
    fields["execution"] = replace(fields["execution"], reducer=Lax())  # of gradients
    fields["microbatches"] = microbatches or fields["microbatches"]
    experiment = Experiment(
        **fields,
        data=data,
        optimizer=SGD(1.0, momentum=0.0, weight_decay=0.0),
        steps=step,
        ema_decay=0.5 if averaged else None,
        evaluation=evaluation,
        checkpoints=None,
        fine_tuning=tuning,
    )
    return StoredModel(path, step, manifest, experiment)


def mesh_spec(mesh: MeshSpec | str | Path | None) -> MeshSpec:
    """Returns a mesh, None for one device."""
    return mesh_from_axes(data=1) if mesh is None else load_mesh(mesh)


def directory_of(run: str | Path) -> tuple[Path, int | None]:
    """Returns the directory of RUN or RUN@STEP, and the step, None if none is given. Raises
    ValueError where there is no run, or one that has saved nothing."""
    path, step = run_and_step(run)
    refuse_no_directory(path)
    if not loading.is_run(path):
        kind = "no run directory"
        if (path / NAME).is_file():
            kind = "a folder of weights, which load and generate read"
        raise ValueError(f"{path} is {kind}; give {FORM}")
    loading.refuse_unsaved(path)
    return path, step


def kept_vocabulary(run: Path, trust: Trust = ()) -> Vocabulary:
    """Returns the tokenizer that a run keeps; its documents begin and end as the run's did. Raises
    ValueError if it has none."""
    tokenizer = run_tokenizer(run, trust)
    if tokenizer is None:
        raise ValueError(f"{run} has no tokenizer: its data is no text; give ids or rows instead")
    vocabulary = tokenizer.vocabulary
    if not isinstance(vocabulary, HuggingFaceVocabulary):
        return vocabulary
    ends: Any = dict(bos=tokenizer.bos, add_eos=_adds_eos(run, trust))
    if ends == dict(bos=vocabulary.bos, add_eos=vocabulary.add_eos):
        return vocabulary
    more: Any = dict(eos=vocabulary.eos_token, chat=vocabulary.chat)
    return HuggingFaceVocabulary(vocabulary.json, **more, **ends)


def _adds_eos(run: Path, trust: Trust) -> bool:
    """True if documents of a run's data end with eos."""
    try:
        data = stored_field(run, "data", trust=trust)
    except ValueError:  # of one's own, which encodes itself
        return True
    return getattr(getattr(data, "tokenizer", None), "add_eos", True)


def row_length(data: object, run: Path) -> int:
    """Returns the tokens of a row of a run's data. Raises ValueError where it does not say."""
    seq = getattr(data, "seq", None)
    if seq is None:
        raise ValueError(
            f"{type(data).__name__}, the data of {run}, does not say how long its rows are (seq); "
            "score rows of it, by jaxtrain.inspection.score_rows"
        )
    return seq
