"""Rows of tokens in the order of their experts, and back.

Each expert's rows are padded to whole blocks of the size that suits the kernel which multiplies
them. Pure look-ups, whose adjoints are look-ups too.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int

from jaxtrain.moe.grouped import block_count, block_rows


class Plan(NamedTuple):
    """Place of each row. A slot is a token's j-th choice, number token * k + j.

    slots: the slot of each row, or the number of slots where a block is padded. places: the row of
    each slot, or the number of rows for a choice of no expert. owners: the expert of each block.
    """

    slots: Int[Array, " rows"]
    places: Int[Array, "tokens k"]
    owners: Int[Array, " blocks"]


def plan_rows(
    chosen: Int[Array, "tokens k"], experts: int, largest: int, most: int | None = None
) -> Plan:
    """Returns the rows of these choices, in the order of experts, then of tokens. A choice with the
    number `experts` is of no expert and has no row. largest: greatest number of rows in a block.
    most: greatest number of choices that have a row, None for all of them."""
    count = chosen.size
    most = count if most is None else most
    block, blocks = block_rows(most, experts, largest), block_count(most, experts, largest)
    of_slot = chosen.reshape(-1)
    order = jnp.argsort(of_slot, stable=True)[:most]
    sizes = jnp.sum(of_slot[:, None] == jnp.arange(experts)[None], axis=0)
    padded = -(-sizes // block) * block
    ends = jnp.cumsum(padded)
    in_order = of_slot[order]
    shift = (ends - padded) - (jnp.cumsum(sizes) - sizes)
    rows = jnp.arange(most) + shift[jnp.minimum(in_order, experts - 1)]
    slots, places = places_of(order, rows, in_order < experts, blocks * block, count)
    begins = jnp.arange(blocks) * block
    owners = jnp.sum(begins[:, None] >= ends[None], axis=1)
    return Plan(slots, places.reshape(chosen.shape), jnp.minimum(owners, experts - 1))


def places_of(
    order: Int[Array, " some"],
    rows: Int[Array, " some"],
    used: Bool[Array, " some"],
    size: int,
    count: int,
) -> tuple[Int[Array, " {size}"], Int[Array, " {count}"]]:
    """Returns `Plan.slots` of `size` rows and the flat `Plan.places` of `count` slots. The slots in
    `order` have these rows if they are `used`."""
    # Unused slots get distinct places beyond the last row.
    places = jnp.where(used, rows, size + jnp.arange(len(rows)))
    slots = jnp.full(size, count).at[places].set(order, mode="drop", unique_indices=True)
    places = jnp.minimum(places, size)
    return slots, jnp.full(count, size).at[order].set(places, unique_indices=True)


@jax.custom_vjp
def dispatch(x: Float[Array, "tokens n"], plan: Plan) -> Float[Array, "rows n"]:
    """Each row's token, zeros where a block is padded. Its adjoint is a look-up too, not
    the scatter that a derivative would make."""
    return _take_rows(x, plan.slots // plan.places.shape[1])


@jax.custom_vjp
def combine(rows: Float[Array, "rows n"], plan: Plan) -> Float[Array, "tokens k n"]:
    """Each token's k rows, zeros of those it has not."""
    return _take_rows(rows, plan.places)


def weighed_sum(
    of_choices: Float[Array, "tokens k n"], shares: Float32[Array, "tokens k"]
) -> Float[Array, "tokens n"]:
    """The sum of each token's k rows by their shares, in fp32; in the dtype of the rows."""
    summed = jnp.sum(of_choices.astype(jnp.float32) * shares[..., None], axis=1)
    return summed.astype(of_choices.dtype)


def _take_rows(x: Float[Array, "m n"], numbers: Int[Array, "*rows"]) -> Float[Array, "*rows n"]:
    """Returns these rows of x; zeros for numbers beyond its end."""
    return x.at[numbers].get(mode="fill", fill_value=0)


def _dispatch_backward(
    plan: Plan, dy: Float[Array, "rows n"]
) -> tuple[Float[Array, "tokens n"], None]:
    summed = jnp.sum(combine(dy, plan).astype(jnp.float32), axis=1)
    return summed.astype(dy.dtype), None


def _combine_backward(
    plan: Plan, dy: Float[Array, "tokens k n"]
) -> tuple[Float[Array, "rows n"], None]:
    return _take_rows(dy.reshape(-1, dy.shape[-1]), plan.slots), None


dispatch.defvjp(lambda x, plan: (dispatch(x, plan), plan), _dispatch_backward)
combine.defvjp(lambda rows, plan: (combine(rows, plan), plan), _combine_backward)
