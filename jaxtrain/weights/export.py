"""A run's weights as a folder that `transformers` loads, adapters merged."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

from jaxtrain.checkpoint.run_config import read_config
from jaxtrain.experiment.reading import Trust
from jaxtrain.files.stores import local_path
from jaxtrain.mesh.mesh import MeshSpec
from jaxtrain.weights.huggingface import held_in_folders, write_folder
from jaxtrain.weights.huggingface.write import refuse_unwritable
from jaxtrain.weights.loading import is_run, load
from jaxtrain.weights.tokenizer_files import (
    GENERATION,
    kept_positions,
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
) -> Path:
    """Write the model of a run directory as the folder `out`; with its tokenizer, if its data has
    one. Where the run does not keep it a warning says so, and the folder is written without.

    step: None for the newest of the durable checkpoints: a newer one that only the disks of a
    `LocalTier` have is not looked at. averaged: the averaged weights; None where the run keeps any.
    dtype: of the files, None that of the parameters. mesh: over which the parameters are split on
    their way; None puts all on one device. trust: as for `generate_text`. All processes call this.
    Raises, before a weight is read, ValueError where there is no such run or step, no family has
    its model, or `out` is there already; DamagedCheckpoint.
    """
    run, out = local_path("run", run), local_path("out", out)
    if not is_run(run):
        raise ValueError(f"{run} has no checkpoints; give a run directory")
    found = load(run, step=step, averaged=averaged, mesh=mesh, trust=trust)
    config = held_in_folders(found.config, str(run))
    refuse_unwritable(out, config, found.precision.params if dtype is None else dtype)
    kept, texts, lacking = found.tokenizer, {}, found.lacking
    if kept is not None:
        texts = tokenizer_files(kept.vocabulary, run)
        if not texts:
            lacking = f"a {type(kept.vocabulary).__name__} is no tokenizer.json"
    if lacking:
        warnings.warn(f"{out} is written without a tokenizer: {lacking}", stacklevel=2)
    ids = json.loads(texts[GENERATION]) if texts else {}
    write_folder(
        out,
        config,
        found.params,
        dtype=dtype,
        max_seq=_positions(run),
        bos=ids.get("bos_token_id"),
        eos=ids.get("eos_token_id", None if kept is None else kept.vocabulary.eos),
        texts=texts,
    )
    return out


def _positions(run: Path) -> int | None:
    """The most that are known to have been trained: those of a row of the run's data, and of the
    folder it began with, as far as the run keeps them."""
    stored = (read_config(run) or {}).get("experiment", {})
    data = stored.get("data")
    known = [data.get("seq") if isinstance(data, dict) else None, kept_positions(run)]
    return max((n for n in known if type(n) is int and n > 0), default=None)
