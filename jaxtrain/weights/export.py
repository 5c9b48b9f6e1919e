"""A run's weights as a folder that `transformers` loads, adapters merged."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any

from jaxtrain.checkpoint.run_config import stored_experiment
from jaxtrain.experiment.fine_tuning import FineTuning, FromHuggingFace
from jaxtrain.experiment.reading import Trust
from jaxtrain.experiment.stored import stored_field
from jaxtrain.files.pointer import given_place
from jaxtrain.files.store import AnyPath, address_of
from jaxtrain.files.stores import is_address
from jaxtrain.huggingface import require_decoder, write_folder
from jaxtrain.huggingface.peft_write import refuse_unwritable_adapters, write_adapters
from jaxtrain.huggingface.write import refuse_unwritable
from jaxtrain.mesh.mesh import MeshSpec
from jaxtrain.models.buffers import buffers_of
from jaxtrain.models.layered import description_of
from jaxtrain.weights.loading import Loaded, LoadedAdapters, is_run, load, refuse_absent
from jaxtrain.weights.run_step import run_and_step
from jaxtrain.weights.tokenizer_files import (
    GENERATION,
    declared_positions,
    tokenizer_files,
)


def export(
    run: str | Path,
    out: str | Path,
    *,
    step: int | None = None,
    averaged: bool | None = None,
    dtype: Any = None,
    mesh: MeshSpec | None = None,
    trust: Trust = (),
    adapters: bool = False,
) -> AnyPath:
    """Writes the model of RUN or RUN@STEP as the folder `out`, with the tokenizer of its data;
    returns `out`, which may be an address in a store.
    Where the run does not keep a tokenizer, a warning says so and the folder is written without
    one.

    adapters: True writes the adapters of LoRA alone, as a folder of `peft` without tokenizer, which
    names the folder that the run began with. Refused where they alone are not what was trained.

    step: in place of @STEP; None for the newest of the durable checkpoints; newer ones that only
    the disks of a `LocalTier` have are ignored. averaged: the averaged weights; None where the run
    keeps any. dtype: of the files, None for that of the parameters. mesh: the parameters are split
    over it on their way; None puts all on one device. trust: as for `generate_text`. All processes
    call this. Before a weight is read, raises ValueError where there is no such run or step, no
    family has its model, or `out` exists; and DamagedCheckpoint.
    """
    (run, step), place = run_and_step(run, step), given_place("out", out)
    refuse_absent(run)
    if not is_run(run):
        raise ValueError(f"{run} has no checkpoints; give a run directory")
    model = load(run, step=step, averaged=averaged, mesh=mesh, trust=trust)
    config = require_decoder(model.config, str(run))
    refuse_unwritable(place, config, model.precision.params if dtype is None else dtype)
    if adapters:
        unmerged, alpha, base = _adapters_alone(run, model, trust)
        refuse_unwritable_adapters(config, unmerged.targets)
        write_adapters(place, config, unmerged.read(), alpha=alpha, dtype=dtype, base=base)
        return place
    tokenizer, texts, lacking = model.tokenizer, {}, model.lacking
    if tokenizer is not None:
        texts = tokenizer_files(tokenizer.vocabulary, run)
        if not texts:
            lacking = f"a {type(tokenizer.vocabulary).__name__} is no tokenizer.json"
    if lacking:
        warnings.warn(f"{out} is written without a tokenizer: {lacking}", stacklevel=2)
    ids = json.loads(texts[GENERATION]) if texts else {}
    write_folder(
        place,
        config,
        model.params,
        dtype=dtype,
        max_seq=_positions(run),
        bos=ids.get("bos_token_id"),
        eos=ids.get("eos_token_id", None if tokenizer is None else tokenizer.vocabulary.eos),
        texts=texts,
    )
    return place


def _adapters_alone(run: Path, model: Loaded, trust: Trust) -> tuple[LoadedAdapters, float, str]:
    """Returns a run's adapters, their alpha, and the folder of their base model. Raises ValueError
    where they alone are not what the run trained."""
    tuning = stored_field(run, "fine_tuning", trust=trust)
    if model.adapters is None:
        raise ValueError(f"{run} trained no adapters (fine_tuning.lora); export its weights")
    if more := _beside_adapters(tuning, model):
        merged = "export the weights with adapters merged"
        raise ValueError(f"{run}: its adapters alone are another model, {more}; {merged}")
    folder = tuning.start.folder
    if is_address(folder):
        base = address_of("folder", os.fspath(folder))
    else:
        base = str(Path(folder).resolve() if Path(folder).is_dir() else folder)
    return model.adapters, tuning.lora.alpha, base


def _beside_adapters(tuning: FineTuning, model: Loaded) -> str:
    """Returns why the base model that a folder of adapters is used with would not be the one that
    they were trained in; empty if it is."""
    if tuning.trainable is not None:
        return f"for fine_tuning.trainable={tuning.trainable} was trained too"
    if buffers_of(description_of(model.config), scaled=False).biases:
        return "for Balance(bias_rate=...) moved biases of routers too"
    if not isinstance(tuning.start, FromHuggingFace):
        return f"for the run began with {tuning.start}, and with no folder that `peft` could load"
    return ""


def _positions(run: Path) -> int | None:
    """Returns the largest number of positions known to have been trained: the row length of the
    run's data, or the limit of the folder it began with, as far as the run keeps them."""
    stored = stored_experiment(run) or {}
    data = stored.get("data")
    limits = [data.get("seq") if isinstance(data, dict) else None, declared_positions(run)]
    return max((n for n in limits if type(n) is int and n > 0), default=None)
