"""Products of experts in 8 bits: each expert's rows times its own matrix, as
`quantization.products` has them of a dense layer.

An expert's rows, its matrix and the gradients of its products are tensors of their own, each with a
scale: those of experts that few tokens choose, or whose weights have grown, round as they would
alone; with delayed scaling the leaf beside the matrices then is stacked over experts as they are;
and nothing hangs on which device has which experts. Those that have the same ones, with other rows
or other hidden units, take the greatest magnitudes together. Rows of padding are zeros.

The router reads tokens in the compute dtype, and so they travel: in 8 bits are the operands, and
matrices on their way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Shaped

from jaxtrain.collectives.vary import vary, varying_axes
from jaxtrain.mesh.axes import MeshAxes
from jaxtrain.moe.grouped import (
    Experts,
    GroupedMatmul,
    Owners,
    RowProducts,
    Rows,
    blocks_of,
    grouped_matmul,
    takes_8_bits,
)
from jaxtrain.quantization.delayed import entry, own_tables, quantized_by, scale_of
from jaxtrain.quantization.formats import Format, Scaled, along, greatest_of_matrices
from jaxtrain.quantization.weights import QuantizedWeight, Ways, kept, scales_alike

NarrowWeights = tuple[QuantizedWeight, ...]
ExpertMatrices = Float[Array, "experts _ _"] | QuantizedWeight
"""One for each expert."""


def grouped_matmuls(
    kernel: GroupedMatmul, rows: Rows, weights: tuple[ExpertMatrices, ...], owners: Owners
) -> tuple[RowProducts, ...]:
    """`grouped.grouped_matmul` of the same rows by several matrices of each expert; in 8 bits where
    they are."""
    narrow = tuple(w for w in weights if isinstance(w, QuantizedWeight))
    if not narrow:
        wide = (w for w in weights if not isinstance(w, QuantizedWeight))
        return tuple(grouped_matmul(kernel, rows, w, owners) for w in wide)
    ways = narrow[0].ways
    assert ways is not None and len(narrow) == len(weights), "matrices without ways, or some wide"
    axes = varying_axes(*jax.tree.leaves((rows, weights, owners)))
    rows, narrow, owners = jax.tree.map(lambda x: vary(x, axes), (rows, narrow, owners))
    return _multiply(kernel, ways, rows, narrow, owners)


def with_own_scales(weight: ExpertMatrices, axes: MeshAxes) -> ExpertMatrices:
    """Returns the matrices of a device's experts with the delayed scales of these experts alone:
    the leaf of scales is not split over `axes`, as the matrices are."""
    if not isinstance(weight, QuantizedWeight) or weight.scales is None:
        return weight
    return replace(weight, scales=own_tables(weight.scales, weight.shape[0], axes))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _multiply(
    kernel: GroupedMatmul, ways: Ways, rows: Rows, weights: NarrowWeights, owners: Owners
) -> tuple[RowProducts, ...]:
    return _forward(kernel, ways, rows, weights, owners)[0]


def _forward(
    kernel: GroupedMatmul, ways: Ways, rows: Rows, weights: NarrowWeights, owners: Owners
) -> tuple[tuple[RowProducts, ...], tuple[Scaled, Any, NarrowWeights, Owners]]:
    form, tables = ways.products.forward, [weights[0].scales]
    greatest = [_greatest(rows, owners, weights[0].shape[0])]
    (scale,), (entry,) = _scales(ways, greatest, tables, form, "x")
    x = _narrow(rows, scale, owners, form, delayed=entry is not None)
    outs = _outputs(kernel, ways, x, tuple(weight.value for weight in weights), owners)
    return outs, (x, entry, tuple(map(kept, weights)), owners)


# As `grouped._multiply`: remat policies do not look into it, and save none of its products.
@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _outputs(
    kernel: GroupedMatmul, ways: Ways, x: Scaled, matrices: tuple[Scaled, ...], owners: Owners
) -> tuple[RowProducts, ...]:
    outs = []
    for matrix in matrices:
        numbers, w = _operands(kernel, ways, x.numbers, matrix.numbers)
        product = kernel.forward(numbers, w, owners)
        of_rows = _of_rows(x.scale * matrix.scale, owners, len(numbers))
        outs.append((product.astype(jnp.float32) * of_rows).astype(ways.dtype))
    return tuple(outs)


def _once_only(*_: Any) -> Any:
    raise AssertionError("products are differentiated by _multiply")


_outputs.defvjp(_once_only, _once_only)


def _backward(
    kernel: GroupedMatmul,
    ways: Ways,
    saved: tuple[Scaled, Any, NarrowWeights, Owners],
    dys: tuple[RowProducts, ...],
) -> tuple[Rows, NarrowWeights, None]:
    x, of_x, weights, owners = saved
    form = ways.products.backward
    greatest = [_greatest(dy, owners, weights[0].shape[0]) for dy in dys]
    scales, entries = _scales(ways, greatest, [w.scales for w in weights], form, "dy")
    dxs, dws = [], []
    for weight, dy, scale, of_dy in zip(weights, dys, scales, entries, strict=True):
        narrow = _narrow(dy, scale, owners, form, delayed=of_dy is not None).numbers
        numbers, w, cotangent = _operands(kernel, ways, x.numbers, weight.value.numbers, narrow)
        dx, dw = kernel.backward(numbers, w, owners, cotangent)
        of_rows = _of_rows(scale * weight.value.scale, owners, len(dy))
        dxs.append(dx.astype(jnp.float32) * of_rows)
        dws.append(_gradient(weight, dw, x.scale * scale, [of_x, weight.seen, of_dy]))
    return sum(dxs[1:], start=dxs[0]).astype(ways.dtype), tuple(dws), None


_multiply.defvjp(_forward, _backward)


def _gradient(
    weight: QuantizedWeight, dw: Experts, scale: Float32[Array, " experts"], seen: list[Any]
) -> QuantizedWeight:
    """Returns the cotangent of a weight that `kept` stood for: dw times `scale` for its array, the
    magnitudes `seen` for its leaf of scales."""
    gradient = magnitudes = None
    if weight.stand_in is not None:
        gradient = (dw.astype(jnp.float32) * along(scale, dw)).astype(weight.dtype)
    if weight.scales is not None:
        magnitudes = jnp.concatenate(seen, axis=-1).astype(weight.scales.dtype)
        magnitudes = vary(magnitudes, varying_axes(weight.scales))
    return replace(weight, value=None, stand_in=gradient, scales=magnitudes, seen=None)


def _greatest(
    x: Float[Array, "rows n"], owners: Owners, experts: int
) -> Float32[Array, " experts"]:
    """Greatest magnitude of each expert's rows; 0 for an expert without rows."""
    of_blocks = greatest_of_matrices(blocks_of(x, owners))
    owned = owners[:, None] == jnp.arange(experts)[None]
    return jnp.max(jnp.where(owned, of_blocks[:, None], 0.0), axis=0, initial=0.0)


def _scales(
    ways: Ways, greatest: list[Any], tables: Sequence[Any], form: Format, row: str
) -> tuple[list[Any], list[Any]]:
    """Returns the scales of each expert for rows with these greatest magnitudes (from `tables` if
    there are any), and the magnitudes to record in the next tables (None without tables)."""
    if tables[0] is None:
        return scales_alike(greatest, form, ways.maxima), [None for _ in greatest]
    return [scale_of(table, row) for table in tables], [entry(g, form) for g in greatest]


def _narrow(
    x: Float[Array, "rows n"],
    scale: Float32[Array, " experts"],
    owners: Owners,
    form: Format,
    *,
    delayed: bool,
) -> Scaled:
    """Rows in `form`, each expert's at its scale; delayed: cut off at the largest number."""
    blocks, scales = blocks_of(x, owners), scale[owners]
    if delayed:
        numbers = quantized_by(scales, blocks, form).numbers
    else:
        numbers = form.numbers(blocks, scales)
    return Scaled(numbers.reshape(x.shape), scale)


def _of_rows(
    scale: Float32[Array, " experts"], owners: Owners, rows: int
) -> Float32[Array, "rows 1"]:
    return jnp.repeat(scale[owners], rows // max(len(owners), 1))[:, None]


def _operands(
    kernel: GroupedMatmul, ways: Ways, *numbers: Shaped[Array, ...]
) -> tuple[jax.Array, ...]:
    """Returns numbers in a dtype that the kernel takes: for a kernel without 8 bits a wider one,
    which represents each of them exactly."""
    if takes_8_bits(kernel):
        return numbers
    wide = jnp.bfloat16 if jnp.dtype(ways.dtype).itemsize == 2 else ways.dtype
    return tuple(array.astype(wide) for array in numbers)
