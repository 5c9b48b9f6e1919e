"""Matmul FLOPs that the source asks of a device at the most, to hold a compiled step against.

A backward pass makes two products for each of the forward pass, and makes again what `remat` does
not keep. What a program computes beyond that is the compiler's doing: XLA makes values again to fit
a program into memory, and says so only in its log, if at all.
"""

from __future__ import annotations

import math
from dataclasses import replace

import jax
import jax.numpy as jnp

from jaxtrain.attention.blockwise import Blockwise
from jaxtrain.attention.cudnn import Cudnn
from jaxtrain.attention.kernels import Reference
from jaxtrain.attention.online_softmax import AttentionMask, Scoring
from jaxtrain.attention.splash import Splash
from jaxtrain.attention.tiling import Tiling
from jaxtrain.attention.triton import Triton
from jaxtrain.collectives.compressed import Compressed
from jaxtrain.collectives.powersgd import PowerSGD
from jaxtrain.context.schemes import scheme
from jaxtrain.mesh.sharding import STAGE, ways
from jaxtrain.models.description import (
    AttentionCall,
    ExpertCall,
    Operation,
    Product,
)
from jaxtrain.moe.block_loop import BlockLoop
from jaxtrain.moe.grouped import block_count, block_rows
from jaxtrain.moe.megablox import Megablox
from jaxtrain.moe.triton_blocks import TritonBlocks
from jaxtrain.optim.optimizer import ELEMENTWISE, Adafactor, Lamb, Lars
from jaxtrain.step.assembly import Assembly
from jaxtrain.step.running_kernels import asked_of, calls, expert_chunks, kernel_of, local_rows

WITHOUT_PRODUCTS = (*ELEMENTWISE, Adafactor, Lamb, Lars)
OPAQUE = (Cudnn, Triton, Splash, Megablox, TritonBlocks)
"""Kernels whose products no program shows."""


def asked_flops(assembly: Assembly) -> float | None:
    """Matmul FLOPs of one device's step, as `telemetry.hlo`'s `dot_flops` counts a program's.

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
    rows, seq = local_rows(assembly)
    total = 3 * 2 * rows * seq * model.embed * model.head.padded / tensor
    for call in calls(assembly):
        asked = _operation_flops(assembly, call)
        if asked is None:
            return None
        total += asked / tensor
    return e.microbatches * total


def opaque_flops(assembly: Assembly) -> float:
    """FLOPs of one device's step in kernels that no program shows. Of attention: of the (query,
    key) pairs the mask leaves of whole rows two products forward, and once more where remat keeps
    no output; five backward (Dao et al. 2022). Of experts: of all rows that are multiplied."""
    remat, total = assembly.loop.remat, 0.0
    stages, microbatches = assembly.sizes.get(STAGE, 1), assembly.experiment.microbatches
    for call, forward in _opaque_calls(assembly):
        if isinstance(call, ExpertCall):
            times = 3 + (remat != "none")
        else:
            times = 1 + (remat in ("full", "dots")) + 2.5
        total += forward * microbatches * times / stages
    return total


def least_kernel_flops(assembly: Assembly) -> float:
    """FLOPs that each of those kernels has at the least, each time it runs; 0 where there is none.
    Of attention a forward pass, on a mesh with `context` none; of experts one product of a chunk of
    their rows."""
    found = [math.inf]
    for call, forward in _opaque_calls(assembly):
        if isinstance(call, ExpertCall):
            found.append(forward / len(call.weights) / expert_chunks(assembly, call))
        else:
            found.append(0.0 if assembly.context is not None else forward)
    return 0.0 if min(found) == math.inf else min(found)


def _opaque_calls(assembly: Assembly) -> list[tuple[Operation, float]]:
    """The calls of kernels that no program shows, with the FLOPs of a forward pass of one device's
    microbatch in one layer."""
    if assembly.description is None or assembly.description.tokens is None:
        return []
    seq = assembly.abstract_batch()[assembly.described.tokens].shape[2]
    tensor, stages = ways(assembly.tensor, assembly.sizes), assembly.sizes.get(STAGE, 1)
    rows = assembly.largest_batch / assembly.experiment.microbatches
    found: list[tuple[Operation, float]] = []
    for call in calls(assembly):
        if not isinstance(kernel_of(assembly, call), OPAQUE):
            continue
        if isinstance(call, ExpertCall):
            found.append((call, _expert_flops(assembly, call) / tensor))
        elif isinstance(call, AttentionCall):
            computed = replace(call, needed=None).flops
            whole = computed.flops(computed.pairs(seq)) * rows
            found.append((call, whole * stages / assembly.spec.devices))
    return found


def _operation_flops(assembly: Assembly, call: Operation) -> float | None:
    """Of one operation on all devices of `tensor` together: three times a forward pass, and what is
    made again."""
    remat, (rows, seq) = assembly.loop.remat, local_rows(assembly)
    if isinstance(call, Product):
        again = 3 + (remat in ("full", "attention"))
        return 2 * rows * seq * sum(weight.size for weight in call.weights) * again
    if isinstance(call, AttentionCall):
        return _attention_flops(assembly, call)
    if not isinstance(call, ExpertCall):
        return 0.0
    kernel, tensor = kernel_of(assembly, call), ways(assembly.tensor, assembly.sizes)
    if not isinstance(kernel, (BlockLoop, *OPAQUE)):
        return None
    seen = 0.0 if isinstance(kernel, OPAQUE) else _expert_flops(assembly, call)
    again = 3 + (remat != "none" or expert_chunks(assembly, call) > 1)
    whole = [call.router, *(w for w in call.shared if w.columns == 1)]
    parts = sum(w.size for w in call.shared if w.columns > 1)
    every = sum(w.size for w in whole) * tensor + parts
    return (seen + 2 * rows * seq * every) * again


def _expert_flops(assembly: Assembly, call: ExpertCall) -> float:
    """Forward, of the products of a mixture, of as many rows as its kernel has blocks for."""
    asked, largest = asked_of(assembly, call), kernel_of(assembly, call).largest_block
    given = (asked.rows, asked.experts, largest)
    met = block_count(*given) * block_rows(*given) * expert_chunks(assembly, call)
    return 2 * met * sum(weight.size for weight in call.weights)


def _attention_flops(assembly: Assembly, a: AttentionCall) -> float | None:
    """Of the products of queries with keys, and of weights with values, in all heads."""
    remat, (rows, seq) = assembly.loop.remat, local_rows(assembly)
    one = 2 * rows * a.heads * a.head_dim
    whole = AttentionMask(causal=a.causal, window=a.window)
    tiles = [(1.0, seq, whole)] if assembly.context is None else _cut(assembly, whole)
    total = 0.0
    for count, size, mask in tiles:
        kernel = kernel_of(assembly, a, size)
        if isinstance(kernel, Reference) and assembly.context is None:
            total += one * size * size * (6 + 2 * (remat != "none"))
        elif isinstance(kernel, Blockwise):
            tiling = Tiling(
                min(kernel.query_block, size),
                *(min(kernel.key_block, size), size, Scoring(mask, scale=1.0), None),
            )
            total += one * count * tiling.pairs() * (7 + 2 * (remat in ("full", "dots")))
        elif not isinstance(kernel, OPAQUE):
            return None
    return total


def _cut(assembly: Assembly, mask: AttentionMask) -> list[tuple[float, int, AttentionMask]]:
    """The tiles (how many, tokens of each side, mask) that a device computes of rows that are cut,
    as if it had all heads; in contiguous order those of the last device."""
    method, seq = assembly.context, local_rows(assembly)[1]
    assert method is not None
    cut = ways(assembly.sequence, assembly.sizes)
    group = method.trading(cut)
    together = seq * group
    if group == cut:
        return [(1 / group, together, mask)]
    way = scheme(mask, method.order(cut), together)
    row = jax.ShapeDtypeStruct((1, together), jnp.int32)
    found = [(way.alone, way.own)]
    found += [
        (lambda x, hop=hop: way.queries(x, hop, 0), way.mask(hop)) for hop in range(1, way.hops + 1)
    ]
    shapes = [(jax.eval_shape(part, row).shape, each) for part, each in found]
    return [(count / group, size, each) for (count, size), each in shapes]
