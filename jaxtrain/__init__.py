"""jaxtrain: a sharded training stack on JAX. One experiment file and one mesh file.

    import jaxtrain
    jaxtrain.train("experiments/stdlib_lm.py", jaxtrain.mesh_from_axes(fsdp=8))

Names are imported when they are first used: `import jaxtrain` does not import JAX, so that device
counts and platforms can still be set.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_WHERE = {
    "jaxtrain.checkpoint.manager": ("CheckpointManager",),
    "jaxtrain.checkpoint.huggingface": ("huggingface_config",),
    "jaxtrain.checkpoint.policy": (
        "Best",
        "Keep",
        "LocalTier",
        "Minutes",
        "SavePolicy",
    ),
    "jaxtrain.collectives.choice": ("Collectives",),
    "jaxtrain.collectives.compressed": (
        "Compressed",
        "Guard",
    ),
    "jaxtrain.collectives.compression": (
        "Fp8",
        "Int8",
        "RandomK",
        "Sign",
        "TopK",
    ),
    "jaxtrain.collectives.hierarchical": ("Hierarchical",),
    "jaxtrain.collectives.lax_form": ("Lax",),
    "jaxtrain.collectives.powersgd": ("PowerSGD",),
    "jaxtrain.collectives.recursive": ("Recursive",),
    "jaxtrain.collectives.ring": ("Ring",),
    "jaxtrain.data": (
        "BatchRamp",
        "BigramChain",
        "BpeTokenizer",
        "ByteTokenizer",
        "JsonLines",
        "Mixture",
        "Parquet",
        "StdlibSource",
        "TextData",
        "TextFiles",
        "TokenFiles",
        "TokenizerFile",
    ),
    "jaxtrain.experiment": (
        "Evaluation",
        "Execution",
        "Experiment",
        "FineTuning",
        "FromHuggingFace",
        "FromRun",
        "LoRA",
        "Logging",
        "Sample",
        "load_experiment",
    ),
    "jaxtrain.mesh.mesh": (
        "MeshSpec",
        "load_mesh",
        "mesh_from_axes",
    ),
    "jaxtrain.mesh.sharding": (
        "ShardingRules",
        "data_parallel",
        "fsdp",
        "tensor",
        "zero1",
        "zero2",
    ),
    "jaxtrain.models.block": (
        "AttentionConfig",
        "BlockConfig",
        "MlpConfig",
        "MoeConfig",
        "gelu_exact",
        "gelu_tanh",
        "silu",
    ),
    "jaxtrain.models.decoder": ("DecoderConfig",),
    "jaxtrain.nn.norm": (
        "LayerNorm",
        "RMSNorm",
    ),
    "jaxtrain.nn.param": ("Initialisation",),
    "jaxtrain.nn.rotary": (
        "LinearScaling",
        "Llama3Scaling",
        "Rope",
    ),
    "jaxtrain.nn.stack": ("LayerLoop",),
    "jaxtrain.optim.optimizer": (
        "Adafactor",
        "AdamW",
        "Lamb",
        "Lars",
        "Lion",
        "Muon",
        "SGD",
    ),
    "jaxtrain.optim.precision": (
        "LossScale",
        "Precision",
        "bf16",
        "fp16",
        "fp32",
    ),
    "jaxtrain.optim.rate": ("ScaledRate",),
    "jaxtrain.optim.schedule": (
        "Constant",
        "InverseSqrt",
        "WarmupCosine",
        "WarmupLinear",
        "WarmupStableDecay",
    ),
    "jaxtrain.pipeline.config": ("Pipeline",),
    "jaxtrain.telemetry.profiler": ("Steps",),
    "jaxtrain.checkpoint.verify": ("verify",),
    "jaxtrain.train.certify": ("certify",),
    "jaxtrain.train.check": ("check",),
    "jaxtrain.train.export": ("export",),
    "jaxtrain.train.generate": (
        "generate",
        "generate_text",
    ),
    "jaxtrain.train.loop": (
        "Result",
        "train",
    ),
}
_MODULE_OF = {name: module for module, names in _WHERE.items() for name in names}
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'jaxtrain' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
