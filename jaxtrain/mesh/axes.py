"""The two vocabularies: names of mesh axes (physical) and of logical axes (of tensors).

The sets share no word, so a name alone says which of the two is meant.
"""

from __future__ import annotations

MESH_AXES = ("replica", "data", "fsdp", "stage", "expert", "context", "tensor")
"""`replica` loosely coupled copies, `data` replicate, `fsdp` shard at rest (ZeRO-3), `stage`
pipeline, `expert`, `context` sequence, `tensor` (Megatron)."""

BATCH_AXES = ("replica", "data", "fsdp", "expert")
"""Mesh axes over which the batch is split."""

TOKEN_AXES = (*BATCH_AXES, "context")
"""Mesh axes along which devices have different tokens of the same microbatch."""

LOGICAL_AXES = (
    "batch",
    "seq",
    "embed",
    "heads",
    "kv_heads",
    "head_dim",
    "latent",
    "mlp",
    "vocab",
    "layers",
    "chunks",
    "experts",
    "height",
    "width",
    "channels",
    "classes",
)

STACKING_AXES = ("layers", "chunks", "experts")
"""Logical axes that stack whole tensors: an optimizer treats each slice as a tensor of its own."""


def keeps_dtype(name: str, dims: int) -> bool:
    """True if a leaf with `dims` dims, stacking ones not counted, is used in its stored dtype.

    Leaves with one dim are small, and norms are computed in fp32. Routers and their adapters keep
    their dtype so that choices depend on rounding as little as possible (Fedus et al. 2022)."""
    return dims < 2 or name.split(".")[-1].startswith("router")
