"""Matmul FLOPs that the source asks of a device at the most, to hold a compiled step against.

A backward pass makes two products for each of the forward pass, and makes again what `remat` does
not keep. What a program computes beyond that is the compiler's doing: XLA makes values again to fit
a program into memory, and says so only in its log, if at all.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from jaxtrain.collectives.compressed import Compressed
from jaxtrain.collectives.powersgd import PowerSGD
from jaxtrain.mesh.sharding import ways
from jaxtrain.models.block import AttentionConfig, BlockConfig, MoeConfig
from jaxtrain.nn.attention import Cudnn, PlatformKernel, Reference, Splash, choose
from jaxtrain.nn.blockwise import Blockwise
from jaxtrain.nn.moe import block_count, block_rows
from jaxtrain.nn.online_softmax import AttentionMask, Scoring
from jaxtrain.nn.tiling import Tiling
from jaxtrain.optim.optimizer import ELEMENTWISE, Adafactor, Lamb, Lars
from jaxtrain.step.assembly import Assembly

WITHOUT_PRODUCTS = (*ELEMENTWISE, Adafactor, Lamb, Lars)
OPAQUE = (Cudnn, Splash)
"""Kernels whose products no program shows."""


def asked_flops(assembly: Assembly) -> float | None:
    """Matmul FLOPs of one device's step, as `telemetry.hlo.dot_flops` counts a program's.

    None where they are not known: of a model, a kernel or an optimizer of one's own, of Muon and
    PowerSGD, which multiply matrices themselves, of frozen leaves and adapters, of a pipeline, and
    where XLA splits the work.
    """
    e = assembly.experiment
    if not assembly.built_in or assembly.pipeline is not None:
        return None
    if e.fine_tuning is not None and (assembly.frozen or e.fine_tuning.lora is not None):
        return None
    if assembly.sizes and not assembly.explicit:
        return None
    reducer = e.execution.reducer
    multiplies = isinstance(reducer, Compressed) and isinstance(reducer.codec, PowerSGD)
    if multiplies or not isinstance(e.optimizer, WITHOUT_PRODUCTS):
        return None
    micro, rows, seq = assembly.abstract_batch()["tokens"].shape
    rows //= ways(assembly.batch_splits["tokens"][1], assembly.sizes)
    model, tensor = e.model, ways(assembly.tensor, assembly.sizes)
    total = 3 * 2 * rows * seq * model.embed * model.padded_vocab / tensor
    for block in model.blocks:
        attended = _attended(assembly, block.attention, rows, seq)
        if attended is None:
            return None
        total += attended / tensor + _products(assembly, block, rows * seq, tensor)
    return micro * total


def _products(assembly: Assembly, block: BlockConfig, tokens: int, tensor: int) -> float:
    """Of a block's matrices: three times a forward pass, and what is made again."""
    remat, embed = assembly.loop.remat, assembly.experiment.model.embed
    a, mlp = block.attention, block.mlp
    matrices = 2 + mlp.gated
    weights = embed * a.size(embed) * 2 * (a.heads + a.key_heads)
    again = 3 + (remat in ("full", "attention"))
    if not isinstance(mlp, MoeConfig):
        return 2 * tokens * (weights + matrices * embed * mlp.hidden) / tensor * again
    chosen = tokens * mlp.experts_per_token
    rows = block_count(chosen, mlp.experts) * block_rows(chosen, mlp.experts)
    routed = 2 * (rows * matrices * embed * mlp.hidden / tensor + tokens * embed * mlp.experts)
    return 2 * tokens * weights / tensor * again + routed * (3 + (remat != "none"))


def _attended(assembly: Assembly, a: AttentionConfig, rows: int, seq: int) -> float | None:
    """Of the products of queries with keys, and of weights with values, in all heads."""
    remat, embed = assembly.loop.remat, assembly.experiment.model.embed
    kernel = _kernel(assembly, a, seq)
    if isinstance(kernel, OPAQUE):
        return 0.0
    one = 2 * rows * a.heads * a.size(embed)
    if isinstance(kernel, Reference):
        return one * seq * seq * (6 + 2 * (remat != "none"))
    if not isinstance(kernel, Blockwise):
        return None
    mask = Scoring(AttentionMask(window=a.window), scale=1.0)
    tiling = Tiling(kernel.query_block, kernel.key_block, seq, mask, None)
    return one * tiling.pairs() * (7 + 2 * (remat in ("full", "dots")))


def _kernel(assembly: Assembly, a: AttentionConfig, seq: int) -> Any:
    """The kernel that runs: `None` of an experiment is the platform's own."""
    e, kernel = assembly.experiment, assembly.experiment.execution.attention
    if not isinstance(kernel, PlatformKernel):
        return kernel
    return choose(
        kernel.platform,
        dtype=jnp.dtype(e.precision.compute),
        seq=seq,
        head_dim=a.size(e.model.embed),
        segments="segments" in assembly.fields,
        softcap=a.softcap is not None,
        checked=assembly.explicit and assembly.check_vma,
    )
