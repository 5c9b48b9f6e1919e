"""Kernels that an assembly's layers run, as the traced program chooses them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax.numpy as jnp

from jaxtrain.attention.cudnn import Cudnn
from jaxtrain.attention.kernels import PlatformKernel
from jaxtrain.experiment.platform_kernels import platform_attention
from jaxtrain.mesh.sharding import ways
from jaxtrain.moe.grouped import Asked
from jaxtrain.moe.kernels import PlatformGroupedMatmul
from jaxtrain.moe.kernels import choose as choose_grouped
from jaxtrain.moe.room import chunk_count, sent_rows
from jaxtrain.operations.block import (
    Block,
    attention_of,
    attentions,
    mixture_of,
)
from jaxtrain.operations.experts import ExpertCall
from jaxtrain.operations.operation import Operation
from jaxtrain.step.assembly import Assembly


def kernels_of(
    assembly: Assembly, calls_in: Callable[[Block], Iterable[Operation]]
) -> tuple[str, ...] | None:
    """The distinct kernels of the layers' operations that `calls_in` yields, `attentions` or
    `mixtures`; None if the model's description does not name them."""
    if assembly.description is None or assembly.description.tokens is None:
        return None
    layers = assembly.described.layers
    kernels = (kernel_of(assembly, call) for block in layers for call in calls_in(block))
    return tuple(dict.fromkeys(map(str, kernels)))


def kernel_of(assembly: Assembly, call: Operation, tokens: int | None = None) -> Any:
    """The kernel of an attention or a mixture, after the platform's choice; None for another
    operation. tokens: numbers of queries and of keys, instead of a device's tokens of a row."""
    execution = assembly.experiment.execution
    if (mixture := mixture_of(call)) is not None:
        grouped, problem = execution.grouped_matmul, asked_of(assembly, mixture)
        is_platforms = isinstance(grouped, PlatformGroupedMatmul)
        if not is_platforms:
            return grouped
        return choose_grouped(grouped.platform, problem, grouped.capability)
    attention = attention_of(call)
    if attention is None:
        return None
    kernel = execution.attention
    if not isinstance(kernel, PlatformKernel):
        return kernel
    assert assembly.sequences is not None, "a batch has tokens where layers attend"
    checked = assembly.explicit and assembly.check_vma
    sequences = assembly.sequences
    if tokens is not None:
        sequences = sequences._replace(seq=tokens)
    return platform_attention(kernel, attention, sequences, checked=checked)


def documents_room(assembly: Assembly) -> int | None:
    """Smallest room for documents, in the mean of a row, among the layers that run cuDNN's
    attention on packed rows; None if there are none."""
    if assembly.description is None or "segments" not in assembly.fields:
        return None
    layers = assembly.described.layers
    kernels = [kernel_of(assembly, call) for block in layers for call in attentions(block)]
    return min((k.documents for k in kernels if isinstance(k, Cudnn)), default=None)


def asked_of(assembly: Assembly, call: ExpertCall) -> Asked:
    """The problem that a mixture gives its kernel on a device. gspmd's shard_map checks types."""
    first, roles = call.weights[0], assembly.roles
    tensor, devices = (ways(axes, assembly.sizes) for axes in (roles.mlp, roles.experts))
    rows, seq = local_rows(assembly)
    tokens = rows * seq // expert_chunks(assembly, call)
    routing = (call.per_token, call.experts, devices, call.routing_group, call.rows_of_group)
    return Asked(
        devices * sent_rows(tokens, *routing),
        call.experts // devices,
        first.rows,
        first.columns // tensor,
        jnp.dtype(assembly.experiment.precision.compute),
        bool(assembly.sizes) and (assembly.check_vma or not assembly.explicit),
    )


def expert_chunks(assembly: Assembly, call: ExpertCall) -> int:
    """Number of parts of a device's tokens that are sent to their experts one after another."""
    rows, seq = local_rows(assembly)
    return chunk_count(rows * seq, assembly.experiment.execution.expert_chunk, call.routing_group)


def local_rows(assembly: Assembly) -> tuple[int, int]:
    """(rows, seq) of a microbatch on a device."""
    name = assembly.described.tokens
    leaf, split = assembly.abstract_batch()[name], assembly.batch_splits[name]
    _, rows, seq = (
        n // ways(axes, assembly.sizes) for n, axes in zip(leaf.shape, split, strict=True)
    )
    return rows, seq
