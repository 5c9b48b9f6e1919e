"""Mixture of experts: each token goes through the few feed-forward layers its router chooses.

Jiang et al. 2024, "Mixtral of experts": softmax over the experts' logits, the largest k, divided by
their sum. Nothing is dropped: an expert takes as many tokens as choose it (Gale et al. 2022,
"MegaBlocks"). Pure functions of what one device holds; who has which tokens and which part of the
hidden dim is the communicator's to say.

Rows, a token once for each of its experts, are laid out expert after expert, each expert's padded
to whole blocks of the size that suits the kernel which multiplies them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int

from jaxtrain.collectives.vary import varying_axes
from jaxtrain.moe.grouped import Asked, GroupedMatmul, block_count, block_rows, grouped_matmul
from jaxtrain.moe.kernels import PlatformGroupedMatmul, settled

Activation = Callable[[jax.Array], jax.Array]


class Plan(NamedTuple):
    """Where each row lies. A slot is a token's j-th choice, number token * k + j.

    slots: the slot of each row, or the number of slots where a block is padded. places: the row of
    each slot. owners: the expert of each block.
    """

    slots: Int[Array, " rows"]
    places: Int[Array, "tokens k"]
    owners: Int[Array, " blocks"]


def moe_layer(
    x: Float[Array, "tokens embed"],
    router: Float[Array, "embed experts"],
    weights: tuple[Float[Array, "experts _ _"], ...],
    *,
    k: int,
    activation: Activation,
    kernel: GroupedMatmul | PlatformGroupedMatmul | None = None,
) -> Float[Array, "tokens embed"]:
    """The outputs of each token's k experts, weighted by its router; in the dtype of x.

    weights: gate, up [experts, embed, mlp] and down [experts, mlp, embed], or up and down without a
    gate. Where these have a slice of the hidden dim each, the outputs, and the gradients of x and
    router, are parts of sums over the slices. kernel: None is the choice for the default backend.
    """
    *into, down = weights
    experts, hidden, embed = down.shape
    checked = bool(varying_axes(x, *weights))
    kernel = settled(kernel, Asked(len(x) * k, experts, embed, hidden, x.dtype, checked))
    shares, chosen = route(x, router, k)
    plan = plan_rows(chosen, experts, kernel.largest_block)
    rows = dispatch(x, plan)
    hidden = [grouped_matmul(kernel, rows, w, plan.owners) for w in into]
    h = activation(hidden[0])
    h = h * hidden[1] if len(hidden) > 1 else h
    out = grouped_matmul(kernel, h, down, plan.owners)
    of_choices = combine(out, plan).astype(jnp.float32)
    return jnp.sum(of_choices * shares[..., None], axis=1).astype(x.dtype)


def route(
    x: Float[Array, "tokens embed"], router: Float[Array, "embed experts"], k: int
) -> tuple[Float32[Array, "tokens {k}"], Int[Array, "tokens {k}"]]:
    """Each token's experts: their shares, which sum to 1, and their numbers, the likeliest first;
    of equal ones that of the lower number.

    A softmax over the k largest logits is that over all, its k largest divided by their sum. Logits
    are fp32 whatever the precision of other products: it is little work, and rounding moves tokens.
    """
    wide = (x.astype(jnp.float32), router.astype(jnp.float32))
    logits = jnp.matmul(*wide, precision=lax.Precision.HIGHEST)
    largest, chosen = lax.top_k(logits, k)
    return jax.nn.softmax(largest, axis=-1), chosen


def plan_rows(chosen: Int[Array, "tokens k"], experts: int, largest: int) -> Plan:
    """Rows for these choices, in the order of experts, and within one of tokens. largest: rows of a
    block at the most."""
    count = chosen.size
    block, blocks = (of(count, experts, largest) for of in (block_rows, block_count))
    of_slot = chosen.reshape(-1)
    order = jnp.argsort(of_slot, stable=True)
    sizes = jnp.sum(of_slot[:, None] == jnp.arange(experts)[None], axis=0)
    padded = -(-sizes // block) * block
    ends = jnp.cumsum(padded)
    in_order = of_slot[order]
    shift = (ends - padded) - (jnp.cumsum(sizes) - sizes)
    rows = jnp.arange(count) + shift[in_order]
    slots = jnp.full(blocks * block, count).at[rows].set(order, unique_indices=True)
    places = jnp.zeros(count, rows.dtype).at[order].set(rows, unique_indices=True)
    begins = jnp.arange(blocks) * block
    owners = jnp.sum(begins[:, None] >= ends[None], axis=1)
    return Plan(slots, places.reshape(chosen.shape), jnp.minimum(owners, experts - 1))


@jax.custom_vjp
def dispatch(x: Float[Array, "tokens n"], plan: Plan) -> Float[Array, "rows n"]:
    """Each row's token, zeros where a block is padded. Its adjoint is a look-up too, not
    the scatter that a derivative would make."""
    return _take_rows(x, plan.slots // plan.places.shape[1])


@jax.custom_vjp
def combine(rows: Float[Array, "rows n"], plan: Plan) -> Float[Array, "tokens k n"]:
    """Each token's k rows."""
    return rows[plan.places]


def _take_rows(x: Float[Array, "m n"], at: Int[Array, " rows"]) -> Float[Array, "rows n"]:
    """Rows `at` of x; zeros for those beyond its end."""
    return x.at[at].get(mode="fill", fill_value=0)


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
