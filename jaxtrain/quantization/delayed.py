"""Delayed scaling: a tensor's scale comes from the steps before (Micikevicius et al. 2022, section
3; NVIDIA's Transformer Engine). No product waits for a greatest magnitude, or for that of other
devices.

Each matrix w of a product x @ w has a leaf with its name plus `SCALES`, of three rows: for x, w and
the gradient dy. A row has an entry for each power of two that an fp32 scale can be, indexed by its
exponent's bits: the number of coming steps in which it still counts. The scale is the greatest one
that counts. Values beyond the format's largest number are cut off to it.

A step's observations are summed like the leaf's gradient: 1 for the scale that a device would have
chosen for a microbatch. Sums over microbatches, stages and devices then contain the scale of the
complete tensor, and it is the greatest: the same on every mesh.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32

from jaxtrain.mesh.axes import MeshAxes
from jaxtrain.quantization.formats import (
    Format,
    Scaled,
    along,
    greatest_magnitude,
    greatest_of_matrices,
)
from jaxtrain.violations import count, raise_violations

Value = TypeVar("Value")
SCALES = "_scales"
"""Suffix of such a leaf's name, after its matrix's. A user's own leaf may have it too, so exact
names decide (`models.buffers`)."""
ROWS = ("x", "w", "dy")
EXPONENTS = 256
FIRST = {"x": 448.0, "dy": 16.0}
"""Greatest magnitudes in the step that measures those of the first one, dy's in units of the
loss's derivative by a token's loss. x is then e4m3 with scale 1, cut off at 448: inputs of a second
product are not normalised. In a small decoder dy was below 4 in those units, with root mean squares
of 2^-10 to 1, and e5m2 has 31 binades below dy's scale."""


@dataclass(frozen=True)
class Delayed:
    """Scales from the steps before.

    history: number of steps. Values beyond the range of a tensor in all these steps are cut off in
    the step where they first occur.
    """

    history: int = 16

    def __post_init__(self) -> None:
        raise_violations(count("history", self.history, 1))


def scale_of(table: Float[Array, "*stack 3*256"], row: str) -> Float32[Array, "*stack"]:
    """The scale of that row's tensor; 1 if no entry counts."""
    rows = table.reshape(*table.shape[:-1], len(ROWS), EXPONENTS)
    counts = rows[..., ROWS.index(row), :] > 0
    bits = lax.broadcasted_iota(jnp.int32, counts.shape, counts.ndim - 1)
    bits = jnp.max(jnp.where(counts, bits, 0), axis=-1)
    bits = jnp.where(bits > 0, bits, 127)
    return lax.bitcast_convert_type(bits.astype(jnp.uint32) << 23, jnp.float32)


def own_tables(
    tables: Float[Array, "all 3*256"], count: int, axes: MeshAxes
) -> Float[Array, "{count} 3*256"]:
    """Selects a device's experts from the replicated leaves of all. axes: they split experts."""
    return lax.dynamic_slice_in_dim(tables, lax.axis_index(axes) * count, count, axis=0)


def seen(x: Float[Array, "*n"], form: Format) -> Float32[Array, 256]:
    """1 at the scale that x would have by itself; all 0 if x is zero or not finite."""
    return entry(greatest_magnitude(x), form)


def entry(greatest: Float32[Array, "*n"], form: Format) -> Float32[Array, "*n 256"]:
    """`seen` for tensors of these greatest magnitudes."""
    bits = lax.bitcast_convert_type(form.scale(greatest), jnp.int32) >> 23
    valid = (greatest > 0) & jnp.isfinite(greatest)
    return jax.nn.one_hot(jnp.where(valid, bits, -1), EXPONENTS, dtype=jnp.float32)


def quantized_by(scale: Float32[Array, "*m"], x: Float[Array, "*n"], form: Format) -> Scaled:
    """x in `form` at this scale, or at one scale for each of its first dims. Values are cut off at
    the largest number; not-finite values become NaN."""
    most = along(form.largest * scale, x)
    wide = x.astype(jnp.float32)
    clipped = jnp.where(jnp.isfinite(wide), jnp.clip(wide, -most, most), jnp.nan)
    return Scaled(form.numbers(clipped, scale), scale)


def first_table(
    w: Float[Array, "*stack k columns"],
    forward: Format,
    backward: Format,
    history: int,
    derivative: float = 1.0,
) -> Float32[Array, "*stack 3*256"]:
    """Leaf of a matrix before the first step: from its own magnitude, and `FIRST`. derivative: of
    the loss by a token's loss."""
    greatest = greatest_of_matrices(w)
    rows = [
        entry(jnp.full_like(greatest, FIRST["x"]), forward),
        history * entry(greatest, forward),
        entry(jnp.full_like(greatest, FIRST["dy"] * derivative), backward),
    ]
    return jnp.concatenate(rows, axis=-1)


def table_of_weight(
    table: Float[Array, "*stack 3*256"], w: Float[Array, "*stack k columns"], forward: Format
) -> Float[Array, "*stack 3*256"]:
    """Returns the leaf with w's current scale in its row and the other rows unchanged, for weights
    that no step has used."""
    shape = (*table.shape[:-1], len(ROWS), EXPONENTS)
    own = entry(greatest_of_matrices(w), forward).astype(table.dtype)
    return table.reshape(shape).at[..., ROWS.index("w"), :].set(own).reshape(table.shape)


def next_table(
    table: Float[Array, "*stack 3*256"], seen_scales: Float[Array, "*stack 3*256"], history: int
) -> Float[Array, "*stack 3*256"]:
    """Returns the leaf after a step. seen_scales: the step's summed observations. A row without any
    (a layer without a gradient, or with only zeros) stays."""
    shape = (*table.shape[:-1], len(ROWS), EXPONENTS)
    steps, observed = table.reshape(shape), seen_scales.reshape(shape) > 0
    bits = lax.broadcasted_iota(jnp.int32, shape, len(shape) - 1)
    top = jnp.max(jnp.where(observed, bits, -1), axis=-1, keepdims=True)
    later = jnp.where(bits == top, history, jnp.maximum(steps - 1, 0))
    return jnp.where(top >= 0, later, steps).astype(table.dtype).reshape(table.shape)
