"""A sum of which half the bytes travel: in bfloat16, rounded twice however many devices there are.

An all-reduce in bfloat16 rounds wherever a device has added its own (or as a compiler likes). Here
terms go to their owners as they are, and sums leave them whole: an all-to-all and an all-gather,
the bytes of a ring (Chan et al. 2007, section 4, with the additions all in one place).
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain.collectives.algorithm import all_to_all
from jaxtrain.collectives.choice import Exact, algorithm
from jaxtrain.collectives.lax_form import Lax
from jaxtrain.collectives.named import all_gather
from jaxtrain.collectives.ring import flatten_padded
from jaxtrain.mesh.axes import MeshAxes
from jaxtrain.violations import raise_violations

WIRE = jnp.bfloat16


@dataclass(frozen=True)
class Rounded:
    """A sum whose terms are rounded to bfloat16, added in fp32, and rounded to it once more: the
    range of fp32 in half its bytes, and nothing kept from step to step.

    by: what moves the bytes. Raises ValueError for a field that holds no algorithm.
    """

    by: Exact = Lax()  # noqa: RUF009 (frozen)

    def __post_init__(self) -> None:
        raise_violations(algorithm("by", self.by))

    def all_reduce(self, x: jax.Array, axes: MeshAxes) -> jax.Array:
        """The sum of `x`, of any shape, over the devices of `axes`, with equal bits on all of
        them. Padded to a multiple of their number."""
        n = lax.axis_size(axes)
        flat, restore = flatten_padded(x, n)
        terms = all_to_all(flat.astype(WIRE), axes, 0, 0, self.by).reshape(n, -1)
        total = terms.astype(jnp.float32).sum(axis=0).astype(WIRE)
        return restore(all_gather(total, axes, 0, self.by)).astype(x.dtype)
