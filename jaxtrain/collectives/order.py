"""One collective after another, where a platform's runtime does not see to it.

XLA:CPU starts a collective as soon as the one before it has started, and counts a loop or a branch
as started when its first collective is. JAX gives all collectives of a shard_map one channel id,
and by it simulated devices find each other: one that is still in the loop and one that is past it
meet in different collectives, take each other's arrays (beyond the end of the shorter one) or wait
for ever. Only what reads an array is certain to run after what makes it; of `optimization_barrier`
nothing is left when XLA:CPU runs a program.

The collectives that XLA itself puts into a program (mode gspmd) have channel ids of their own: they
are not mixed up. `program.order.side_by_side` finds the pairs that a compiled program leaves.
"""

from __future__ import annotations

from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jaxtyping import Array, Bool, PyTree

from jaxtrain.collectives.vary import varying_axes

Tree = TypeVar("Tree")


def after(tree: Tree, done: PyTree) -> Tree:
    """`tree`, its values and gradients unchanged. On CPU no leaf of it can be read before each leaf
    of `done` is made, of which one element is read; elsewhere no more than `tree`.

    Raises ValueError where a leaf is typed as equal on devices on which one of `done` is not.
    """
    # A random key is no number, and was not sent.
    arrays = [
        leaf
        for leaf in jax.tree.leaves(lax.stop_gradient(done))
        if leaf.size and not jnp.issubdtype(leaf.dtype, jax.dtypes.extended)
    ]
    if not arrays:
        return tree
    late = _never.bind(*arrays)

    def one(x: jax.Array) -> jax.Array:
        if wider := [axis for axis in varying_axes(late) if axis not in varying_axes(x)]:
            raise ValueError(
                f"after(x, done): x is typed as equal over {wider} and done is not: its gradient "
                f"would be summed over them; type it first, vary(x, {tuple(wider)})"
            )
        return jnp.where(late, jnp.zeros((), x.dtype), x)

    return jax.tree.map(one, tree)


def _never_on_cpu(*done: jax.Array) -> Bool[Array, ""]:
    """Returns False: no element is both equal and unequal to itself. A compiler that must respect
    NaN cannot know that, and computes `done` first."""
    never = jnp.zeros((), bool)
    for leaf in done:
        first = leaf[(0,) * leaf.ndim].astype(jnp.float32)
        never |= (first == first) & (first != first)
    return never


_never = Primitive("never")
_never.def_impl(lambda *done: jnp.zeros((), bool))


@_never.def_abstract_eval
def _one_bool(first: ShapedArray, *following: ShapedArray) -> ShapedArray:
    kind = first.manual_axis_type
    varying = (operand.manual_axis_type.varying for operand in (first, *following))
    return first.update(
        shape=(),
        dtype=jnp.dtype(bool),
        weak_type=False,
        manual_axis_type=kind.update(varying=frozenset[str]().union(*varying)),
    )


mlir.register_lowering(
    _never, mlir.lower_fun(lambda *done: jnp.zeros((), bool), multiple_results=False)
)
mlir.register_lowering(
    _never, mlir.lower_fun(_never_on_cpu, multiple_results=False), platform="cpu"
)
