"""A run's weights as a folder that `transformers` loads, adapters merged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jaxtrain.checkpoint.huggingface import write_folder
from jaxtrain.data.tokenizer import ByteTokenizer, HuggingFaceVocabulary
from jaxtrain.mesh.mesh import MeshSpec
from jaxtrain.train.loading import TOKENIZER, is_run, load
from jaxtrain.train.session import CACHE_DIR


def export(
    run: str | Path,
    out: str | Path,
    *,
    step: int | None = None,
    averaged: bool | None = None,
    dtype: Any = None,
    mesh: MeshSpec | None = None,
    cache_dir: str | Path = CACHE_DIR,
) -> Path:
    """Write the model of a run directory as the folder `out`; with its tokenizer, if its data has
    one.

    step: None for the newest. averaged: the averaged weights; None where the run keeps any. dtype:
    of the files, None that of the parameters. mesh: over which the parameters are split on their
    way; None puts all on one device. With several processes all call this.
    Raises ValueError where there is no such run or step, no family has its model, or `out` is there
    already; DamagedCheckpoint.
    """
    if not is_run(Path(run)):
        raise ValueError(f"{run} has no checkpoints; give a run directory")
    found = load(run, step=step, averaged=averaged, mesh=mesh, cache_dir=cache_dir)
    vocabulary, texts = found.vocabulary, {}
    if isinstance(vocabulary, ByteTokenizer):
        vocabulary = vocabulary.published()
    if isinstance(vocabulary, HuggingFaceVocabulary):
        texts[TOKENIZER] = vocabulary.json
        kind = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": vocabulary.eos_token}
        texts["tokenizer_config.json"] = json.dumps(kind, indent=2) + "\n"
    eos = None if vocabulary is None else vocabulary.eos
    write_folder(out, found.config, found.params, dtype=dtype, eos=eos, texts=texts)
    return Path(out)
