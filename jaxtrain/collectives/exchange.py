"""Tokens and experts of the devices among which a mixture of experts is split."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Array, Float32

from jaxtrain.collectives.rows import Padded, RowExchange
from jaxtrain.mesh.axes import MeshAxes


@dataclass(frozen=True, eq=False)
class Exchange:
    """Mesh axes over which a layer of experts exchanges rows.

    tokens: mesh axes whose devices have other tokens of the same microbatch. counted: 1 on one of
    the devices that have the same tokens, 0 on the others of them. experts: mesh axes whose devices
    have other experts, among which rows travel as `rows` says. chunk: tokens of a device that are
    sent at one time, None for all of them. flops_per_byte: FLOPs of a device while its link carries
    one byte of rows, by which rows of a chunk are tied to products of the chunks beside it; None:
    one chunk after the other.
    """

    tokens: MeshAxes = ()
    counted: Float32[Array, ""] | float = 1.0
    experts: MeshAxes = ()
    rows: RowExchange = Padded()  # noqa: RUF009 (frozen)
    chunk: int | None = None
    flops_per_byte: float | None = None


ALONE = Exchange()
"""On one device, all tokens at once."""
