"""Weights in and out of folders as Hugging Face `transformers` writes them.

A family is a value (`families.py`): how its config.json reads as a `DecoderConfig` and back, and
which of its tensors holds which leaf of ours. Weights travel tensor by tensor, each device's shard
out of the slices it needs, so that no host ever holds a model.

Does not belong here: tokenizers (data/), checkpoints of a run (the rest of checkpoint/).

Read: the safetensors format (8 bytes of length, a JSON header, the bytes), and Wolf et al.,
"Transformers: State-of-the-Art Natural Language Processing" (2020).
"""

from __future__ import annotations

from jaxtrain.weights.huggingface.config import held_in_folders, read_config
from jaxtrain.weights.huggingface.config import read_config as huggingface_config  # outside
from jaxtrain.weights.huggingface.read import read_params, refuse_unfit
from jaxtrain.weights.huggingface.write import write_folder

__all__ = [
    "held_in_folders",
    "huggingface_config",
    "read_config",
    "read_params",
    "refuse_unfit",
    "write_folder",
]
