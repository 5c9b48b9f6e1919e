"""Cross-entropy fused with the output head, split over the vocabulary and over chunks of tokens.

Logits exist for one chunk at a time, forward and backward. The derivative of the loss is known in
the forward pass up to a scalar, so the gradients of the head and of its input are computed there,
from the same logits: three matmuls a chunk, where recomputing logits takes four. Over a split
vocabulary (Shoeybi et al. 2019, section 3) each device holds a slice of the logits, and sends three
numbers a token. Evaluated without a derivative, it computes no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int, PyTree

from jaxtrain.collectives.vary import Index
from jaxtrain.nn.communicator import Communicator

Carry = TypeVar("Carry")
ChunkArrays = tuple[jax.Array, ...]
"""A chunk of tokens: the head's input, targets and weights."""

MASKED = -1e30
"""The logit of a padded row of the vocabulary."""


@dataclass(frozen=True)
class HeadConfig:
    """Static facts of the head.

    vocab: ids below this are real; rows above pad the table and never get probability. softcap:
    logits are softcap * tanh(logits / softcap) (Gemma 2). scale: multiplies them first.
    chunk_tokens: most tokens of a chunk, None for the communicator's; chunks divide the tokens
    evenly. frozen: the head gets no gradient. accuracy: also count correct predictions; this sends
    nothing more.
    """

    vocab: int
    scale: float = 1.0
    softcap: float | None = None
    chunk_tokens: int | None = None
    frozen: bool = False
    accuracy: bool = False


class LossSums(NamedTuple):
    """Sums over the rows of a device, fp32 scalars. loss: sum of the losses. count: divisor at the
    end of the step. others: further sums by name, divided by the same count and logged, such as the
    number of correct predictions."""

    loss: jax.Array
    count: jax.Array
    others: dict[str, jax.Array] = {}  # noqa: RUF012 (never changed)


ChunkSums = tuple[Float32[Array, "..."], Float32[Array, "vocab embed"] | None]
"""Sums of the loss, and of the head's gradient unless it is frozen."""


class Residuals(NamedTuple):
    """Saved for the backward pass: gradients that are finished except for one factor."""

    dx: Float[Array, "tokens embed"]
    dhead: Float32[Array, "vocab embed"] | None
    like: Float[Array, "0 embed"]
    """Empty; has the head's dtype."""
    losses: Float[Array, " all_tokens"]
    """The derivative with respect to the weights; has their dtype."""
    lift: float | Float32[Array, ""]
    """Factor by which dx and dhead are too large."""


def refuse_other_sums(names: Collection[str], sums: LossSums) -> None:
    """Raises ValueError if the sums beside a model's loss are not the declared `names`."""
    if set(sums.others) != set(names):
        raise ValueError(
            f"model.describe() says sums={names}, and the loss returned "
            f"{tuple(sorted(sums.others))} beside it; name the same in both"
        )


class LossSettings(NamedTuple):
    """rows: of the batch, on this device. chunks: in which the loss takes their tokens."""

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
    `config.accuracy` [2]: the second is the share of the weight whose target was the likeliest id.

    x: the residual stream's share, which sequence parallelism makes a part of all tokens. head:
    this device's slice of the vocabulary, in the compute dtype. rows: of the batch, in token order.
    Tokens are chunked within rows, so the chunk count divides tokens / rows.
    """
    return _cross_entropy(settings(comm, config, targets, rows), x, head, targets, weights)


def settings(
    comm: Communicator, config: HeadConfig, targets: Int[Array, " all_tokens"], rows: int
) -> LossSettings:
    """Returns the settings for these targets, those of `rows` rows."""
    chunks = chunk_count(targets.shape[0], rows, config.chunk_tokens or comm.chunk_tokens)
    return LossSettings(comm, config, chunks, rows)


def chunk_count(tokens: int, rows: int, chunk_tokens: int) -> int:
    """Number of chunks for the tokens of `rows` rows: the fewest that divide a row evenly and hold
    at most `chunk_tokens` tokens, or the row's length."""
    seq, fewest = tokens // rows, -(-tokens // chunk_tokens)
    return max(1, next((n for n in range(min(fewest, seq), seq + 1) if seq % n == 0), seq))


def logits(
    x: Float[Array, "tokens embed"],
    head: Float[Array, "vocab embed"],
    config: HeadConfig,
    offset: Index = 0,
) -> Float32[Array, "tokens vocab"]:
    """fp32 logits, scaled and soft-capped by `config`. `head` is the slice of the vocabulary that
    begins with the id `offset`; padded ids get `MASKED`."""
    out = lax.dot_general(x, head, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    out = out if config.scale == 1.0 else out * config.scale
    if config.softcap is not None:
        out = config.softcap * jnp.tanh(out / config.softcap)
    ids = offset + lax.broadcasted_iota(jnp.int32, out.shape, 1)
    return jnp.where(ids < config.vocab, out, MASKED)


class ChunkLogits(NamedTuple):
    """Of a chunk of tokens. logits, exponentials: of this device's slice of the vocabulary, the
    second divided by that of the greatest logit. is_target: where the target is. total: sum of the
    exponentials. losses: of the tokens, unweighted. correct: True if the target has the greatest
    logit."""

    logits: Float32[Array, "tokens vocab"]
    exponentials: Float32[Array, "tokens vocab"]
    is_target: Bool[Array, "tokens vocab"]
    total: Float32[Array, " tokens"]
    losses: Float32[Array, " tokens"]
    correct: Bool[Array, " tokens"]


# With z_tv the logits and t' the target of token t, over the whole vocabulary:
#   loss = sum_t w_t (log sum_v exp(z_tv) - z_tt'),  dz_tv = w_t (softmax(z_t)_v - [v = t']).
# A device sees its slice of v: max, sum of exponentials and target's logit travel.


def _logits_of(
    static: LossSettings,
    x: Float[Array, "tokens embed"],
    head: Float[Array, "vocab embed"],
    targets: Int[Array, " tokens"],
) -> ChunkLogits:
    comm = static.comm
    offset = comm.vocab_offset(head.shape[0])
    z = logits(x, head, static.config, offset)
    top = comm.max_over_vocab(z.max(-1))
    e = jnp.exp(z - top[:, None])
    is_target = offset + lax.broadcasted_iota(jnp.int32, z.shape, 1) == targets[:, None]
    chosen = jnp.sum(jnp.where(is_target, z, 0.0), -1)
    total, chosen = comm.sum_over_vocab(jnp.stack([e.sum(-1), chosen]))
    return ChunkLogits(z, e, is_target, total, jnp.log(total) + top - chosen, chosen >= top)


def _chunk(
    static: LossSettings, of_chunk: ChunkLogits, weights: Float[Array, " tokens"]
) -> tuple[Float32[Array, ...], Float32[Array, "tokens vocab"]]:
    """Loss sum of a chunk, with `accuracy` also its correct weight; the gradient of its logits."""
    config, (z, e, is_target, total, losses, correct) = static.config, of_chunk
    loss = jnp.sum(losses * weights)
    if config.accuracy:
        loss = jnp.stack([loss, jnp.sum(jnp.where(correct, weights, 0.0))])
    dz = (e * (weights / total)[:, None]) - jnp.where(is_target, weights[:, None], 0.0)
    if config.softcap is not None:
        dz = dz * (1 - (z / config.softcap) ** 2)
        # A padded id's logit is a constant, not the softcap of anything.
        dz = jnp.where(z > MASKED / 2, dz, 0.0)
    return loss, dz if config.scale == 1.0 else dz * config.scale


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _cross_entropy(
    static: LossSettings,
    x: Float[Array, "tokens embed"],
    head: Float[Array, "vocab embed"],
    targets: Int[Array, " all_tokens"],
    weights: Float[Array, " all_tokens"],
) -> Float32[Array, ...]:
    comm, n = static.comm, static.chunks
    x = comm.all_tokens(x)

    def step(total: jax.Array, chunk: ChunkArrays) -> tuple[jax.Array, None]:
        x, targets, weights = chunk
        return total + _chunk(static, _logits_of(static, x, head, targets), weights)[0], None

    parts = tuple(comm.chunks(a, n, rows=static.rows) for a in (x, targets, weights))
    zero = jnp.sum(weights[:1]) * 0.0
    total, _ = _loop(step, _start(static, zero), parts)
    return total / comm.vocab_ways()


class TokenLosses(NamedTuple):
    """Results for each token, the same on every slice of the vocabulary. losses: in nats.
    likeliest: True if no id has a greater logit than the target. of_chunk: the logits, if all
    tokens are one chunk."""

    losses: Float32[Array, " all_tokens"]
    likeliest: Bool[Array, " all_tokens"]
    of_chunk: ChunkLogits | None


def token_losses(
    static: LossSettings,
    x: Float[Array, "all_tokens embed"],
    head: Float[Array, "vocab embed"],
    targets: Int[Array, " all_tokens"],
) -> TokenLosses:
    """Returns the loss of each token."""
    comm = static.comm
    if static.chunks == 1:
        of_chunk = _logits_of(static, x, head, targets)
        return TokenLosses(of_chunk.losses, of_chunk.correct, of_chunk)

    def step(none: tuple[()], chunk: ChunkArrays) -> tuple[tuple[()], tuple[jax.Array, jax.Array]]:
        of_chunk = _logits_of(static, chunk[0], head, chunk[1])
        return none, (of_chunk.losses, of_chunk.correct)

    parts = tuple(comm.chunks(a, static.chunks, rows=static.rows) for a in (x, targets))
    losses, likeliest = (comm.unchunk(a, rows=static.rows) for a in _loop(step, (), parts)[1])
    return TokenLosses(losses, likeliest, None)


def _start(static: LossSettings, zero: Float32[Array, ""]) -> Float32[Array, ...]:
    return jnp.stack([zero, zero]) if static.config.accuracy else zero


def _loop(
    step: Callable[[Carry, ChunkArrays], tuple[Carry, PyTree]], carry: Carry, parts: ChunkArrays
) -> tuple[Carry, PyTree]:
    """Runs a scan, or its body alone for a single chunk: XLA sees no loop then."""
    if len(parts[0]) > 1:
        return lax.scan(step, carry, parts)
    carry, out = step(carry, jax.tree.map(lambda p: p[0], parts))
    return carry, jax.tree.map(lambda o: o[None], out)


def _forward(
    static: LossSettings,
    x: Float[Array, "tokens embed"],
    head: Float[Array, "vocab embed"],
    targets: Int[Array, " all_tokens"],
    weights: Float[Array, " all_tokens"],
) -> tuple[Float32[Array, ...], Residuals]:
    return loss_and_gradients(static, static.comm.all_tokens(x), head, targets, weights)


def loss_and_gradients(
    static: LossSettings,
    x: Float[Array, "all_tokens embed"],
    head: Float[Array, "vocab embed"],
    targets: Int[Array, " all_tokens"],
    weights: Float[Array, " all_tokens"],
    of_chunk: ChunkLogits | None = None,
) -> tuple[Float32[Array, ...], Residuals]:
    """Returns the loss, and its gradients with respect to x and head, `lift` times too large. One
    loop over chunks computes all of them from each chunk's logits, those of a single chunk from
    `of_chunk` if it is given."""
    comm, n, dtype = static.comm, static.chunks, head.dtype
    lift = _lift(dtype, weights, static.config)

    def step(carry: ChunkSums, chunk: ChunkArrays) -> tuple[ChunkSums, tuple[jax.Array, jax.Array]]:
        total, dhead = carry
        x, targets, weights = chunk
        of_this = of_chunk or _logits_of(static, x, head, targets)
        loss, dz = _chunk(static, of_this, weights)
        dz = (dz * lift).astype(dtype)
        dx = lax.dot_general(dz, head, (((1,), (0,)), ((), ())))
        if dhead is not None:
            dhead = dhead + lax.dot_general(
                dz, x, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32
            )
        return (total + loss, dhead), (dx, of_this.losses)

    parts = tuple(comm.chunks(a, n, rows=static.rows) for a in (x, targets, weights))
    zero = jnp.sum(weights[:1]) * 0.0
    dhead = None if static.config.frozen else jnp.zeros(head.shape, jnp.float32) + zero
    start = (_start(static, zero), dhead)
    (total, dhead), (dx, losses) = _loop(step, start, parts)
    dx = comm.scatter_head_gradient(comm.unchunk(dx, rows=static.rows))
    losses = comm.unchunk(losses, rows=static.rows) / comm.vocab_ways()
    # An empty stand-in carries the head's dtype.
    residuals = Residuals(dx, dhead, head[:0], losses.astype(weights.dtype), lift)
    return total / comm.vocab_ways(), residuals


def _backward(
    static: LossSettings, residuals: Residuals, g: Float32[Array, ...]
) -> tuple[jax.Array, jax.Array | None, None, jax.Array]:
    g = g[0] if static.config.accuracy else g
    return *input_gradients(residuals, g), None, residuals.losses * g


def input_gradients(
    residuals: Residuals, g: Float32[Array, ""]
) -> tuple[jax.Array, jax.Array | None]:
    """Returns the saved gradients of x and head times g / lift; g: the cotangent of the loss."""
    dx, dhead, like, _, lift = residuals
    g = g / lift
    if dhead is not None:
        dhead = (dhead * g).astype(like.dtype)
    return (dx * g).astype(dx.dtype), dhead


def _lift(
    dtype: jax.typing.DTypeLike, weights: Float[Array, " tokens"], config: HeadConfig
) -> float | Float32[Array, ""]:
    """Factor of the logit gradients until the loss scale is known; 1 except in fp16. They are
    weights times probabilities, mostly below fp16's smallest number. 1024 where no weight reaches
    2, else less, so that none overflows. A power of two changes no digit. It is the same on every
    slice of the vocabulary, as each has the weights of all its tokens."""
    if dtype != jnp.float16:
        return 1.0
    largest = jnp.max(jnp.abs(weights), initial=1.0) * max(abs(config.scale), 1.0)
    _, exponent = jnp.frexp(largest)  # of 1 it is 1
    return jnp.ldexp(jnp.float32(1024.0), 1 - exponent)


_cross_entropy.defvjp(_forward, _backward)
