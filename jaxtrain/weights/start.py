"""The parameters that a run begins with, where it does not make them itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxtrain.checkpoint.run_config import CHECKPOINTS, read_config
from jaxtrain.checkpoint.storage import DamagedCheckpoint, committed_steps, whole_manifest
from jaxtrain.cluster.agreement import all_gather_text, share_failure
from jaxtrain.experiment import Experiment, FromHuggingFace, FromRun
from jaxtrain.experiment.load import stored_name
from jaxtrain.experiment.stored import ForeignField, own_attention, stored_field
from jaxtrain.files.regular import refuse_links
from jaxtrain.models.adapters import INTO, is_adapter
from jaxtrain.models.buffers import buffers_of
from jaxtrain.models.essence import differences, essence
from jaxtrain.models.layered import description_of
from jaxtrain.state_format.manifest import Manifest
from jaxtrain.state_format.reader import Damaged, read_arrays
from jaxtrain.state_format.slots import AS_THEY_REST, AllSlots
from jaxtrain.step.assembly import Assembly
from jaxtrain.step.layer_order import AtRest, natural_shapes
from jaxtrain.step.tuning import match_patterns
from jaxtrain.validation.own_attention import is_own, is_standard, kernel_kind
from jaxtrain.weights.huggingface import held_in_folders, read_params, refuse_unfit

PARAMS, AVERAGES = "params.", "ema."
FOLDER = "fine_tuning.start"
Shapes = Mapping[str, Any]
"""Leaves of a model in natural layer order: anything that has a shape and a dtype."""


class Stored(NamedTuple):
    """A step of a run, and under which name it has each parameter that is to be taken."""

    manifest: Manifest
    step: int
    directory: Path
    names: dict[str, str]


Start = FromHuggingFace | FromRun


def settled_start(assembly: Assembly) -> Start | None:
    """What the experiment begins with, the newest step of a run by its number, the same on every
    process; None of its own making. Reads no weight.

    Raises ValueError, on every process, where what it begins with is not there for one of them, or
    is not of this model: with every leaf that is missing, extra or of another shape.
    """
    tuning = assembly.experiment.fine_tuning
    start = None if tuning is None else tuning.start
    if isinstance(start, FromHuggingFace):
        folder, model = start.folder, assembly.experiment.model
        share_failure(lambda: refuse_unfit(folder, held_in_folders(model, FOLDER)))
    elif isinstance(start, FromRun):
        run = start
        step, _ = share_failure(lambda: manifest_of(run.run_dir, run.step))
        start = settled = replace(run, step=int(all_gather_text(str(step))[0]))
        share_failure(lambda: _refuse_unfit_run(settled, assembly))
    return start


def _refuse_unfit_run(start: FromRun, assembly: Assembly) -> None:
    e, wanted = assembly.experiment, _wanted(assembly)
    problems = [] if start.leaves is not None else _model_differences(start, e)
    problems += _attention_differences(start, e)
    problems += _scale_difference(start, e, wanted)
    stored_params(start, wanted, own_leaves(e.model), problems)


def _wanted(assembly: Assembly) -> Shapes:
    """What of a state is read; scales and tallies begin with the run."""
    anew = assembly.buffers.anew
    return {k: v for k, v in natural_shapes(assembly).params.items() if k not in anew}


def own_leaves(model: Any) -> frozenset[str]:
    """What another run of the model may hold beside its parameters."""
    return buffers_of(description_of(model), scaled=True).anew


def _model_differences(start: FromRun, experiment: Experiment) -> list[str]:
    """Fields of models that shapes do not show."""
    ours = essence(experiment.model)
    if ours is None:
        return []
    try:
        theirs = essence(stored_field(start.run_dir, "model", trust=start.trust))
    except ForeignField:  # a model of one's own, of which shapes are compared
        return []
    if theirs is None:
        return []
    found = differences(ours, theirs)
    return [f"model: {name} is {here}, there {there}" for name, here, there in dict.fromkeys(found)]


def _attention_differences(start: FromRun, experiment: Experiment) -> list[str]:
    """An attention kernel of a user's own is part of what parameters mean."""
    theirs = own_attention((read_config(Path(start.run_dir)) or {}).get("experiment"))
    kernel = experiment.execution.attention
    ours = stored_name(kernel_kind(kernel)) if is_own(kernel) else ""
    if theirs == ours or (not theirs and is_standard(kernel)):
        return []
    here, there = (name or "jaxtrain's own" for name in (ours, theirs))
    return [
        f"execution.attention is {here}, there {there}: a kernel of your own is part of the model; "
        "use the same"
    ]


def _scale_difference(start: FromRun, experiment: Experiment, wanted: Shapes) -> list[str]:
    """Adapters that are taken at another scale are other adapters."""
    _, manifest = manifest_of(start.run_dir, start.step)
    chosen = wanted if start.leaves is None else match_patterns(start.leaves, wanted, "leaves")[0]
    if not any(is_adapter(k) and PARAMS + k in manifest.leaves for k in chosen):
        return []
    ours = getattr(experiment.fine_tuning, "lora", None)
    tuned = stored_field(start.run_dir, "fine_tuning", trust=start.trust)
    theirs = getattr(tuned, "lora", None)
    if ours is None or theirs is None or ours.alpha / ours.rank == theirs.alpha / theirs.rank:
        return []
    return [
        f"fine_tuning.lora: alpha / rank is {ours.alpha / ours.rank:g}, there "
        f"{theirs.alpha / theirs.rank:g}; use alpha={theirs.alpha / theirs.rank * ours.rank:g}"
    ]


def starting_params(at_rest: AtRest, start: Start | None) -> dict[str, jax.Array]:
    """Those that are not of the run's own making, as they rest; {} where all are.

    start: as `settled_start` gives it. Each device's part is read from what holds it. Raises
    ValueError on every process where one can't read its part, and DamagedCheckpoint.
    """
    if start is None:
        return {}
    e, wanted = at_rest.assembly.experiment, at_rest.template.params
    slots = {k: at_rest.slots[PARAMS + k] for k in wanted if PARAMS + k in at_rest.slots}
    if isinstance(start, FromHuggingFace):
        own = {k: v for k, v in wanted.items() if k not in at_rest.assembly.buffers.anew}
        base = {k: v for k, v in own.items() if not is_adapter(k)}
        return share_failure(
            lambda: read_params(start.folder, held_in_folders(e.model, FOLDER), base, slots)
        )
    shapes, beside = _wanted(at_rest.assembly), own_leaves(e.model)
    stored = share_failure(lambda: stored_params(start, shapes, beside))
    return _cast(read_stored(stored, wanted, slots), wanted)


def _cast(params: dict[str, jax.Array], wanted: Shapes) -> dict[str, jax.Array]:
    """In the dtypes wanted, each where it is."""
    other = {k: leaf for k, leaf in params.items() if leaf.dtype != wanted[k].dtype}
    if not other:
        return params
    where = {k: leaf.sharding for k, leaf in other.items()}
    run = jax.jit(
        lambda leaves: {k: leaf.astype(wanted[k].dtype) for k, leaf in leaves.items()},
        out_shardings=where,
    )
    return {**params, **jax.block_until_ready(run(other))}


def stored_params(
    start: FromRun, wanted: Shapes, beside: Set[str], others: Sequence[str] = ()
) -> Stored:
    """Where a run has the parameters of `wanted` that are asked for. beside: leaves that it may
    have beside them, which nobody takes. others: what else is known to be wrong with them.

    Raises:
        ValueError: there is no such run or step, or it has not these parameters: each leaf that is
            missing, extra or of another shape, and each pattern that names none.
        DamagedCheckpoint: files of the step are missing or cut.
    """
    step, manifest = manifest_of(start.run_dir, start.step)
    held = {k.removeprefix(PARAMS) for k in manifest.leaves if k.startswith(PARAMS)}
    held -= beside - wanted.keys()
    chosen, problems = list(wanted), []
    if start.leaves is not None:
        found, problems = match_patterns(start.leaves, wanted, "leaves")
        chosen = list(found)
    elif not any(map(is_adapter, held)):  # adapters begin with the run that asks for them
        chosen = [name for name in wanted if not is_adapter(name)]
    names = {name: _source(name, manifest, averaged=start.averaged) for name in chosen}
    if start.averaged and not any(source.startswith(AVERAGES) for source in names.values()):
        problems.append("averaged: the run keeps no averaged weights; use averaged=False")
    for name, source in names.items():
        problems += _difference(name, manifest.leaves.get(source), wanted[name])
    if start.leaves is None:
        extra = sorted(held - wanted.keys())
        problems += [f"{k}: {manifest.leaves[PARAMS + k]} there, not in this model" for k in extra]
    problems += [
        f"{name}: has an adapter there, which is not taken; begin with the folder that `jaxtrain "
        "export` writes, where it is merged"
        for name in chosen
        if name + INTO in held and name + INTO not in names
    ]
    if problems := [*others, *problems]:
        remedy = "" if start.leaves else "\ntake some of them with leaves=('period.*', ...)"
        raise ValueError(
            f"step {step} of {start.run_dir} does not fit this model in {len(problems)} places:\n  "
            + "\n  ".join(problems)
            + remedy
        )
    return Stored(manifest, step, Path(start.run_dir) / CHECKPOINTS, names)


def manifest_of(run_dir: str | Path, step: int | None) -> tuple[int, Manifest]:
    """A step of a run, None for the newest, and what is in it. Raises ValueError where there is
    none, DamagedCheckpoint where files of it are missing or cut."""
    refuse_links(Path(run_dir))
    directory = Path(run_dir) / CHECKPOINTS
    steps = committed_steps(directory)
    if not steps:
        raise ValueError(
            f"{directory} has no committed checkpoint; give the run directory that holds "
            f"{CHECKPOINTS}/, as `jaxtrain train --run-dir` was given it (what only a local tier "
            "has is saved there when the run goes on)"
        )
    step = steps[-1] if step is None else step
    return step, whole_manifest(directory, step)


def _source(name: str, manifest: Manifest, *, averaged: bool) -> str:
    """Its name there: of its average, where that is asked for and kept (frozen ones have none)."""
    kept = averaged and AVERAGES + name in manifest.leaves
    return (AVERAGES if kept else PARAMS) + name


def _difference(name: str, stored: Any, wanted: Any) -> list[str]:
    expected = f"{wanted.dtype}[{','.join(map(str, wanted.shape))}]"
    if stored is None:
        return [f"{name}: not there, expected {expected}"]
    floats = all(jnp.issubdtype(each.dtype, jnp.floating) for each in (stored, wanted))
    if stored.shape == tuple(wanted.shape) and floats:
        return []
    return [f"{name}: {stored} there, expected {expected}"]


def read_stored(
    stored: Stored, wanted: Shapes, slots: AllSlots = AS_THEY_REST
) -> dict[str, jax.Array]:
    """The parameters of a step, as `wanted` has shapes and shardings and in its own dtypes; in
    `slots`, by their names in `wanted`, where these have them. Every chunk of which a part is
    needed is verified. Raises DamagedCheckpoint on every process if any found damage."""
    request = {
        source: jax.ShapeDtypeStruct(
            wanted[name].shape,
            jnp.dtype(stored.manifest.leaves[source].dtype),
            sharding=wanted[name].sharding,
        )
        for name, source in stored.names.items()
    }
    damages: list[str] = []
    arrays: dict[str, jax.Array] = {}
    try:
        laid = {source: slots[name] for name, source in stored.names.items() if name in slots}
        arrays = read_arrays(stored.manifest, request, slots=laid)
    except Damaged as error:
        damages = error.damages
    if any(all_gather_text("damaged" if damages else "")):
        raise DamagedCheckpoint(
            damages or ["what another process read"],
            step=stored.step,
            directory=stored.directory,
            remedy="begin with an older step",
        )
    return {name: arrays[source] for name, source in stored.names.items()}
