"""Upper bound of a device's matmul FLOPs by the source, to compare a compiled step with.

A backward pass has two products for each product of the forward pass, and recomputes what `remat`
does not keep. Any FLOPs beyond that are the compiler's: XLA recomputes values to fit a program into
memory, and reports it only in its log, if at all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from jaxtrain.attention.blockwise import Blockwise
from jaxtrain.attention.kernels import Reference
from jaxtrain.attention.online_softmax import AttentionMask, Scoring
from jaxtrain.attention.tiling import Tiling
from jaxtrain.compression.compressed import Compressed
from jaxtrain.compression.powersgd import PowerSGD
from jaxtrain.context.methods import tiles_of
from jaxtrain.losses.cross_entropy import chunk_count
from jaxtrain.mesh.sharding import ways
from jaxtrain.moe.block_loop import BlockLoop
from jaxtrain.moe.grouped import block_count, block_rows
from jaxtrain.operations.attention import AttentionCall
from jaxtrain.operations.block import attention_of, mixture_of, mixtures, operations
from jaxtrain.operations.experts import ExpertCall
from jaxtrain.operations.operation import Operation
from jaxtrain.operations.recompute import outputs_again
from jaxtrain.optim.optimizer import ELEMENTWISE, Adafactor, Lamb, Lars
from jaxtrain.step.assembly import Assembly
from jaxtrain.step.running_kernels import asked_of, expert_chunks, kernel_of, local_rows

WITHOUT_PRODUCTS = (*ELEMENTWISE, Adafactor, Lamb, Lars)


def is_opaque(kernel: object) -> bool:
    """Returns True for a kernel of one platform, whose products no program shows."""
    return hasattr(kernel, "runs_on")


def calls(assembly: Assembly) -> Iterator[Operation]:
    """Operations of all layers, in order."""
    return (call for block in assembly.described.layers for call in operations(block))


def asked_flops(assembly: Assembly) -> float | None:
    """Returns the matmul FLOPs of one device's step, counted as `program`'s `dot_flops` does.

    None if they are not known: for a model, a kernel or an optimizer of one's own; for Muon and
    PowerSGD, which multiply matrices themselves; for frozen leaves and adapters; for a pipeline;
    and if XLA splits the work.
    """
    e = assembly.experiment
    if assembly.description is None or assembly.pipeline is not None:
        return None
    if e.lora is not None or (e.fine_tuning is not None and assembly.frozen):
        return None
    if assembly.sizes and not assembly.explicit:
        return None
    reducer = e.execution.reducer
    multiplies = isinstance(reducer, Compressed) and isinstance(reducer.codec, PowerSGD)
    if multiplies or not isinstance(e.optimizer, WITHOUT_PRODUCTS):
        return None
    model, roles = assembly.described, assembly.roles
    vocab, tensor = (ways(axes, assembly.sizes) for axes in (roles.vocab, roles.stream))
    rows, seq = local_rows(assembly)
    products = model.head.products(chunk_count(rows * seq, rows, assembly.chunk_tokens))
    total = products * 2 * rows * seq * model.embed * model.head.padded / vocab
    for call in calls(assembly):
        operation_flops = _operation_flops(assembly, call)
        if operation_flops is None:
            return None
        total += operation_flops / tensor
    return e.microbatches * (total + _for_outputs(assembly) / tensor)


def opaque_flops(assembly: Assembly) -> float:
    """Returns the FLOPs of one device's step in kernels that the program does not show.

    Attention: two forward products of the unmasked (query, key) pairs of unsplit rows, once more if
      remat keeps no output, and five backward (Dao et al. 2022). Experts: all rows that are
      multiplied.
    """
    remat, total = assembly.loop.remat, 0.0
    microbatches = assembly.experiment.microbatches
    stages = ways(assembly.roles.layers, assembly.sizes)
    for call, forward in _opaque_calls(assembly):
        if (mixture := mixture_of(call)) is not None:
            times = 3 + (remat != "none" or expert_chunks(assembly, mixture) > 1)
        else:
            times = 1 + (remat in ("full", "dots")) + 2.5
        total += forward * microbatches * times / stages
    return total


def least_kernel_flops(assembly: Assembly) -> float:
    """Returns the least FLOPs of one run of such a kernel; 0 if there is none.

    Attention: a forward pass; where rows are split over devices, one between the tokens of two of
      them, or 0 with a window, whose last tiles are small. Experts: one product of a chunk of rows.
    """
    flops = [math.inf]
    for call, forward in _opaque_calls(assembly):
        if (mixture := mixture_of(call)) is not None:
            flops.append(forward / len(mixture.weights) / expert_chunks(assembly, mixture))
        elif (attention := attention_of(call)) is not None:
            flops.append(forward * _part_of_row(assembly, attention))
    return 0.0 if min(flops) == math.inf else min(flops)


def _part_of_row(assembly: Assembly, attention: AttentionCall) -> float:
    """Returns the least part of a device's (query, key) pairs that one kernel call has.

    The n parts of a row that keys travel between have n squared pairs of parts. In zig-zag order
    all calls have as many, half of those of two parts; in contiguous order a part with itself has
    the fewest, half of them too.
    """
    method = assembly.context
    if method is None:
        return 1.0
    devices = ways(assembly.roles.seq, assembly.sizes)
    if (parts := devices // method.trading(devices)) == 1:
        return 1.0
    seq = assembly.abstract_batch()[assembly.described.tokens].shape[2]
    if attention.window is not None and attention.window < seq:
        return 0.0
    pairs = (seq / parts) ** 2 / (2 if attention.causal else 1)
    return pairs * parts / replace(attention, needed=None).flops.pairs(seq)


def _opaque_calls(assembly: Assembly) -> list[tuple[Operation, float]]:
    """Returns the calls of kernels that the program does not show, with the FLOPs of a forward pass
    of one device's microbatch in one layer."""
    if assembly.description is None or assembly.description.tokens is None:
        return []
    seq = assembly.abstract_batch()[assembly.described.tokens].shape[2]
    roles = assembly.roles
    hidden, stages = (ways(axes, assembly.sizes) for axes in (roles.mlp, roles.layers))
    rows = assembly.largest_batch / assembly.experiment.microbatches
    opaque_calls: list[tuple[Operation, float]] = []
    for call in calls(assembly):
        if not is_opaque(kernel_of(assembly, call)):
            continue
        if (mixture := mixture_of(call)) is not None:
            opaque_calls.append((call, _expert_flops(assembly, mixture) / hidden))
        elif (attention := attention_of(call)) is not None:
            computed = replace(attention, needed=None).flops
            batch_flops = computed.flops(computed.pairs(seq)) * rows
            opaque_calls.append((call, batch_flops * stages / assembly.spec.devices))
    return opaque_calls


def _operation_flops(assembly: Assembly, call: Operation) -> float | None:
    """Returns the FLOPs of one operation on all devices of `tensor` together: three times a forward
    pass, and recomputation. None if the kernel's are not known."""
    if (mixture := mixture_of(call)) is not None:
        return _mixture_flops(assembly, mixture)
    if (attention := attention_of(call)) is not None:
        return _attention_flops(assembly, attention)
    remat, total = assembly.loop.remat, 0.0
    for node in call.nodes(0, 1):
        total += node.flops(*local_rows(assembly)) * (3 + (not node.is_saved(remat)))
    return total


def _mixture_flops(assembly: Assembly, call: ExpertCall) -> float | None:
    kernel = kernel_of(assembly, call)
    if not isinstance(kernel, BlockLoop) and not is_opaque(kernel):
        return None
    again = assembly.loop.remat != "none" or expert_chunks(assembly, call) > 1
    return _mixture_forward(assembly, call) * (3 + again)


def _for_outputs(assembly: Assembly) -> float:
    """FLOPs of mixtures in chunks, run once more for outputs that the remat policy reads."""
    model, total = assembly.described, 0.0
    alone = (*model.prefix.values(), *model.suffix.values())
    for body, turns in [((block,), 1) for block in alone] + [(model.period, model.periods)]:
        in_body = [call for block in body for call in mixtures(block)]
        for call, again in zip(in_body, outputs_again(body, assembly.loop.remat), strict=True):
            if again and expert_chunks(assembly, call) > 1:
                total += turns * _mixture_forward(assembly, call)
    return total


def _mixture_forward(assembly: Assembly, call: ExpertCall) -> float:
    kernel, hidden = kernel_of(assembly, call), ways(assembly.roles.mlp, assembly.sizes)
    visible = 0.0 if is_opaque(kernel) else _expert_flops(assembly, call)
    replicated = [call.router, *(w for w in call.shared if w.columns == 1)]
    split_size = sum(w.size for w in call.shared if w.columns > 1)
    size = sum(w.size for w in replicated) * hidden + split_size
    return visible + 2 * math.prod(local_rows(assembly)) * size


def _expert_flops(assembly: Assembly, call: ExpertCall) -> float:
    """Forward FLOPs of a mixture's products, for as many rows as its kernel has blocks for."""
    problem, largest_block = asked_of(assembly, call), kernel_of(assembly, call).largest_block
    sizes = (problem.rows, problem.experts, largest_block)
    padded_rows = block_count(*sizes) * block_rows(*sizes) * expert_chunks(assembly, call)
    return 2 * padded_rows * sum(weight.size for weight in call.weights)


def _attention_flops(assembly: Assembly, a: AttentionCall) -> float | None:
    """FLOPs of query-key and weight-value products in all heads; None if not known."""
    remat, (rows, seq), roles = assembly.loop.remat, local_rows(assembly), assembly.roles
    per_pair = 2 * rows * a.heads * a.head_dim
    full_mask = AttentionMask(causal=a.causal, window=a.window)
    tiles = [(1.0, seq, full_mask)]
    if assembly.context is not None:
        tiles = tiles_of(assembly.context, ways(roles.seq, assembly.sizes), seq, full_mask)
    total = 0.0
    for count, size, mask in tiles:
        kernel = kernel_of(assembly, a, size)
        if isinstance(kernel, Reference) and assembly.context is None:
            total += per_pair * size * size * (6 + 2 * (remat != "none"))
        elif isinstance(kernel, Blockwise):
            blocks = (min(kernel.query_block, size), min(kernel.key_block, size))
            tiling = Tiling(*blocks, seq=size, scoring=Scoring(mask, scale=1.0), starts=None)
            total += per_pair * count * tiling.pairs() * (7 + 2 * (remat in ("full", "dots")))
        elif not is_opaque(kernel):
            return None
    return total
