"""The loss of preferences between two answers, fused with the output head.

A row holds pairs of documents, one after the other: the chosen answer with its prompt, then the
rejected one with the same prompt. Let l_t be the loss of token t in the model, r_t in a reference,
which does not change, and w_t its weight, 1 in answers and 0 in prompts. The gain of a document is
sum_t w_t (r_t - l_t), the logarithm of how much likelier its answer has become. The loss of a pair
depends on the difference of its two gains alone. So its gradient is that of a cross-entropy in
which each token is weighed by the loss's derivative: once the losses of all tokens are known, the
head's gradients are computed as in `cross_entropy`, from logits that are computed a second time,
unless all tokens are one chunk.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int

from jaxtrain.losses.cross_entropy import (
    HeadConfig,
    LossSettings,
    LossSums,
    Residuals,
    input_gradients,
    loss_and_gradients,
    settings,
    token_losses,
)
from jaxtrain.nn.communicator import Communicator
from jaxtrain.violations import at_least, positive, raise_violations

REFERENCE = "reference"
"""Field of a batch with the loss of each token in the reference model, [rows, seq] in nats."""
DOCUMENTS = "segments"
"""Field of a batch with the number of each token's document in its row, 0 for padding: odd numbers
are chosen, the even ones that follow them rejected."""
SUMS = ("reward_accuracy", "reward_margin", "reward_chosen", "reward_rejected")
"""Names of the sums beside the loss: `models.description.OF_PAIRS`."""


@dataclass(frozen=True)
class DPO:
    """Direct preference optimisation (Rafailov et al. 2023): the loss of a pair of answers is
    -log sigmoid(beta * (gain of the chosen - gain of the rejected)). The gain of an answer is the
    logarithm of how much likelier it has become than in the model that the run began with.

    beta: how strongly the model is kept near that one; larger keeps it nearer.
    label_smoothing: the probability that a pair is labelled the wrong way round, in [0, 0.5)
      (conservative DPO, Mitchell 2023).
    """

    beta: float = 0.1
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        violations = positive("beta", self.beta)
        violations += at_least("label_smoothing", self.label_smoothing, 0)
        if not violations and self.label_smoothing >= 0.5:
            violations = [
                f"label_smoothing={self.label_smoothing} says that most pairs are labelled the "
                "wrong way round; use less than 0.5, or exchange chosen and rejected"
            ]
        raise_violations(violations, "DPO")

    def loss(
        self, difference: Float32[Array, "*pairs"]
    ) -> tuple[Float32[Array, "*pairs"], Float32[Array, "*pairs"]]:
        """Returns the loss of pairs, and its derivative. difference: the chosen answer's gain minus
        the rejected one's."""
        margin, wrong = self.beta * difference, self.label_smoothing
        loss = (1 - wrong) * jax.nn.softplus(-margin) + wrong * jax.nn.softplus(margin)
        slope = wrong * jax.nn.sigmoid(margin) - (1 - wrong) * jax.nn.sigmoid(-margin)
        return loss, self.beta * slope

    def sums(
        self,
        comm: Communicator,
        x: Float[Array, "tokens embed"],
        head: Float[Array, "vocab embed"],
        batch: Mapping[str, jax.Array],
        config: HeadConfig,
    ) -> LossSums:
        """Returns this device's shares of the summed losses of pairs, of their number, and of
        `SUMS`: pairs whose chosen answer has the larger gain; beta times the difference of the two
        gains, and times each of them. A pair without a weight does not count.

        x, head: as of `cross_entropy`. batch: targets, weights, `REFERENCE` [rows, seq] and
        `DOCUMENTS` [rows, seq], of whole rows where rows are split.
        """
        rows = batch["targets"].shape[0]
        documents = local_segments(batch, comm).reshape(-1) - 1
        targets = batch["targets"].reshape(-1)
        weights, reference = (
            batch[name].reshape(-1).astype(jnp.float32) for name in ("weights", REFERENCE)
        )
        static = _PairSettings(settings(comm, config, targets, rows), self)
        pairs = _Pairs(targets, weights, reference, documents)
        loss, count, *others = _preference_loss(static, x, head, pairs)
        return LossSums(loss, count, dict(zip(SUMS, others, strict=True)))


class _PairSettings(NamedTuple):
    head: LossSettings
    objective: DPO


class _Pairs(NamedTuple):
    """Fields of a device's tokens, [all_tokens]. documents: numbers of them from 0, -1 for padding;
    those of chosen answers are even."""

    targets: Int[Array, " all_tokens"]
    weights: Float32[Array, " all_tokens"]
    reference: Float32[Array, " all_tokens"]
    documents: Int[Array, " all_tokens"]


def local_segments(batch: Mapping[str, jax.Array], comm: Communicator) -> Int[Array, "rows seq"]:
    """Returns the document numbers of the tokens that this call sees, 0 for padding. Those of a
    batch are of whole rows."""
    segments, seq = batch[DOCUMENTS], batch["tokens"].shape[1]
    return segments if segments.shape[1] == seq else segments[:, comm.positions(seq)]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _preference_loss(
    static: _PairSettings,
    x: Float[Array, "tokens embed"],
    head: Float[Array, "vocab embed"],
    pairs: _Pairs,
) -> Float32[Array, " sums"]:
    x = static.head.comm.all_tokens(x)
    losses = token_losses(static.head, x, head, pairs.targets).losses
    return _sums_and_derivative(static, losses, pairs)[0]


def _forward(
    static: _PairSettings,
    x: Float[Array, "tokens embed"],
    head: Float[Array, "vocab embed"],
    pairs: _Pairs,
) -> tuple[Float32[Array, " sums"], Residuals]:
    x = static.head.comm.all_tokens(x)
    losses, _, of_chunk = token_losses(static.head, x, head, pairs.targets)
    sums, derivative = _sums_and_derivative(static, losses, pairs)
    _, residuals = loss_and_gradients(static.head, x, head, pairs.targets, derivative, of_chunk)
    return sums, residuals


def _backward(
    static: _PairSettings, residuals: Residuals, g: Float32[Array, " sums"]
) -> tuple[jax.Array, jax.Array | None, None]:
    # Only the first sum is a loss; nobody differentiates the others.
    return *input_gradients(residuals, g[0]), None


_preference_loss.defvjp(_forward, _backward)


def _sums_and_derivative(
    static: _PairSettings, losses: Float32[Array, " all_tokens"], pairs: _Pairs
) -> tuple[Float32[Array, " sums"], Float32[Array, " all_tokens"]]:
    """Returns this device's shares of the loss, the count and `SUMS`; and the derivative of the
    loss with respect to the loss of each token."""
    comm, rows = static.head.comm, static.head.rows
    # What XLA sends of documents, where it splits rows, waits for the losses: collectives of a loop
    # and others at one time hang simulated devices.
    losses, numbers = lax.optimization_barrier((losses, pairs.documents))
    weights, documents = (a.reshape(rows, -1) for a in (pairs.weights, numbers))
    seq = documents.shape[1]
    row_seq = comm.row_seq(seq)
    gains = weights * (pairs.reference - losses).reshape(rows, -1)
    # A document has a token or more, so there are at most row_seq of them.
    both = _document_sums(jnp.stack([gains, weights]), documents, row_seq + row_seq % 2)
    gains, weight = comm.sum_over_row(both).reshape(2, rows, -1, 2)
    chosen, rejected = gains[..., 0], gains[..., 1]
    loss, slope = static.objective.loss(chosen - rejected)
    counts = weight.sum(-1) > 0
    beta = static.objective.beta
    rewards = (beta * (chosen - rejected), beta * chosen, beta * rejected)
    values = (loss, jnp.ones_like(loss), jnp.where(chosen > rejected, 1.0, 0.0), *rewards)
    shares = comm.vocab_ways() * (row_seq // seq)
    sums = jnp.stack([jnp.sum(jnp.where(counts, value, 0.0)) for value in values]) / shares
    # A gain falls as the losses of its tokens rise.
    slopes = jnp.stack([-slope, slope], -1).reshape(rows, -1)
    of_token = jnp.take_along_axis(slopes, jnp.maximum(documents, 0), axis=1, mode="clip")
    return sums, (of_token * weights).reshape(-1)


def _document_sums(
    values: Float32[Array, "kinds rows seq"], documents: Int[Array, "rows seq"], count: int
) -> Float32[Array, "kinds rows count"]:
    """Returns the sums of values over each of `count` documents, with the same bits every time: a
    scatter of all tokens would add them in any order on a GPU, and a replayed step would differ."""
    changes = documents[:, 1:] != documents[:, :-1]
    edge = jnp.ones_like(documents[:, :1], bool)
    starts, ends = jnp.concatenate([edge, changes], 1), jnp.concatenate([changes, edge], 1)

    def joined(left: tuple[jax.Array, ...], right: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        return left[0] | right[0], right[1] + jnp.where(right[0], 0.0, left[1])

    _, totals = lax.associative_scan(
        joined, (jnp.broadcast_to(starts, values.shape), values), axis=2
    )
    # A run of a document's tokens has its sum at its end. A device has one or, in zig-zag order,
    # two such runs, and two numbers have one sum.
    totals = jnp.where(ends & (documents >= 0), totals, 0.0)
    rows = jnp.arange(len(documents))[:, None]
    empty = jnp.zeros((*values.shape[:2], count)) + 0.0 * values[..., :1]
    return empty.at[:, rows, documents].add(totals, mode="drop")
