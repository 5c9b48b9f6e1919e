"""Cross-entropy fused with the output head, split over the vocabulary and over chunks of tokens.

Logits exist for one chunk at a time, forward and backward. The derivative of the loss is known in
the forward pass up to a scalar, so the gradients of the head and of its input are made there, from
logits at hand: three matmuls a chunk where recomputing logits takes four. Over a split vocabulary
(Shoeybi et al. 2019, section 3) each device holds a slice of the logits, and three numbers a token
travel. Evaluated without a derivative, it makes no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int, PyTree

from jaxtrain.collectives.vary import Index
from jaxtrain.nn.communicator import Communicator

Carry = TypeVar("Carry")
Chunk = tuple[jax.Array, ...]
"""Of a chunk of tokens: what enters the head, targets and weights."""

MASKED = -1e30
"""The logit of a padded row of the vocabulary."""


@dataclass(frozen=True)
class HeadConfig:
    """Static facts of the head.

    vocab: ids below this are real; rows above pad the table and never get probability.
    softcap: logits are softcap * tanh(logits / softcap) (Gemma 2). scale: multiplies them first.
    chunk_tokens: tokens a chunk, at most, None for the communicator's; chunks divide the tokens
    evenly. frozen: no gradient of the head is made. accuracy: count what was right too; it sends
    nothing more.
    """

    vocab: int
    scale: float = 1.0
    softcap: float | None = None
    chunk_tokens: int | None = None
    frozen: bool = False
    accuracy: bool = False


class LossSums(NamedTuple):
    """Sums over the rows a device has seen, fp32 scalars. loss: of the losses; count: what it is
    divided by at the end of the step; beside: by name, what is divided by the same and logged
    beside it, such as what was right."""

    loss: jax.Array
    count: jax.Array
    beside: dict[str, jax.Array] = {}  # noqa: RUF012 (never changed)


Sums = tuple[Float32[Array, "..."], Float32[Array, "vocab embed"] | None]
"""Of the loss, and of the head's gradient unless it is frozen."""


class Residuals(NamedTuple):
    """What the forward pass leaves to the backward one: finished gradients but for one factor."""

    dx: Float[Array, "tokens embed"]
    dhead: Float32[Array, "vocab embed"] | None
    like: Float[Array, "0 embed"]
    """Of the head's dtype."""
    weights: Float[Array, " all_tokens"]
    lift: float | Float32[Array, ""]
    """By how much dx and dhead are too large."""


def refuse_other_sums(names: Collection[str], sums: LossSums) -> None:
    """Raises ValueError where a model does not sum beside its loss what it says, `names`."""
    if set(sums.beside) != set(names):
        raise ValueError(
            f"model.describe() says sums={names}, and the loss returned "
            f"{tuple(sorted(sums.beside))} beside it; name the same in both"
        )


class _Static(NamedTuple):
    comm: Communicator
    config: HeadConfig
    chunks: int
    rows: int


def cross_entropy(
    comm: Communicator,
    x: Float[Array, "tokens embed"],
    head: Float[Array, "vocab embed"],
    targets: Int[Array, " all_tokens"],
    weights: Float[Array, " all_tokens"],
    config: HeadConfig,
    *,
    rows: int,
) -> Float32[Array, ...]:
    """This device's share of sum_t weights_t * -log p(target_t); the shares add to the sum. With
    `config.accuracy` [2]: beside it the share of the weight whose target was the likeliest id.

    x: the residual stream's share, which sequence parallelism makes a part of all tokens. head:
    this device's slice of the vocabulary, in the compute dtype. rows: of the batch, whose tokens
    follow one another; tokens are chunked within rows, so the chunk count divides tokens / rows.
    """
    chunks = chunk_count(targets.shape[0], rows, config.chunk_tokens or comm.chunk_tokens)
    return _cross_entropy(_Static(comm, config, chunks, rows), x, head, targets, weights)


def chunk_count(tokens: int, rows: int, chunk_tokens: int) -> int:
    """Into how many chunks the tokens of `rows` rows are divided: the fewest that divide a row and
    hold at most `chunk_tokens`, or the row's length."""
    seq, wanted = tokens // rows, -(-tokens // chunk_tokens)
    return max(1, next((n for n in range(min(wanted, seq), seq + 1) if seq % n == 0), seq))


def logits(
    x: Float[Array, "tokens embed"],
    head: Float[Array, "vocab embed"],
    config: HeadConfig,
    offset: Index = 0,
) -> Float32[Array, "tokens vocab"]:
    """fp32 logits over the slice of the vocabulary that `head` is, which begins with the id
    `offset`; padded ids get `MASKED`."""
    out = lax.dot_general(x, head, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    out = _shape(out, config)
    ids = offset + lax.broadcasted_iota(jnp.int32, out.shape, 1)
    return jnp.where(ids < config.vocab, out, MASKED)


def _shape(
    raw: Float32[Array, "tokens vocab"], config: HeadConfig
) -> Float32[Array, "tokens vocab"]:
    """Scaled and soft-capped."""
    raw = raw if config.scale == 1.0 else raw * config.scale
    return raw if config.softcap is None else config.softcap * jnp.tanh(raw / config.softcap)


def _chunk(
    static: _Static,
    x: Float[Array, "tokens embed"],
    head: Float[Array, "vocab embed"],
    targets: Int[Array, " tokens"],
    weights: Float[Array, " tokens"],
) -> tuple[Float32[Array, ...], Float32[Array, "tokens vocab"]]:
    """Loss sum of one chunk, with what was right of it where asked; the gradient of its logits."""
    # With z_tv the logits and t' the target of token t, over the whole vocabulary:
    #   loss = sum_t w_t (log sum_v exp(z_tv) - z_tt'),  dz_tv = w_t (softmax(z_t)_v - [v = t']).
    # A device sees its slice of v: max, sum of exponentials and target's logit travel.
    comm, config = static.comm, static.config
    offset = comm.vocab_offset(head.shape[0])
    z = logits(x, head, config, offset)
    top = comm.max_over_vocab(z.max(-1))
    e = jnp.exp(z - top[:, None])
    mine = offset + lax.broadcasted_iota(jnp.int32, z.shape, 1) == targets[:, None]
    chosen = jnp.sum(jnp.where(mine, z, 0.0), -1)
    total, chosen = comm.sum_over_vocab(jnp.stack([e.sum(-1), chosen]))
    loss = jnp.sum((jnp.log(total) + top - chosen) * weights)
    if config.accuracy:
        loss = jnp.stack([loss, jnp.sum(jnp.where(chosen >= top, weights, 0.0))])
    dz = (e * (weights / total)[:, None]) - jnp.where(mine, weights[:, None], 0.0)
    if config.softcap is not None:
        dz = dz * (1 - (z / config.softcap) ** 2)
        # A padded id's logit is a constant, not the softcap of anything.
        dz = jnp.where(z > MASKED / 2, dz, 0.0)
    return loss, dz if config.scale == 1.0 else dz * config.scale


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _cross_entropy(
    static: _Static,
    x: Float[Array, "tokens embed"],
    head: Float[Array, "vocab embed"],
    targets: Int[Array, " all_tokens"],
    weights: Float[Array, " all_tokens"],
) -> Float32[Array, ...]:
    comm, n = static.comm, static.chunks
    x = comm.all_tokens(x)

    def step(total: jax.Array, at: Chunk) -> tuple[jax.Array, None]:
        loss, _ = _chunk(static, at[0], head, *at[1:])
        return total + loss, None

    parts = tuple(comm.chunks(a, n, rows=static.rows) for a in (x, targets, weights))
    zero = jnp.sum(weights[:1]) * 0.0
    total, _ = _loop(step, _start(static, zero), parts)
    return total / comm.vocab_ways()


def _start(static: _Static, zero: Float32[Array, ""]) -> Float32[Array, ...]:
    return jnp.stack([zero, zero]) if static.config.accuracy else zero


def _loop(
    step: Callable[[Carry, Chunk], tuple[Carry, PyTree]], carry: Carry, parts: Chunk
) -> tuple[Carry, PyTree]:
    """A scan, or its body alone when there is one chunk: XLA sees no loop then."""
    if len(parts[0]) > 1:
        return lax.scan(step, carry, parts)
    carry, out = step(carry, jax.tree.map(lambda p: p[0], parts))
    return carry, jax.tree.map(lambda o: o[None], out)


def _forward(
    static: _Static,
    x: Float[Array, "tokens embed"],
    head: Float[Array, "vocab embed"],
    targets: Int[Array, " all_tokens"],
    weights: Float[Array, " all_tokens"],
) -> tuple[Float32[Array, ...], Residuals]:
    """The loss, and its gradients with respect to x and head, `lift` times too large: in one loop
    over chunks, while each chunk's logits are at hand."""
    comm, n, dtype = static.comm, static.chunks, head.dtype
    lift = _lift(dtype, weights, static.config)
    x = comm.all_tokens(x)

    def step(carry: Sums, at: Chunk) -> tuple[Sums, jax.Array]:
        total, dhead = carry
        x, targets, weights = at
        loss, dz = _chunk(static, x, head, targets, weights)
        dz = (dz * lift).astype(dtype)
        dx = lax.dot_general(dz, head, (((1,), (0,)), ((), ())))
        if dhead is not None:
            dhead = dhead + lax.dot_general(
                dz, x, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32
            )
        return (total + loss, dhead), dx

    parts = tuple(comm.chunks(a, n, rows=static.rows) for a in (x, targets, weights))
    zero = jnp.sum(weights[:1]) * 0.0
    dhead = None if static.config.frozen else jnp.zeros(head.shape, jnp.float32) + zero
    start = (_start(static, zero), dhead)
    (total, dhead), dx = _loop(step, start, parts)
    dx = comm.scatter_head_gradient(comm.unchunk(dx, rows=static.rows))
    # Shape-free stand-ins carry what the cotangents of ids and weights need.
    return total / comm.vocab_ways(), Residuals(dx, dhead, head[:0], weights, lift)


def _backward(
    static: _Static, residuals: Residuals, g: Float32[Array, ...]
) -> tuple[jax.Array, jax.Array | None, None, jax.Array]:
    """All that is left: a multiplication by g / lift, g the cotangent of the loss, a scalar."""
    dx, dhead, like, weights, lift = residuals
    g = (g[0] if static.config.accuracy else g) / lift
    if dhead is not None:
        dhead = (dhead * g).astype(like.dtype)
    return (dx * g).astype(dx.dtype), dhead, None, weights * 0.0


def _lift(
    dtype: jax.typing.DTypeLike, weights: Float[Array, " tokens"], config: HeadConfig
) -> float | Float32[Array, ""]:
    """Logit gradients are weights times probabilities, most of them below fp16's smallest number:
    in fp16 they are kept this much larger until the loss scale is known. 1024 where no weight
    reaches 2, less where one does, so that none overflows. A power of two: it changes no digit;
    and the same on every slice of the vocabulary, for each has the weights of all its tokens."""
    if dtype != jnp.float16:
        return 1.0
    largest = jnp.max(jnp.abs(weights), initial=1.0) * max(abs(config.scale), 1.0)
    _, exponent = jnp.frexp(largest)  # of 1 it is 1
    return jnp.ldexp(jnp.float32(1024.0), 1 - exponent)


_cross_entropy.defvjp(_forward, _backward)
