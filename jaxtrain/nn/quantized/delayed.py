"""Delayed scaling: a tensor's scale is what it needed in the steps before (Micikevicius et al.
2022, section 3; NVIDIA's Transformer Engine). No product waits for a greatest magnitude, or for
that of other devices.

Beside each matrix w of a product x @ w lies a leaf, named as it and `SCALES`, of three rows: for
x, w and the gradient dy. A row has an entry for each power of two that a scale in fp32 can be, by
its exponent's bits: in how many steps to come it still counts, 0 for one that does not. The scale
is the greatest that counts; what is beyond the format's largest number then becomes that number.

What a step sees is added up as the leaf's gradient is: 1 for the scale that a device would have
taken of a microbatch. Sums over microbatches, stages and devices, in any order and number, then
have the whole tensor's among their entries, and it is the greatest: the same on every mesh.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32

from jaxtrain.collectives.vary import MeshAxes
from jaxtrain.nn.quantized.formats import (
    Format,
    Scaled,
    along,
    greatest_magnitude,
    greatest_of_matrices,
)
from jaxtrain.violations import count, raise_violations

Value = TypeVar("Value")
SCALES = "_scales"
"""What ends the name of such a leaf, behind its matrix's. A user's own may end so too: which leaves
are such ones is told by exact names (`models.buffers`)."""
ROWS = ("x", "w", "dy")
EXPONENTS = 256
FIRST = {"x": 448.0, "dy": 16.0}
"""Greatest magnitudes before any was seen, of dy in units of the loss's own derivative by a token's
loss. They count in the first step alone: whatever it sees takes their place. x is then e4m3 as it
is, with 448 for what is more: inputs of a second product are normalised by nobody. Of dy a small
decoder's were below 4 in those units, their root mean squares 2^-10 to 1, and e5m2 has 31 binades
below that of dy."""


@dataclass(frozen=True)
class Delayed:
    """Scales from the steps before.

    history: how many. What is beyond the range that a tensor needed in all of them is cut off in
    the step that has it first.
    """

    history: int = 16

    def __post_init__(self) -> None:
        raise_violations(count("history", self.history, 1))


def scale_of(table: Float[Array, "*stack 3*256"], row: str) -> Float32[Array, "*stack"]:
    """The scale of the tensor of that row; 1 where nothing counts."""
    rows = table.reshape(*table.shape[:-1], len(ROWS), EXPONENTS)
    counts = rows[..., ROWS.index(row), :] > 0
    bits = lax.broadcasted_iota(jnp.int32, counts.shape, counts.ndim - 1)
    bits = jnp.max(jnp.where(counts, bits, 0), axis=-1)
    bits = jnp.where(bits > 0, bits, 127)
    return lax.bitcast_convert_type(bits.astype(jnp.uint32) << 23, jnp.float32)


def own_tables(
    tables: Float[Array, "all 3*256"], count: int, axes: MeshAxes
) -> Float[Array, "{count} 3*256"]:
    """Those of a device's experts, of the leaves of all, which rest whole. axes: they split
    experts."""
    return lax.dynamic_slice_in_dim(tables, lax.axis_index(axes) * count, count, axis=0)


def seen(x: Float[Array, "*n"], form: Format) -> Float32[Array, 256]:
    """1 at the scale that x would have by itself; nothing of zeros, and of what is not finite."""
    return entry(greatest_magnitude(x), form)


def entry(greatest: Float32[Array, "*n"], form: Format) -> Float32[Array, "*n 256"]:
    """`seen`, of tensors of these greatest magnitudes."""
    bits = lax.bitcast_convert_type(form.scale(greatest), jnp.int32) >> 23
    known = (greatest > 0) & jnp.isfinite(greatest)
    return jax.nn.one_hot(jnp.where(known, bits, -1), EXPONENTS, dtype=jnp.float32)


def quantized_by(scale: Float32[Array, "*m"], x: Float[Array, "*n"], form: Format) -> Scaled:
    """x in `form` at this scale, or at that of each of its first dims; cut off at the largest
    number; none where x is not finite."""
    most = along(form.largest * scale, x)
    wide = x.astype(jnp.float32)
    kept = jnp.where(jnp.isfinite(wide), jnp.clip(wide, -most, most), jnp.nan)
    return Scaled(form.numbers(kept, scale), scale)


def first_table(
    w: Float[Array, "*stack k columns"],
    forward: Format,
    backward: Format,
    history: int,
    derivative: float = 1.0,
) -> Float32[Array, "*stack 3*256"]:
    """The leaf of a matrix before the first step: by its own magnitude, and `FIRST`. derivative:
    the loss's by that of a token."""
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
    """The leaf with w's own scale of the moment in its row, the others as they are: for weights
    that no step has had."""
    shape = (*table.shape[:-1], len(ROWS), EXPONENTS)
    own = entry(greatest_of_matrices(w), forward).astype(table.dtype)
    return table.reshape(shape).at[..., ROWS.index("w"), :].set(own).reshape(table.shape)


def next_table(
    table: Float[Array, "*stack 3*256"], found: Float[Array, "*stack 3*256"], history: int
) -> Float[Array, "*stack 3*256"]:
    """The leaf a step later. found: what the step saw, added up. A row in which it saw nothing, of
    a layer that had no gradient or only zeros, stays."""
    shape = (*table.shape[:-1], len(ROWS), EXPONENTS)
    steps, here = table.reshape(shape), found.reshape(shape) > 0
    bits = lax.broadcasted_iota(jnp.int32, shape, len(shape) - 1)
    top = jnp.max(jnp.where(here, bits, -1), axis=-1, keepdims=True)
    later = jnp.where(bits == top, history, jnp.maximum(steps - 1, 0))
    return jnp.where(top >= 0, later, steps).astype(table.dtype).reshape(table.shape)
