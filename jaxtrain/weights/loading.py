"""A model that exists already, a run's or a folder's, with its weights and its tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxtrain.checkpoint.run_config import NAME, stored_experiment, write_config
from jaxtrain.checkpoint.storage import committed_steps
from jaxtrain.experiment import FromRun
from jaxtrain.experiment.reading import Trust
from jaxtrain.experiment.stored import ForeignField, own_attention, stored_field
from jaxtrain.files.opened import open_folder
from jaxtrain.files.pointer import CHECKPOINTS, checkpoints_in
from jaxtrain.files.regular import refuse_links
from jaxtrain.files.stores import is_address
from jaxtrain.huggingface import read_config, read_params
from jaxtrain.mesh.mesh import MeshSpec, make_mesh, mesh_from_axes
from jaxtrain.mesh.sharding import fsdp, named_sharding, place, tensor
from jaxtrain.models.adapters import INTO, OUT_OF, Adapters, is_adapter, merge_adapters
from jaxtrain.models.buffers import buffers_of
from jaxtrain.models.build import abstract_model
from jaxtrain.models.layered import ModelConfig, description_of
from jaxtrain.nn.module import ModuleSplit
from jaxtrain.optim.precision import Precision, fp32
from jaxtrain.validation.own_attention import is_standard
from jaxtrain.violations import raise_violations
from jaxtrain.weights.run_step import run_and_step
from jaxtrain.weights.start import (
    PARAMS,
    StoredStep,
    manifest_of,
    read_stored,
    stored_params,
    uses_averages,
)
from jaxtrain.weights.tokenizer_files import (
    KeptTokenizer,
    folder_tokenizer,
    json_object,
    record_beginning,
    run_tokenizer,
)


class LoadedAdapters(NamedTuple):
    """targets: the matrices that have one. read: reads the leaves A and B, in natural layer
    order."""

    targets: tuple[str, ...]
    read: Callable[[], dict[str, jax.Array]]


@dataclass(frozen=True)
class Loaded:
    """A model without adapters, which are merged into its matrices.

    tokenizer: None where there is none; `lacking` is the reason, if there should be one. read:
    reads `params`. adapters: those of LoRA, not merged; None where there are none.
    """

    config: ModelConfig
    precision: Precision
    tokenizer: KeptTokenizer | None
    read: Callable[[], dict[str, jax.Array]]
    lacking: str = ""
    adapters: LoadedAdapters | None = None

    @cached_property
    def params(self) -> dict[str, jax.Array]:
        """Parameters in natural layer order, read at the first access, which all processes must
        make. All checks that need no weights are done before. Raises DamagedCheckpoint, and
        ValueError where a folder's weights do not fit its config."""
        return self.read()


def is_run(path: Path) -> bool:
    """True for a run directory. A folder of weights also has a config.json."""
    return (path / CHECKPOINTS).is_dir() or "experiment" in json_object(path / NAME)


def refuse_absent(path: Path) -> None:
    """Raises ValueError where there is no directory."""
    if not path.is_dir():
        raise ValueError(f"there is no directory {path}; give a run directory, or a model's folder")


def load(
    path: str | Path,
    *,
    step: int | None = None,
    averaged: bool | None = None,
    mesh: MeshSpec | None = None,
    trust: Trust = (),
) -> Loaded:
    """Returns the model of a run directory, or of a folder as `transformers` writes it. No weight
    is read before the first access of `params`.

    path: a folder, or RUN or RUN@STEP. step: in place of @STEP; None for the newest of the durable
    checkpoints; newer ones that only the disks of a `LocalTier` have are ignored. averaged: its
    averaged weights; None where it keeps any. mesh: the parameters are split over it; None puts all
    on one device. trust: modules of the caller's own that a run may name, as for `stored_field`; no
    other code is imported. Raises ValueError where `path` is neither of them, and
    DamagedCheckpoint.
    """
    named, (path, step) = path, run_and_step(path, step)
    refuse_absent(path)
    spec = mesh_from_axes(data=1) if mesh is None else mesh
    if is_run(path):
        return _of_run(path, step, averaged, spec, trust)
    if step is not None or averaged:
        raise ValueError(
            f"{named} is no run directory; a folder of weights has no steps or averages"
        )
    folder = open_folder("path", named if is_address(named) else path)
    config = read_config(folder)
    template = _template(abstract_model(config), spec)
    tokenizer = folder_tokenizer(folder.here, folder.place)
    return Loaded(config, fp32, tokenizer, partial(read_params, folder, config, template))


def _of_run(
    path: Path,
    step: int | None,
    averaged: bool | None,
    spec: MeshSpec,
    trust: Trust,
) -> Loaded:
    refuse_links(path)
    unsupported = (
        f"{path}: its model does not describe itself, and those that do alone are generated from "
        "and exported: jaxtrain.train(...) on this run gives a model of your own back, in "
        "result.session"
    )
    try:
        config = stored_field(path, "model", trust=trust)
    except ForeignField as error:
        raise ValueError(unsupported) from error
    if not isinstance(config, ModelConfig):
        raise ValueError(unsupported)
    raise_violations(getattr(config, "violations", list)(), f"{path}: its model")
    _refuse_own_attention(path, trust)
    precision = stored_field(path, "precision", trust=trust)
    tuning = stored_field(path, "fine_tuning", trust=trust)
    lora = getattr(tuning, "lora", None)
    refuse_unsaved(path)
    step, manifest = manifest_of(path, step)
    averaged = uses_averages(path, step, manifest, averaged)
    adapters, scale = None, 1.0
    if lora is not None:
        scale = lora.alpha / lora.rank
        names = (k.removeprefix(PARAMS) for k in manifest.leaves if k.startswith(PARAMS))
        targets = tuple(k.removesuffix(INTO) for k in names if k.endswith(INTO))
        adapters = Adapters(lora.rank, scale, targets)
    template = _template(abstract_model(config, adapters=adapters), spec, precision.params)
    start = FromRun(path, step, averaged=averaged)
    stored = stored_params(start, template, buffers_of(description_of(config), scaled=True).anew)
    tokenizer, lacking = None, ""
    try:
        tokenizer = run_tokenizer(path, trust)
    except (OSError, ValueError) as error:  # the model is there without
        lacking = str(error)
    read = partial(_read_run, stored, template, scale)
    unmerged = None
    if adapters is not None:
        unmerged = LoadedAdapters(adapters.targets, partial(_read_adapters, stored, template))
    return Loaded(config, precision, tokenizer, read, lacking, unmerged)


def _refuse_own_attention(path: Path, trust: Trust) -> None:
    """Raises ValueError where a run was trained with a user's own attention kernel that does not
    declare itself standard, since generation and export compute standard attention."""
    name = own_attention(stored_experiment(path))
    if not name:
        return
    module, _, kernel = name.partition(":")
    try:
        if is_standard(stored_field(path, "execution", trust=trust).attention):
            return
        reason = f"{kernel} does not say that it is"
    except ValueError as error:  # it is not trusted, or cannot be imported
        reason = f"it was not looked at: {' '.join(str(error).split())}"
    raise ValueError(
        f"{path}: the run was trained with execution.attention={kernel}, a kernel of your own, and "
        "what is generated and exported computes softmax attention as jaxtrain.attention has it, "
        f"which is another model, unless {kernel}.standard = True ({reason}); for that put the "
        f"kernel into a module that can be imported from here (PYTHONPATH), and --trust {module}"
    )


def refuse_unsaved(path: Path) -> None:
    """Raises ValueError for a run without a checkpoint."""
    if not committed_steps(checkpoints_in(path)):
        raise ValueError(
            f"{path} is a run that has saved nothing yet; wait for its first checkpoint in "
            f"{CHECKPOINTS}/, or train it with Experiment(checkpoints=SavePolicy(...)) (what only "
            "the disks of a LocalTier have is not looked at)"
        )


def _read_run(stored: StoredStep, template: dict[str, Any], scale: float) -> dict[str, jax.Array]:
    return _merge(read_stored(stored, template), scale)


def _read_adapters(stored: StoredStep, template: dict[str, Any]) -> dict[str, jax.Array]:
    names = {k: name for k, name in stored.names.items() if is_adapter(k)}
    return read_stored(stored._replace(names=names), template)


def static_of(config: ModelConfig) -> Any:
    """The model's static form, for `put_together`."""
    return abstract_model(config).static


def _template(split: ModuleSplit, spec: MeshSpec, dtype: Any = "float32") -> dict[str, Any]:
    """Returns the shapes, dtypes and at-rest shardings of a model's leaves on a mesh. Raises
    ValueError where they do not split."""
    mesh = make_mesh(spec)
    sizes = {axis: n for axis, n in mesh.shape.items() if n > 1}
    places, violations = place(split.params, split.axes, fsdp() | tensor(), sizes=sizes)
    raise_violations(violations, spec.where)
    return {
        k: jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=named_sharding(mesh, places[k].params))
        for k, leaf in split.params.items()
    }


def _merge(params: dict[str, jax.Array], scale: float) -> dict[str, jax.Array]:
    """Returns the parameters with adapters merged into their matrices, one after the other."""
    out = {k: v for k, v in params.items() if not is_adapter(k)}
    for name in (k.removesuffix(INTO) for k in params if k.endswith(INTO)):
        leaves = {k: params[k] for k in (name, name + INTO, name + OUT_OF)}
        with jax.default_matmul_precision("highest"):
            run = jax.jit(partial(merge_adapters, scale=scale), out_shardings=_places(leaves))
            out[name] = jax.block_until_ready(run(leaves))[name]
    return out


def _places(arrays: dict[str, jax.Array]) -> dict[str, Any]:
    return {k: v.sharding for k, v in arrays.items()}


def record_run(run: Path, config: dict[str, Any], dataset: Any) -> None:
    """Writes into a run's directory its config.json, its tokenizer, and what is known of its
    positions. Raises ValueError as `write_config` does."""
    is_new = not (run / NAME).is_file()
    write_config(run, config)
    record_beginning(run, dataset, is_new=is_new)
