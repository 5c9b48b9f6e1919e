"""Communicators of a step, which answer its layers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax

from jaxtrain.arrays import Leaves
from jaxtrain.mesh.links import flops_per_byte
from jaxtrain.nn.communicator import Communicator
from jaxtrain.nn.explicit import Explicit
from jaxtrain.nn.gspmd import Gspmd
from jaxtrain.nn.local import Local
from jaxtrain.step.assembly import Assembly
from jaxtrain.step.gradients import Reduction


@dataclass(frozen=True, eq=False)
class _SummedByLayer(Explicit):
    """Sums a layer's gradients where the backward pass returns them."""

    reduction: Reduction = field(kw_only=True)

    def scatter(self, grads: Leaves, prefix: str, tiles: Leaves | None = None) -> Leaves:
        return self.reduction.all_reduce_layer(super().scatter(grads, prefix, tiles), prefix)


def explicit_communicator(assembly: Assembly, reduction: Reduction | None = None) -> Explicit:
    """The explicit communicator. reduction: of a backward pass; it may sum layer by layer."""
    fields: dict[str, Any] = _local_fields(assembly) | dict(
        sizes=assembly.sizes,
        places=assembly.places,
        roles=assembly.roles,
        counted=assembly.buffers.of_routers,
        context=assembly.context,
        reduce_dtype=assembly.experiment.precision.reduce,
        collectives=assembly.collectives,
        flops_per_byte=_flops_per_byte_of_weights(assembly),
        flops_per_byte_of_rows=flops_per_byte(
            assembly.roles.experts, assembly.spec, assembly.product_flops
        ),
    )
    if reduction is not None and reduction.layers:
        return _SummedByLayer(**fields, reduction=reduction)
    return Explicit(**fields)


def gspmd_communicator(assembly: Assembly, mesh: jax.sharding.Mesh) -> Communicator:
    """Returns the gspmd communicator, or `Local` on one device: no constraints, plain code."""
    e, fields = assembly.experiment, _local_fields(assembly)
    if not assembly.sizes:
        return Local(**fields)
    return Gspmd(
        **fields,
        mesh=mesh,
        rules=e.sharding,
        places=assembly.places,
        reduce_dtype=e.precision.reduce,
    )


def _local_fields(assembly: Assembly) -> dict[str, Any]:
    """Fields that all communicators share."""
    e, model = assembly.experiment, assembly.description
    return dict(
        compute_dtype=e.precision.compute,
        frozen=assembly.frozen,
        grouped_matmul=e.execution.grouped_matmul,
        chunk_tokens=assembly.chunk_tokens,
        expert_chunk=e.execution.expert_chunk,
        quantized=e.precision.products,
        products=frozenset(() if model is None else model.products),
        expert_matrices=frozenset(() if model is None else model.expert_matrices),
    )


def _flops_per_byte_of_weights(assembly: Assembly) -> float:
    """`Explicit.flops_per_byte`, for the mesh axes that split weights only at rest."""
    places = assembly.places.values()
    between = {
        axis
        for place in places
        for fewer, more in zip(place.in_use, place.params, strict=True)
        for axis in more[len(fewer) :]
    }
    return flops_per_byte(tuple(between), assembly.spec, assembly.product_flops)
