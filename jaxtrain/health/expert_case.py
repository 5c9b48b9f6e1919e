"""Kernels of experts' products of a run, held against `BlockLoop` in fp32, expert by expert."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.health.kernel_case import (
    PART_TOKENS,
    Distances,
    KernelCase,
    bound_for,
    distance,
    flops_for,
    normals,
    part_norms,
)
from jaxtrain.moe.block_loop import BlockLoop
from jaxtrain.moe.grouped import Asked, GroupedMatmul, takes_8_bits
from jaxtrain.moe.rows import Plan, combine, dispatch, plan_rows
from jaxtrain.operations.block import mixtures
from jaxtrain.quantization.formats import Format
from jaxtrain.step.assembly import Assembly
from jaxtrain.step.running_kernels import asked_of, kernel_of

FLOPS_PER_NUMBER = 6
"""Of a row, for each number of its matrix: three products."""
MOST_BYTES = 2**28
"""Of an array in fp32."""
LEAST_ROWS, LEAST_DIM = 512, 1024
"""To which a problem is cut: rows of an expert on average, and dims of a matrix, which are tiles of
the largest kernels."""
PORTABLE = BlockLoop(largest_block=128)

Formats = tuple[Format, Format] | None
"""Of rows and matrices, and of gradients, in 8 bits."""


class Choices(NamedTuple):
    """experts: of each row, ascending. parts: number of the part of each row, of one expert's rows
    at most `PART_TOKENS`. owners: expert of each part."""

    experts: jax.Array
    parts: jax.Array
    owners: jax.Array


def expert_cases(assembly: Assembly) -> Iterator[KernelCase]:
    """Yields a case for each distinct kernel of experts that is not portable, and its problem."""
    calls = (call for block in assembly.described.layers for call in mixtures(block))
    products, seen = assembly.experiment.precision.products, set()
    for call in dict.fromkeys(calls):
        kernel = kernel_of(assembly, call)
        problem = within(asked_of(assembly, call), kernel, flops_for(assembly))
        if isinstance(kernel, BlockLoop) or (kernel, problem) in seen:
            continue
        seen.add((kernel, problem))
        narrow = products is not None and takes_8_bits(kernel)
        formats = (products.forward, products.backward) if products and narrow else None
        labels = [f"expert {n}" for n in range(problem.experts)]
        yield KernelCase(
            setting=f"grouped_matmul={kernel!r}",
            problem=(
                f"{problem.experts} experts of [{problem.embed}, {problem.hidden}] and "
                f"{problem.rows:,} rows{' in 8 bits' if narrow else ''}"
            ),
            portable=f"{BlockLoop()!r}",
            fix="execution.grouped_matmul=BlockLoop()",
            bound=bound_for(assembly),
            distances=partial(expert_distances, kernel, problem, formats),
            inputs=(jax.random.key(0), *choices_of(problem)),
            labels=dict.fromkeys(("y", "dx", "dw"), labels),
        )


def within(problem: Asked, kernel: GroupedMatmul, flops: float) -> Asked:
    """Returns the problem halved as often as the kernel takes it, until the portable kernel needs
    at most so many FLOPs, and `MOST_BYTES` for each array: rows where they are too many, and dims.
    """

    while True:
        numbers, greater = problem.embed * problem.hidden, max(problem.embed, problem.hidden)
        many_rows = FLOPS_PER_NUMBER * problem.rows * numbers > flops
        many_rows |= 4 * problem.rows * greater > MOST_BYTES
        if not many_rows and 4 * problem.experts * numbers <= MOST_BYTES:
            return problem
        least = {"rows": LEAST_ROWS * problem.experts, "hidden": LEAST_DIM, "embed": LEAST_DIM}
        dims = ("embed", "hidden") if problem.embed > problem.hidden else ("hidden", "embed")
        sizes = {name: getattr(problem, name) for name in (*("rows",) * many_rows, *dims)}
        halves = (
            problem._replace(**{name: size // 2})
            for name, size in sizes.items()
            if size % 2 == 0 and size // 2 >= least[name]
        )
        smaller = next((half for half in halves if not kernel.violations(half)), None)
        if smaller is None:
            return problem
        problem = smaller


def choices_of(problem: Asked) -> Choices:
    """Returns an uneven choice, the expert of each row: each expert is chosen less often than the
    one before it, and the second to last of three or more never."""
    shares = 0.5 ** (np.arange(problem.experts) * 4 / problem.experts)
    if problem.experts > 2:
        shares[-2] = 0
    experts = np.random.default_rng(0).choice(
        problem.experts, problem.rows, p=shares / shares.sum()
    )
    # Each has one row at least, if there are enough.
    chosen = np.flatnonzero(shares)[: problem.rows]
    experts[: len(chosen)] = chosen
    experts.sort()
    number = np.arange(problem.rows) - np.searchsorted(experts, experts)
    begins = np.append(True, np.diff(experts) > 0) | (number % PART_TOKENS == 0)
    parts, owners = np.cumsum(begins) - 1, experts[begins]
    return Choices(*(jnp.asarray(a, jnp.int32) for a in (experts, parts, owners)))


def expert_distances(
    kernel: GroupedMatmul,
    problem: Asked,
    formats: Formats,
    key: jax.Array,
    experts: jax.Array,
    parts: jax.Array,
    owners: jax.Array,
) -> Distances:
    """Returns the distances of products and gradients from those of `BlockLoop` in fp32; of both
    shapes of matrices, into the hidden dim and out of it, the greater one. experts, parts, owners:
    of `Choices`."""
    choices = Choices(experts, parts, owners)
    shapes = dict.fromkeys(((problem.embed, problem.hidden), (problem.hidden, problem.embed)))
    distances = [_distances(kernel, problem, shape, formats, key, choices) for shape in shapes]
    return {name: jnp.max(jnp.stack([d[name] for d in distances]), 0) for name in distances[0]}


def _distances(
    kernel: GroupedMatmul,
    problem: Asked,
    shape: tuple[int, int],
    formats: Formats,
    key: jax.Array,
    choices: Choices,
) -> Distances:
    tokens = [(problem.rows, size) for size in shape]
    x, dy, weights = normals(key, problem.dtype, *tokens, (problem.experts, *shape))
    if formats is not None:
        x, weights = (_narrow(a, formats[0]) for a in (x, weights))
        dy = _narrow(dy, formats[1])
    plan, portable = (
        plan_rows(choices.experts[:, None], problem.experts, largest)
        for largest in (kernel.largest_block, PORTABLE.largest_block)
    )
    actual = _results(kernel, plan, x, weights, dy)
    with jax.default_matmul_precision("highest"):
        wide = (a.astype(jnp.float32) for a in (x, weights, dy))
        expected = _results(PORTABLE, portable, *wide)

    def of_rows(a: jax.Array, b: jax.Array) -> jax.Array:
        # A row's norms by column parts, summed over the rows of a part.
        squares = (part_norms(c[:, None]) ** 2 for c in (a.astype(jnp.float32) - b, b))
        count = len(choices.owners)
        norms = (jnp.sqrt(jax.ops.segment_sum(s, choices.parts, count)) for s in squares)
        greatest = distance(*norms)
        by_expert = jax.ops.segment_max(greatest, choices.owners, problem.experts)
        return jnp.maximum(by_expert, 0.0)

    apart = actual["dw"].astype(jnp.float32) - expected["dw"]
    distances = {name: of_rows(actual[name], expected[name]) for name in ("y", "dx")}
    return distances | {"dw": distance(part_norms(apart), part_norms(expected["dw"]))}


def _results(
    kernel: GroupedMatmul, plan: Plan, x: jax.Array, weights: jax.Array, dy: jax.Array
) -> dict[str, jax.Array]:
    """Returns the products and the gradients of a kernel, rows in the order of `x`."""
    rows, of_rows = dispatch(x, plan), dispatch(dy, plan)
    y = kernel.forward(rows, weights, plan.owners)
    dx, dw = kernel.backward(rows, weights, plan.owners, of_rows)
    return {"y": combine(y, plan)[:, 0], "dx": combine(dx, plan)[:, 0], "dw": dw}


def _narrow(x: jax.Array, form: Format) -> jax.Array:
    """Returns x as 8-bit numbers, without their scale."""
    return form.numbers(x, form.scale(jnp.max(jnp.abs(x.astype(jnp.float32)))))
