"""Matmul FLOPs that the source asks of a device at the most, to hold a compiled step against.

A backward pass makes two products for each of the forward pass, and makes again what `remat` does
not keep. What a program computes beyond that is the compiler's doing: XLA makes values again to fit
a program into memory, and says so only in its log, if at all.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from jaxtrain.attention.blockwise import Blockwise
from jaxtrain.attention.cudnn import Cudnn
from jaxtrain.attention.kernels import PlatformKernel, Reference, choose
from jaxtrain.attention.online_softmax import AttentionMask, Scoring
from jaxtrain.attention.splash import Splash
from jaxtrain.attention.tiling import Tiling
from jaxtrain.attention.triton import Triton
from jaxtrain.collectives.compressed import Compressed
from jaxtrain.collectives.powersgd import PowerSGD
from jaxtrain.mesh.sharding import ways
from jaxtrain.models.description import (
    AttentionCall,
    ColumnParallel,
    ExpertCall,
    Operation,
    RowParallel,
    operations,
)
from jaxtrain.nn.moe import block_count, block_rows
from jaxtrain.optim.optimizer import ELEMENTWISE, Adafactor, Lamb, Lars
from jaxtrain.step.assembly import Assembly

WITHOUT_PRODUCTS = (*ELEMENTWISE, Adafactor, Lamb, Lars)
OPAQUE = (Cudnn, Triton, Splash)
"""Kernels whose products no program shows."""


def asked_flops(assembly: Assembly) -> float | None:
    """Matmul FLOPs of one device's step, as `telemetry.hlo.dot_flops` counts a program's.

    None where they are not known: of a model, a kernel or an optimizer of one's own, of Muon and
    PowerSGD, which multiply matrices themselves, of frozen leaves and adapters, of a pipeline, and
    where XLA splits the work.
    """
    e = assembly.experiment
    if assembly.description is None or assembly.pipeline is not None:
        return None
    if e.fine_tuning is not None and (assembly.frozen or e.fine_tuning.lora is not None):
        return None
    if assembly.sizes and not assembly.explicit:
        return None
    reducer = e.execution.reducer
    multiplies = isinstance(reducer, Compressed) and isinstance(reducer.codec, PowerSGD)
    if multiplies or not isinstance(e.optimizer, WITHOUT_PRODUCTS):
        return None
    model, tensor = assembly.described, ways(assembly.tensor, assembly.sizes)
    micro, rows, seq = assembly.abstract_batch()[model.tokens].shape
    rows //= ways(assembly.batch_splits[model.tokens][1], assembly.sizes)
    total = 3 * 2 * rows * seq * model.embed * model.head.padded / tensor
    for call in (each for block in model.layers for each in operations(block)):
        asked = _operation_flops(assembly, call, rows, seq)
        if asked is None:
            return None
        total += asked / tensor
    return micro * total


def attention_kernels(assembly: Assembly) -> tuple[str, ...] | None:
    """The distinct attention kernels of the model's layers; None where it says nothing of them."""
    if assembly.description is None or assembly.description.tokens is None:
        return None
    seq = assembly.abstract_batch()[assembly.description.tokens].shape[2]
    calls = (each for block in assembly.described.layers for each in operations(block))
    found = (_kernel(assembly, call, seq) for call in calls if isinstance(call, AttentionCall))
    return tuple(dict.fromkeys(map(str, found)))


def opaque_flops(assembly: Assembly) -> float:
    """FLOPs of one device's step in attention kernels that no program shows, of the (query, key)
    pairs the mask leaves of whole rows: two products forward, and once more where remat keeps no
    output; five backward (Dao et al. 2022)."""
    if not attention_kernels(assembly):
        return 0.0
    again = 1 if assembly.loop.remat in ("full", "dots") else 0
    seq, total = assembly.abstract_batch()[assembly.described.tokens].shape[2], 0.0
    for call in (each for block in assembly.described.layers for each in operations(block)):
        if isinstance(call, AttentionCall) and isinstance(_kernel(assembly, call, seq), OPAQUE):
            total += call.flops.flops(call.flops.pairs(seq)) * (1 + again + 2.5)
    return total * assembly.largest_batch / assembly.spec.devices


def _operation_flops(assembly: Assembly, call: Operation, rows: int, seq: int) -> float | None:
    """Of one operation on all devices of `tensor` together: three times a forward pass, and what is
    made again."""
    remat, tokens = assembly.loop.remat, rows * seq
    if isinstance(call, ColumnParallel | RowParallel):
        again = 3 + (remat in ("full", "attention"))
        return 2 * tokens * sum(weight.size for weight in call.weights) * again
    if isinstance(call, AttentionCall):
        return _attention_flops(assembly, call, rows, seq)
    if not isinstance(call, ExpertCall):
        return 0.0
    tensor, chosen = ways(assembly.tensor, assembly.sizes), tokens * call.per_token
    met = block_count(chosen, call.experts) * block_rows(chosen, call.experts)
    routed = met * sum(weight.size for weight in call.weights) + tokens * call.router.size * tensor
    return 2 * routed * (3 + (remat != "none"))


def _attention_flops(assembly: Assembly, a: AttentionCall, rows: int, seq: int) -> float | None:
    """Of the products of queries with keys, and of weights with values, in all heads."""
    remat, kernel = assembly.loop.remat, _kernel(assembly, a, seq)
    if isinstance(kernel, OPAQUE):
        return 0.0
    one = 2 * rows * a.heads * a.head_dim
    if isinstance(kernel, Reference):
        return one * seq * seq * (6 + 2 * (remat != "none"))
    if not isinstance(kernel, Blockwise):
        return None
    mask = Scoring(AttentionMask(causal=a.causal, window=a.window), scale=1.0)
    tiling = Tiling(kernel.query_block, kernel.key_block, seq, mask, None)
    return one * tiling.pairs() * (7 + 2 * (remat in ("full", "dots")))


def _kernel(assembly: Assembly, a: AttentionCall, seq: int) -> Any:
    """The kernel that runs: `None` of an experiment is the platform's own."""
    e, kernel = assembly.experiment, assembly.experiment.execution.attention
    if not isinstance(kernel, PlatformKernel):
        return kernel
    return choose(
        kernel.platform,
        dtype=jnp.dtype(e.precision.compute),
        seq=seq,
        head_dim=a.head_dim,
        documents="segments" in assembly.fields,
        window=a.window,
        softcap=a.softcap,
        checked=assembly.explicit and assembly.check_vma,
        capability=kernel.capability,
    )
