"""Weights in and out of folders as Hugging Face `transformers` writes them.

A model family (families/) maps its config.json and tensors to ours. Weights are read and written
tensor by tensor, each device's shard from the slices it needs, so that no host ever needs memory
for a model.

Does not belong here: tokenizers (data/), checkpoints of a run (checkpoint/).

Read: the safetensors format (8 bytes of length, a JSON header, the bytes), and Wolf et al.,
"Transformers: State-of-the-Art Natural Language Processing" (2020).
"""

from __future__ import annotations

from jaxtrain.huggingface.config import read_config, require_decoder
from jaxtrain.huggingface.config import read_config as huggingface_config  # outside
from jaxtrain.huggingface.peft import huggingface_lora
from jaxtrain.huggingface.read import read_params, refuse_unfit
from jaxtrain.huggingface.write import write_folder

__all__ = [
    "huggingface_config",
    "huggingface_lora",
    "read_config",
    "read_params",
    "refuse_unfit",
    "require_decoder",
    "write_folder",
]
