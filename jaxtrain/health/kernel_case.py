"""A kernel with a problem that it has in a step, and distances of its results from others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from jaxtrain.step.assembly import Assembly

BOUND, FP32_BOUND = 3e-2, 1e-4
"""Largest distances. In 16 bits a result is rounded to 2^-9 of itself, and so are the weights that
a fused kernel sums with: 0.2 to 0.6e-2. Accelerators multiply fp32 in passes of 16 bits too. Else
sums of some thousand fp32 products in another order differ by 1e-6."""

PART_TOKENS, PART_COLUMNS = 64, 128
"""Tokens and columns that are compared together: few, so that one wrong tile counts, and the last
tokens of a long row, which are means of many values and small."""

SMALLEST = 1e-6
"""Of the norm of a result's average part: the least norm that a distance is relative to."""

CPU_FLOPS, FLOPS = 2e10, 2e13
"""FLOPs that the portable kernel may take for one problem, on a CPU and on an accelerator: about a
second."""

Distances = dict[str, Float32[Array, " parts"]]


@dataclass(frozen=True)
class KernelCase:
    """setting: the experiment's field and the kernel. problem: its sizes, in words. portable: the
    kernel that it is held against. fix: what to use if it is wrong. bound: the largest distance.

    distances: a function of `inputs` that returns, for each result of the kernel, the greatest
      distance of each head or expert. labels: their names, results in the order in which they are
      made.
    """

    setting: str
    problem: str
    portable: str
    fix: str
    bound: float
    distances: Callable[..., Distances]
    inputs: tuple[jax.Array, ...]
    labels: Mapping[str, Sequence[str]]


def bound_for(assembly: Assembly) -> float:
    """Largest distance in the compute dtype, on this platform."""
    in_16_bits = jnp.dtype(assembly.experiment.precision.compute).itemsize == 2
    return BOUND if in_16_bits or assembly.spec.platform != "cpu" else FP32_BOUND


def flops_for(assembly: Assembly) -> float:
    """FLOPs that the portable kernel may take for one problem."""
    return CPU_FLOPS if assembly.spec.platform == "cpu" else FLOPS


def distance(
    apart: Float[Array, "groups parts"], size: Float[Array, "groups parts"]
) -> Float32[Array, " groups"]:
    """Returns for each group the greatest quotient of norms: of a part of the difference, and of
    that part of the expected result; infinite where a result is no number."""
    mean = jnp.sqrt(jnp.mean(size.astype(jnp.float32) ** 2))
    size = jnp.maximum(size, SMALLEST * mean)
    relative = jnp.where(size > 0, apart / jnp.where(size > 0, size, 1.0), jnp.inf)
    relative = jnp.where(apart > 0, relative, 0.0)
    return jnp.max(jnp.where(jnp.isfinite(apart), relative, jnp.inf), axis=1)


def part_norms(x: Float[Array, "*groups tokens n"]) -> Float32[Array, "groups parts"]:
    """Returns the norms of the parts of each matrix, `PART_TOKENS` x `PART_COLUMNS` numbers."""
    squares = x.astype(jnp.float32) ** 2
    for axis, part in ((-2, PART_TOKENS), (-1, PART_COLUMNS)):
        part = min(part, squares.shape[axis])
        widths = [(0, 0)] * squares.ndim
        widths[axis] = (0, -squares.shape[axis] % part)
        padded = jnp.moveaxis(jnp.pad(squares, widths), axis, -1)
        summed = padded.reshape(*padded.shape[:-1], -1, part).sum(-1)
        squares = jnp.moveaxis(summed, -1, axis)
    return jnp.sqrt(squares.reshape(*squares.shape[:-2], -1))


def normals(
    key: jax.Array, dtype: jax.typing.DTypeLike, *shapes: tuple[int, ...]
) -> list[jax.Array]:
    """Returns an array of normal numbers for each shape."""
    keys = jax.random.split(key, len(shapes))
    return [
        jax.random.normal(key, shape, jnp.float32).astype(dtype)
        for key, shape in zip(keys, shapes, strict=True)
    ]
