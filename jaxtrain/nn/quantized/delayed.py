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

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32

from jaxtrain.nn.quantized.formats import Format, Scaled, greatest_magnitude
from jaxtrain.violations import count, raise_violations

SCALES = "_scales"
"""What ends the name of such a leaf, behind its matrix's."""
ROWS = ("x", "w", "dy")
EXPONENTS = 256
FIRST = {"x": 16.0, "dy": 1.0}
"""Greatest magnitudes before any was seen. Normalised activations are below that of x; a gradient
is of a mean over tokens, and e5m2 has 31 binades below that of dy. One too small would cut numbers
off; one too large costs range, until the first `history` steps are over."""
Arrays = dict[str, jax.Array]


@dataclass(frozen=True)
class Delayed:
    """Scales from the steps before.

    history: how many. What is beyond the range that a tensor needed in all of them is cut off in
    the step that has it first.
    """

    history: int = 16

    def __post_init__(self) -> None:
        raise_violations(count("history", self.history, 1))


def is_scales(name: str) -> bool:
    """Whether a leaf of that name is such a one."""
    return name.endswith(SCALES)


def without_scales(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """The leaves that are parameters of the model."""
    return {k: v for k, v in leaves.items() if not is_scales(k)}


def scale_of(table: Float[Array, 3 * 256], row: str) -> Float32[Array, ""]:
    """The scale of the tensor of that row; 1 where nothing counts."""
    counts = table.reshape(len(ROWS), EXPONENTS)[ROWS.index(row)] > 0
    bits = jnp.max(jnp.where(counts, jnp.arange(EXPONENTS), 0))
    bits = jnp.where(bits > 0, bits, 127)
    return lax.bitcast_convert_type(bits.astype(jnp.uint32) << 23, jnp.float32)


def seen(x: Float[Array, "*n"], form: Format) -> Float32[Array, 256]:
    """1 at the scale that x would have by itself; nothing of zeros, and of what is not finite."""
    return _entry(greatest_magnitude(x), form)


def _entry(greatest: Float32[Array, "*n"], form: Format) -> Float32[Array, "*n 256"]:
    bits = lax.bitcast_convert_type(form.scale(greatest), jnp.int32) >> 23
    known = (greatest > 0) & jnp.isfinite(greatest)
    return jax.nn.one_hot(jnp.where(known, bits, -1), EXPONENTS, dtype=jnp.float32)


def quantized_by(scale: Float32[Array, ""], x: Float[Array, "*n"], form: Format) -> Scaled:
    """x in `form` at this scale, cut off at the largest number; none where x is not finite."""
    most = form.largest * scale
    wide = x.astype(jnp.float32)
    kept = jnp.where(jnp.isfinite(wide), jnp.clip(wide, -most, most), jnp.nan)
    return Scaled(form.numbers(kept, scale), scale)


def first_table(
    w: Float[Array, "*stack k columns"], forward: Format, backward: Format, history: int
) -> Float32[Array, "*stack 3*256"]:
    """The leaf of a matrix before the first step: by its own magnitude, and `FIRST`."""
    greatest = jnp.max(jnp.abs(w), axis=(-2, -1)).astype(jnp.float32)
    rows = [
        _entry(jnp.full_like(greatest, FIRST["x"]), forward),
        _entry(greatest, forward),
        _entry(jnp.full_like(greatest, FIRST["dy"]), backward),
    ]
    return history * jnp.concatenate(rows, axis=-1)


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
