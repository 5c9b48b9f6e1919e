"""Which kernels an assembly's layers run, as the traced program chooses them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp

from jaxtrain.attention.kernels import PlatformKernel
from jaxtrain.attention.kernels import choose as choose_attention
from jaxtrain.mesh.sharding import ways
from jaxtrain.models.description import AttentionCall, ExpertCall, Operation, operations
from jaxtrain.moe.grouped import Asked
from jaxtrain.moe.kernels import PlatformGroupedMatmul
from jaxtrain.moe.kernels import choose as choose_grouped
from jaxtrain.step.assembly import Assembly


def kernels_of(
    assembly: Assembly, kind: type[AttentionCall | ExpertCall]
) -> tuple[str, ...] | None:
    """The distinct kernels of the model's layers, of attention or of experts; None where it says
    nothing of them."""
    if assembly.description is None or assembly.description.tokens is None:
        return None
    found = (kernel_of(assembly, call) for call in calls(assembly) if isinstance(call, kind))
    return tuple(dict.fromkeys(map(str, found)))


def kernel_of(assembly: Assembly, call: Operation) -> Any:
    """The kernel that runs an attention or a mixture, the platform's own settled; None of another
    operation."""
    execution = assembly.experiment.execution
    if isinstance(call, ExpertCall):
        grouped, asked = execution.grouped_matmul, asked_of(assembly, call)
        is_platforms = isinstance(grouped, PlatformGroupedMatmul)
        return choose_grouped(grouped.platform, asked) if is_platforms else grouped
    if not isinstance(call, AttentionCall):
        return None
    kernel = execution.attention
    if not isinstance(kernel, PlatformKernel):
        return kernel
    return choose_attention(
        kernel.platform,
        dtype=jnp.dtype(assembly.experiment.precision.compute),
        seq=local_rows(assembly)[1],
        head_dim=call.head_dim,
        documents="segments" in assembly.fields,
        window=call.window,
        softcap=call.softcap,
        checked=assembly.explicit and assembly.check_vma,
        capability=kernel.capability,
    )


def asked_of(assembly: Assembly, call: ExpertCall) -> Asked:
    """What a mixture asks of its kernel on a device. In gspmd's shard_map types are checked."""
    rows, seq = local_rows(assembly)
    first, tensor = call.weights[0], ways(assembly.tensor, assembly.sizes)
    return Asked(
        rows * seq * call.per_token,
        call.experts,
        first.rows,
        first.columns // tensor,
        jnp.dtype(assembly.experiment.precision.compute),
        bool(assembly.sizes) and (assembly.check_vma or not assembly.explicit),
    )


def calls(assembly: Assembly) -> Iterator[Operation]:
    """Operations of all layers, in order."""
    return (each for block in assembly.described.layers for each in operations(block))


def local_rows(assembly: Assembly) -> tuple[int, int]:
    """(rows, seq) of a microbatch on a device."""
    name = assembly.described.tokens
    _, rows, seq = assembly.abstract_batch()[name].shape
    return rows // ways(assembly.batch_splits[name][1], assembly.sizes), seq
