"""Initial parameters of a run that are loaded from a folder or from another run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence, Set
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxtrain.checkpoint.committed import read_for_all
from jaxtrain.checkpoint.run_config import stored_experiment
from jaxtrain.checkpoint.storage import DamagedCheckpoint, committed_steps, whole_manifest
from jaxtrain.cluster.agreement import all_gather_text, share_failure
from jaxtrain.experiment import Experiment, FromHuggingFace, FromRun, LoRA, Start
from jaxtrain.experiment.load import config_of, stored_name
from jaxtrain.experiment.stored import (
    ForeignField,
    UntrustedNames,
    completed,
    of_another,
    own_attention,
    stored_field,
)
from jaxtrain.experiment.tuning import match_patterns
from jaxtrain.files.opened import OpenedFolder, open_folder
from jaxtrain.files.pointer import checkpoints_in
from jaxtrain.files.regular import refuse_links
from jaxtrain.files.store import AnyPath
from jaxtrain.files.stored_run import opened_run
from jaxtrain.huggingface import read_params, refuse_unfit, require_decoder
from jaxtrain.huggingface.peft import ranks_of, read_adapters, refuse_unfit_adapters
from jaxtrain.models.adapters import INTO, is_adapter
from jaxtrain.models.buffers import buffers_of
from jaxtrain.models.layered import description_of
from jaxtrain.state_format.manifest import Manifest
from jaxtrain.state_format.slots import AS_THEY_REST, AllSlots
from jaxtrain.step.assembly import Assembly
from jaxtrain.step.layer_order import AtRest, natural_shapes
from jaxtrain.transformer.essence import differences, essence
from jaxtrain.validation.own_attention import is_own, is_standard, kernel_kind

PARAMS, AVERAGES = "params.", "ema."
FOLDER = "fine_tuning.start"
Shapes = Mapping[str, Any]
"""Leaves of a model in natural layer order: anything that has a shape and a dtype."""


class StoredStep(NamedTuple):
    """A step of a run, and the stored name of each parameter to load."""

    manifest: Manifest
    step: int
    directory: AnyPath
    names: dict[str, str]


@dataclass(frozen=True)
class OpenedStart(FromHuggingFace):
    """A start whose folders are read as they were when they were first opened."""

    @cached_property
    def weights(self) -> OpenedFolder:
        return open_folder("folder", self.folder)

    @cached_property
    def adapter_weights(self) -> OpenedFolder | None:
        return None if self.adapters is None else open_folder("adapters", self.adapters)

    @property
    def version(self) -> str:
        """As of `OpenedFolder`, of both."""
        folders = filter(None, (self.weights, self.adapter_weights))
        return " ".join(folder.version for folder in folders)


def opened_start(start: FromHuggingFace) -> OpenedStart:
    """Returns the start itself if its folders are open."""
    if isinstance(start, OpenedStart):
        return start
    return OpenedStart(start.folder, start.adapters)


def settled_start(assembly: Assembly, step: int | None = None) -> Start | None:
    """Returns the source of the initial parameters, with the newest step of a run by its number,
    the same on every process; None for a run that initializes all of them. Reads no weight. step:
    of a run, in place of the newest.

    Raises ValueError, on every process, where the source does not exist for one of them, or is not
    of this model: with every leaf that is missing, extra or of another shape.
    """
    start = assembly.experiment.start
    if isinstance(start, FromHuggingFace):
        start = opened_start(start)
        share_failure(partial(_refuse_unfit_folder, start, assembly))
        if len({*all_gather_text(start.version)}) > 1:
            raise ValueError(
                f"{start.folder} has been written while the processes looked at it; start them "
                "again once it is whole"
            )
    elif isinstance(start, FromRun):
        number = start.step if step is None else step
        step, _ = share_failure(lambda: manifest_of(run_of(start), number))
        start = replace(start, step=int(all_gather_text(str(step))[0]))
        share_failure(partial(_refuse_unfit_run, start, assembly))
    return start


def _refuse_unfit_folder(start: OpenedStart, assembly: Assembly) -> None:
    e = assembly.experiment
    model = require_decoder(e.model, FOLDER)
    refuse_unfit(start.weights, model)
    if start.adapter_weights is not None:
        shapes = {k: tuple(leaf.shape) for k, leaf in natural_shapes(assembly).params.items()}
        refuse_unfit_adapters(start.adapter_weights, model, e.lora, {*ranks_of(shapes)})


def _refuse_unfit_run(start: FromRun, assembly: Assembly) -> None:
    e, shapes = assembly.experiment, _loaded_shapes(assembly)
    stored_params(start, shapes, own_leaves(e.model), model_differences(start, assembly))


def model_differences(
    start: FromRun, assembly: Assembly, *, with_untrusted: bool = True
) -> list[str]:
    """Returns why the parameters of a run would compute something else in this model, as far as
    their shapes do not show it, one line each. with_untrusted: raise ValueError for a model with
    objects in it of modules that are not trusted; else its shapes alone are compared."""
    e, problems = assembly.experiment, []
    with nullcontext() if with_untrusted else suppress(UntrustedNames):
        problems = [] if start.leaves is not None else _model_differences(start, e)
    problems += _attention_differences(start, e.execution.attention)
    return problems + _scale_difference(start, e.lora, _loaded_shapes(assembly))


def _loaded_shapes(assembly: Assembly) -> Shapes:
    """Returns the shapes of the leaves to load. Scales and tallies always start anew."""
    anew = assembly.buffers.anew
    return {k: v for k, v in natural_shapes(assembly).params.items() if k not in anew}


def own_leaves(model: Any) -> frozenset[str]:
    """Returns the names of leaves that another run of the model may have in addition to its
    parameters."""
    return buffers_of(description_of(model), scaled=True).anew


def _model_differences(start: FromRun, experiment: Experiment) -> list[str]:
    """Returns the differences of the models that shapes do not show."""
    ours = essence(experiment.model)
    if ours is None or _is_stored_model(start, experiment):
        return []
    try:
        theirs = essence(stored_field(run_of(start), "model", trust=start.trust))
    except ForeignField:  # a model of one's own, of which shapes are compared
        return []
    if theirs is None:
        return []
    fields = differences(ours, theirs)
    return [f"model: {name} is {own}, there {other}" for name, own, other in dict.fromkeys(fields)]


def _is_stored_model(start: FromRun, experiment: Experiment) -> bool:
    """True if the run's model is stored as the experiment's would be: nothing it names is
    imported."""
    stored = completed({"experiment": stored_experiment(run_of(start))}, experiment)
    try:
        model = config_of(experiment)["model"]
    except ValueError:  # it cannot be stored
        return False
    return (stored["experiment"] or {}).get("model") == json.loads(json.dumps(model))


def _attention_differences(start: FromRun, kernel: Any) -> list[str]:
    """Returns the difference of the attention kernels, since a user's own kernel is part of the
    model."""
    theirs = own_attention(stored_experiment(run_of(start)))
    ours = stored_name(kernel_kind(kernel)) if is_own(kernel) else ""
    if theirs == ours or (not theirs and is_standard(kernel)):
        return []
    own, other = (name or "jaxtrain's own" for name in (ours, theirs))
    return [
        f"execution.attention is {own}, there {other}: a kernel of your own is part of the model; "
        "use the same"
    ]


def _scale_difference(start: FromRun, ours: LoRA | None, shapes: Shapes) -> list[str]:
    """Returns the difference of the adapters' scales: under another scale, adapters mean something
    else."""
    _, manifest = manifest_of(run_of(start), start.step)
    chosen = shapes if start.leaves is None else match_patterns(start.leaves, shapes, "leaves")[0]
    if not any(is_adapter(k) and PARAMS + k in manifest.leaves for k in chosen):
        return []
    tuned = stored_field(run_of(start), "fine_tuning", trust=start.trust)
    theirs = getattr(tuned, "lora", None)
    if ours is None or theirs is None or ours.alpha / ours.rank == theirs.alpha / theirs.rank:
        return []
    return [
        f"fine_tuning.lora: alpha / rank is {ours.alpha / ours.rank:g}, there "
        f"{theirs.alpha / theirs.rank:g}; use alpha={theirs.alpha / theirs.rank * ours.rank:g}"
    ]


def starting_params(at_rest: AtRest, start: Start | None) -> dict[str, jax.Array]:
    """Returns the parameters loaded from a folder or another run, in their at-rest sharding; {}
    where the run initializes all.

    start: as `settled_start` returns it. Each device's part is read from the files that have it.
    Raises on every process where one can't read its part, as `share_failure`.
    """
    if start is None:
        return {}
    e, template = at_rest.assembly.experiment, at_rest.template.params
    slots = {k: at_rest.slots[PARAMS + k] for k in template if PARAMS + k in at_rest.slots}
    if isinstance(start, FromHuggingFace):
        stored_leaves = {
            k: v for k, v in template.items() if k not in at_rest.assembly.buffers.anew
        }
        base = {k: v for k, v in stored_leaves.items() if not is_adapter(k)}
        model = require_decoder(e.model, FOLDER)
        opened = opened_start(start)
        params = share_failure(partial(read_params, opened.weights, model, base, slots))
        if opened.adapter_weights is not None:
            leaves = {k: v for k, v in stored_leaves.items() if is_adapter(k)}
            read = partial(read_adapters, opened.adapter_weights, model, leaves, slots)
            params |= share_failure(read)
        return params
    shapes, ignored = _loaded_shapes(at_rest.assembly), own_leaves(e.model)
    stored = share_failure(lambda: stored_params(start, shapes, ignored))
    return _cast(read_stored(stored, template, slots), template)


def _cast(params: dict[str, jax.Array], template: Shapes) -> dict[str, jax.Array]:
    """Returns the parameters in the dtypes of `template`, with unchanged shardings."""
    other = {k: leaf for k, leaf in params.items() if leaf.dtype != template[k].dtype}
    if not other:
        return params
    shardings = {k: leaf.sharding for k, leaf in other.items()}
    run = jax.jit(
        lambda leaves: {k: leaf.astype(template[k].dtype) for k, leaf in leaves.items()},
        out_shardings=shardings,
    )
    return {**params, **jax.block_until_ready(run(other))}


def stored_params(
    start: FromRun, shapes: Shapes, ignored: Set[str], earlier: Sequence[str] = ()
) -> StoredStep:
    """Returns the stored names of the parameters in `shapes` that `start` selects.

    ignored: leaves that the run may have in addition. earlier: problems found before, to be
    reported too.

    Raises ValueError where there is no such run or step, or it does not have these parameters: with
    each leaf that is missing, extra or of another shape, and each pattern that matches none. Raises
    DamagedCheckpoint where files of the step are missing or cut.
    """
    step, manifest = manifest_of(run_of(start), start.step)
    stored = {k.removeprefix(PARAMS) for k in manifest.leaves if k.startswith(PARAMS)}
    stored -= ignored - shapes.keys()
    chosen, problems = list(shapes), []
    if start.leaves is not None:
        matches, problems = match_patterns(start.leaves, shapes, "leaves")
        chosen = list(matches)
    elif not any(map(is_adapter, stored)):  # adapters begin with the run that asks for them
        chosen = [name for name in shapes if not is_adapter(name)]
    sources = {name: _source(name, manifest, averaged=start.averaged) for name in chosen}
    if start.averaged and not any(source.startswith(AVERAGES) for source in sources.values()):
        problems.append("averaged: the run keeps no averaged weights; use averaged=False")
    for name, source in sources.items():
        problems += _difference(name, manifest.leaves.get(source), shapes[name])
    if start.leaves is None:
        extra = sorted(stored - shapes.keys())
        problems += [f"{k}: {manifest.leaves[PARAMS + k]} there, not in this model" for k in extra]
    problems += [
        f"{name}: has an adapter there, which is not taken; begin with the folder that `jaxtrain "
        "export` writes, where it is merged"
        for name in chosen
        if name + INTO in stored and name + INTO not in sources
    ]
    if problems := [*earlier, *problems]:
        remedy = "" if start.leaves else "\ntake some of them with leaves=('period.*', ...)"
        raise ValueError(
            f"step {step} of {start.run_dir} does not fit this model in {len(problems)} places:\n  "
            + "\n  ".join(problems)
            + remedy
        )
    return StoredStep(manifest, step, checkpoints_in(run_of(start)), sources)


def run_of(start: FromRun) -> Path:
    """Returns the run's directory; for an address, a copy in the cache. Raises ValueError where
    there is none."""
    return opened_run("run_dir", start.run_dir)


def manifest_of(run_dir: Path, step: int | None) -> tuple[int, Manifest]:
    """Returns a step of a run, None for the newest, and its manifest. Raises ValueError where there
    is no such step, or it is of another experiment than the run, DamagedCheckpoint where its files
    are missing or cut."""
    refuse_links(run_dir)
    directory = checkpoints_in(run_dir)
    steps = committed_steps(directory)
    if not steps:
        raise ValueError(
            f"{directory} has no committed checkpoint; give the run directory that holds "
            "checkpoints/, as `jaxtrain train --run-dir` was given it (what only a local tier "
            "has is saved there when the run goes on)"
        )
    step = steps[-1] if step is None else step
    manifest = whole_manifest(directory, step)
    if foreign := of_another(manifest.metadata, stored_experiment(run_dir)):
        others = [other for other in steps if other != step]
        remedy = (
            f"give another step ({', '.join(map(str, others))})" if others else "give another run"
        )
        raise ValueError(f"step {step} of {run_dir}: {'; '.join(foreign)}; {remedy}")
    return step, manifest


def uses_averages(run: str | Path, step: int, manifest: Manifest, averaged: bool | None) -> bool:
    """Returns whether a step's averaged weights are used. averaged: None where it has any. Raises
    ValueError where they are asked for and it has none."""
    has_averages = any(name.startswith(AVERAGES) for name in manifest.leaves)
    if averaged and not has_averages:
        raise ValueError(
            f"averaged=True: step {step} of {run} has no averaged weights, which a run keeps with "
            "Experiment(ema_decay=...); use averaged=None, which takes them where there are any"
        )
    return has_averages and averaged is not False


def _source(name: str, manifest: Manifest, *, averaged: bool) -> str:
    """Returns the stored name of a parameter, or of its average if `averaged` and the run has one
    (frozen parameters have none)."""
    use_average = averaged and AVERAGES + name in manifest.leaves
    return (AVERAGES if use_average else PARAMS) + name


def _difference(name: str, stored: Any, template: Any) -> list[str]:
    expected = f"{template.dtype}[{','.join(map(str, template.shape))}]"
    if stored is None:
        return [f"{name}: not there, expected {expected}"]
    floats = all(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in (stored, template))
    if stored.shape == tuple(template.shape) and floats:
        return []
    return [f"{name}: {stored} there, expected {expected}"]


def read_stored(
    stored: StoredStep, template: Shapes, slots: AllSlots = AS_THEY_REST
) -> dict[str, jax.Array]:
    """Returns the parameters of a step with the shapes and shardings of `template`, in their stored
    dtypes. Raises DamagedCheckpoint on every process if any found damage.

    slots: order of layers at rest, by the names in `template`. Every chunk of which a part is
    needed is verified.
    """
    request = {
        source: jax.ShapeDtypeStruct(
            template[name].shape,
            jnp.dtype(stored.manifest.leaves[source].dtype),
            sharding=template[name].sharding,
        )
        for name, source in stored.names.items()
    }
    laid = {source: slots[name] for name, source in stored.names.items() if name in slots}
    place = (stored.directory, stored.step)
    arrays, damages = read_for_all(stored.manifest, request, *place, laid)
    if any(all_gather_text("damaged" if damages else "")):
        raise DamagedCheckpoint(
            damages or ["what another process read"],
            step=stored.step,
            directory=stored.directory,
            remedy="begin with an older step",
        )
    return {name: arrays[source] for name, source in stored.names.items()}
