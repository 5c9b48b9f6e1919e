"""A model that is there already: a run's, or a folder's, with its weights and its tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax

from jaxtrain.checkpoint.run_config import CHECKPOINTS, NAME, write_config
from jaxtrain.checkpoint.run_config import read_config as read_run_config
from jaxtrain.checkpoint.storage import committed_steps
from jaxtrain.experiment import FromRun
from jaxtrain.experiment.reading import Trust
from jaxtrain.experiment.stored import ForeignField, own_attention, stored_field
from jaxtrain.files.regular import refuse_links
from jaxtrain.files.stores import local_path
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
from jaxtrain.weights.huggingface import read_config, read_params
from jaxtrain.weights.start import (
    AVERAGES,
    PARAMS,
    Stored,
    manifest_of,
    read_stored,
    stored_params,
)
from jaxtrain.weights.tokenizer_files import (
    KeptTokenizer,
    folder_tokenizer,
    json_object,
    record_positions,
    record_tokenizer,
    run_tokenizer,
)


@dataclass(frozen=True)
class Loaded:
    """A model without adapters, which are in its matrices.

    tokenizer: None where there is none, and `lacking` says why, where there should be one. read:
    reads `params`.
    """

    config: ModelConfig
    precision: Precision
    tokenizer: KeptTokenizer | None
    read: Callable[[], dict[str, jax.Array]]
    lacking: str = ""

    @cached_property
    def params(self) -> dict[str, jax.Array]:
        """In natural layer order. Read when first asked for, which all processes then do; what can
        be refused without is refused before. Raises DamagedCheckpoint, and ValueError where a
        folder's weights are not its config's."""
        return self.read()


def is_run(path: Path) -> bool:
    """Whether a directory is a run's; a folder of weights has a config.json too."""
    return (path / CHECKPOINTS).is_dir() or "experiment" in json_object(path / NAME)


def load(
    path: str | Path,
    *,
    step: int | None = None,
    averaged: bool | None = None,
    mesh: MeshSpec | None = None,
    trust: Trust = (),
) -> Loaded:
    """The model of a run directory, or of a folder as `transformers` writes it; no weight is read
    before `params` is asked for.

    step: of a run, None for the newest of its durable checkpoints: a newer one that only the disks
    of a `LocalTier` have is not looked at. averaged: its averaged weights; None where it keeps any.
    mesh: over which the parameters are split; None puts all on one device. trust: modules of the
    caller's own that a run may name, as for `stored_field`; no other code is imported.
    Raises ValueError where nothing of the kind is there, and DamagedCheckpoint.
    """
    path = local_path("path", path)
    spec = mesh_from_axes(data=1) if mesh is None else mesh
    if is_run(path):
        return _of_run(path, step, averaged, spec, trust)
    if step is not None or averaged:
        raise ValueError(
            f"{path} is no run directory; a folder of weights has no steps or averages"
        )
    config = read_config(path)
    wanted = _template(abstract_model(config), spec)
    return Loaded(config, fp32, folder_tokenizer(path), partial(read_params, path, config, wanted))


def _of_run(
    path: Path,
    step: int | None,
    averaged: bool | None,
    spec: MeshSpec,
    trust: Trust,
) -> Loaded:
    refuse_links(path)
    own = (
        f"{path}: its model does not describe itself, and those that do alone are generated from "
        "and exported: jaxtrain.train(...) on this run gives a model of your own back, in "
        "result.session"
    )
    try:
        config = stored_field(path, "model", trust=trust)
    except ForeignField as error:
        raise ValueError(own) from error
    if not isinstance(config, ModelConfig):
        raise ValueError(own)
    raise_violations(getattr(config, "violations", list)(), f"{path}: its model")
    _refuse_own_attention(path, trust)
    precision = stored_field(path, "precision", trust=trust)
    tuning = stored_field(path, "fine_tuning", trust=trust)
    lora = getattr(tuning, "lora", None)
    _refuse_unsaved(path)
    step, manifest = manifest_of(path, step)
    kept = any(name.startswith(AVERAGES) for name in manifest.leaves)
    if averaged and not kept:
        raise ValueError(
            f"averaged=True: step {step} of {path} has no averaged weights, which a run keeps with "
            f"Experiment(ema_decay=...); use averaged=None, which takes them where there are any"
        )
    adapters, scale = None, 1.0
    if lora is not None:
        scale = lora.alpha / lora.rank
        names = (k.removeprefix(PARAMS) for k in manifest.leaves if k.startswith(PARAMS))
        targets = tuple(k.removesuffix(INTO) for k in names if k.endswith(INTO))
        adapters = Adapters(lora.rank, scale, targets)
    wanted = _template(abstract_model(config, adapters=adapters), spec, precision.params)
    start = FromRun(path, step, averaged=kept and averaged is not False)
    held = stored_params(start, wanted, buffers_of(description_of(config), scaled=True).anew)
    tokenizer, lacking = None, ""
    try:
        tokenizer = run_tokenizer(path, trust)
    except (OSError, ValueError) as error:  # the model is there without
        lacking = str(error)
    read = partial(_read_run, held, wanted, scale)
    return Loaded(config, precision, tokenizer, read, lacking)


def _refuse_own_attention(path: Path, trust: Trust) -> None:
    """Raises ValueError where a run was trained with an attention of a user's own that does not say
    that it is what is computed from the model's weights here and elsewhere."""
    name = own_attention((read_run_config(path) or {}).get("experiment"))
    if not name:
        return
    module, _, thing = name.partition(":")
    try:
        if is_standard(stored_field(path, "execution", trust=trust).attention):
            return
        reason = f"{thing} does not say that it is"
    except ValueError as error:  # it is not trusted, or cannot be imported
        reason = f"it was not looked at: {' '.join(str(error).split())}"
    raise ValueError(
        f"{path}: the run was trained with execution.attention={thing}, a kernel of your own, and "
        "what is generated and exported computes softmax attention as jaxtrain.attention has it, "
        f"which is another model, unless {thing}.standard = True ({reason}); for that put the "
        f"kernel into a module that can be imported from here (PYTHONPATH), and --trust {module}"
    )


def _refuse_unsaved(path: Path) -> None:
    if not committed_steps(path / CHECKPOINTS):
        raise ValueError(
            f"{path} is a run that has saved nothing yet; wait for its first checkpoint in "
            f"{CHECKPOINTS}/, or train it with Experiment(checkpoints=SavePolicy(...)) (what only "
            "the disks of a LocalTier have is not looked at)"
        )


def _read_run(stored: Stored, wanted: dict[str, Any], scale: float) -> dict[str, jax.Array]:
    return _merge(read_stored(stored, wanted), scale)


def static_of(config: ModelConfig) -> Any:
    """The model's static form, for `put_together`."""
    return abstract_model(config).static


def _template(split: ModuleSplit, spec: MeshSpec, dtype: Any = "float32") -> dict[str, Any]:
    """The leaves of a model as they rest on a mesh. Raises ValueError where they do not split."""
    mesh = make_mesh(spec)
    sizes = {axis: n for axis, n in mesh.shape.items() if n > 1}
    places, violations = place(split.params, split.axes, fsdp() | tensor(), sizes=sizes)
    raise_violations(violations, spec.where)
    return {
        k: jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=named_sharding(mesh, places[k].params))
        for k, leaf in split.params.items()
    }


def _merge(params: dict[str, jax.Array], scale: float) -> dict[str, jax.Array]:
    """Without adapters: in their matrices, one after the other."""
    out = {k: v for k, v in params.items() if not is_adapter(k)}
    for name in (k.removesuffix(INTO) for k in params if k.endswith(INTO)):
        mine = {k: params[k] for k in (name, name + INTO, name + OUT_OF)}
        with jax.default_matmul_precision("highest"):
            run = jax.jit(partial(merge_adapters, scale=scale), out_shardings=_places(mine))
            out[name] = jax.block_until_ready(run(mine))[name]
    return out


def _places(arrays: dict[str, jax.Array]) -> dict[str, Any]:
    return {k: v.sharding for k, v in arrays.items()}


def record_run(run: Path, config: dict[str, Any], dataset: Any) -> None:
    """Write into a run's directory what made it: config.json, its tokenizer, and what is known of
    its positions. Raises ValueError as `write_config` does."""
    write_config(run, config)
    record_positions(run)
    record_tokenizer(run, dataset)
