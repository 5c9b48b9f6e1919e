"""Cross-entropy fused with the output head, split over the vocabulary and over chunks of tokens.

Logits exist for one chunk at a time, forward and backward. The derivative of the loss is known in
the forward pass up to a scalar, so the gradients of the head and of its input are made there, from
logits at hand: three matmuls a chunk where recomputing logits takes four. Over a split vocabulary
(Shoeybi et al. 2019, section 3) each device holds a slice of the logits, and three numbers a token
travel. Evaluated without a derivative, it makes no gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain.nn.communicator import Communicator

MASKED = -1e30
"""The logit of a padded row of the vocabulary."""


@dataclass(frozen=True)
class HeadConfig:
    """Static facts of the head.

    vocab: ids below this are real; rows above pad the table and never get probability.
    softcap: logits are softcap * tanh(logits / softcap) (Gemma 2); scale multiplies them first.
    chunk_tokens: tokens a chunk, at most; chunks divide the tokens evenly. frozen: no gradient of
    the head is made. accuracy: count what was right too; it sends nothing more.
    """

    vocab: int
    scale: float = 1.0
    softcap: float | None = None
    chunk_tokens: int = 2048
    frozen: bool = False
    accuracy: bool = False


class LossSums(NamedTuple):
    """Sums over the rows a device has seen, fp32 scalars: of the loss, of what it is divided by at
    the end of the step, and by name of what is divided by the same and told beside it."""

    loss: jax.Array
    count: jax.Array
    beside: dict[str, jax.Array] = {}  # noqa: RUF012 (never changed)


class _Static(NamedTuple):
    comm: Communicator
    config: HeadConfig
    chunks: int
    rows: int


def cross_entropy(
    comm: Communicator,
    x: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    config: HeadConfig,
    *,
    rows: int,
) -> jax.Array:
    """This device's share of sum_t weights_t * -log p(target_t); the shares add to the sum. With
    `config.accuracy` [2]: beside it the share of the weight whose target was the likeliest id.

    x [tokens, embed] (the residual stream's share), head [vocab slice, embed] in the compute
    dtype, targets and weights [all tokens]. `rows`: tokens are chunked within rows, so the chunk
    count divides tokens / rows.
    """
    chunks = chunk_count(targets.shape[0], rows, config.chunk_tokens)
    return _cross_entropy(_Static(comm, config, chunks, rows), x, head, targets, weights)


def chunk_count(tokens: int, rows: int, chunk_tokens: int) -> int:
    """Into how many chunks the tokens of `rows` rows are divided: the fewest that divide a row and
    hold at most `chunk_tokens`, or the row's length."""
    seq, wanted = tokens // rows, -(-tokens // chunk_tokens)
    return max(1, next((n for n in range(min(wanted, seq), seq + 1) if seq % n == 0), seq))


def logits(x: jax.Array, head: jax.Array, config: HeadConfig, offset: Any = 0) -> jax.Array:
    """fp32 logits [tokens, vocab slice] of x [tokens, embed]; padded ids get `MASKED`."""
    out = lax.dot_general(x, head, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    out = _shape(out, config)
    ids = offset + lax.broadcasted_iota(jnp.int32, out.shape, 1)
    return jnp.where(ids < config.vocab, out, MASKED)


def _shape(raw: jax.Array, config: HeadConfig) -> jax.Array:
    raw = raw if config.scale == 1.0 else raw * config.scale
    return raw if config.softcap is None else config.softcap * jnp.tanh(raw / config.softcap)


def _chunk(static: _Static, x: jax.Array, head: jax.Array, targets: Any, weights: Any) -> Any:
    """Loss sum of one chunk, and what was right of it where asked; the gradient of its logits."""
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
def _cross_entropy(static: _Static, x: Any, head: Any, targets: Any, weights: Any) -> jax.Array:
    comm, n = static.comm, static.chunks
    x = comm.all_tokens(x)

    def step(total: jax.Array, at: Any) -> tuple[jax.Array, None]:
        loss, _ = _chunk(static, at[0], head, *at[1:])
        return total + loss, None

    parts = tuple(comm.chunks(a, n, rows=static.rows) for a in (x, targets, weights))
    zero = jnp.sum(weights[:1]) * 0.0
    total, _ = _loop(step, _start(static, zero), parts)
    return total / comm.vocab_ways()


def _start(static: _Static, zero: jax.Array) -> jax.Array:
    return jnp.stack([zero, zero]) if static.config.accuracy else zero


def _loop(step: Any, carry: Any, parts: Any) -> Any:
    """A scan, or its body alone when there is one chunk: XLA sees no loop then."""
    if len(parts[0]) > 1:
        return lax.scan(step, carry, parts)
    carry, out = step(carry, jax.tree.map(lambda p: p[0], parts))
    return carry, jax.tree.map(lambda o: o[None], out)


def _forward(static: _Static, x: Any, head: Any, targets: Any, weights: Any) -> tuple[Any, Any]:
    comm, n, dtype = static.comm, static.chunks, head.dtype
    lift = _lift(dtype, weights, static.config)
    x = comm.all_tokens(x)

    def step(carry: Any, at: Any) -> tuple[Any, jax.Array]:
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
    return total / comm.vocab_ways(), (dx, dhead, head[:0], weights, lift)


def _backward(static: _Static, residuals: Any, g: jax.Array) -> Any:
    dx, dhead, like, weights, lift = residuals
    g = (g[0] if static.config.accuracy else g) / lift
    if dhead is not None:
        dhead = (dhead * g).astype(like.dtype)
    return (dx * g).astype(dx.dtype), dhead, None, weights * 0.0


def _lift(dtype: Any, weights: jax.Array, config: HeadConfig) -> Any:
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
