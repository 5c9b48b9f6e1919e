"""The one FLOP counter: what a step must compute, from the shapes of a model's matmuls.

Pure arithmetic; a multiply-add is two FLOPs, only matmuls are counted (Kaplan et al. 2020, table 1;
Chowdhery et al. 2022, appendix B). Whatever a program computes beyond this, such as recomputed
activations, is not model FLOPs and lowers the utilisation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Matmul:
    """A [k, n] weight that every token meets `count` times: layers, or layers x active experts."""

    name: str
    k: int
    n: int
    count: int = 1


@dataclass(frozen=True)
class AttentionFlops:
    """The two products of attention, scores and values, in `count` layers of one shape.

    A causal query sees itself and what came before, of which a `window` keeps the last `window`
    keys, itself included. `value_dim` is the head_dim of the values, where it differs.
    """

    heads: int
    head_dim: int
    window: int | None = None
    count: int = 1
    causal: bool = True
    value_dim: int | None = None

    def __post_init__(self) -> None:
        if self.window is not None and (not self.causal or self.window < 1):
            raise ValueError(
                f"window={self.window} with causal={self.causal}: a window is a number of keys, "
                "at least 1, of causal attention; use window=None or causal=True"
            )

    def pairs(self, seq: int) -> int:
        """Unmasked (query, key) pairs of one sequence: seq(seq+1)/2 when causal."""
        if not self.causal:
            return seq * seq
        seen = min(seq, self.window or seq)
        return seen * (seen + 1) // 2 + (seq - seen) * seen

    def flops(self, pairs: int) -> int:
        """Forward FLOPs of `pairs` (query, key) pairs in all heads and layers."""
        value_dim = self.head_dim if self.value_dim is None else self.value_dim
        return 2 * pairs * self.heads * (self.head_dim + value_dim) * self.count


@dataclass(frozen=True)
class ModelFlops:
    """Forward FLOPs of some sequences; attention in both conventions, exact integers.

    `attention_full` counts seq x seq pairs whatever the mask (Chowdhery et al. 2022, and what a
    kernel that skips nothing computes); `attention_causal` counts unmasked pairs only.
    """

    matmul: int
    attention_full: int
    attention_causal: int

    @property
    def train_full(self) -> int:
        """Forward and backward, attention counted whole: the numerator of `mfu_full`."""
        return train_flops(self.matmul + self.attention_full)

    @property
    def train_causal(self) -> int:
        """Forward and backward, unmasked attention only: the numerator of `mfu_causal`."""
        return train_flops(self.matmul + self.attention_causal)


def train_flops(forward: int) -> int:
    """3x forward: the backward makes a product for the input and one for the weight of each."""
    return 3 * forward


def forward_flops(
    matmuls: Iterable[Matmul],
    attention: Iterable[AttentionFlops],
    *,
    token_flops: int = 0,
    seq: int,
    sequences: int = 1,
    documents: Mapping[int, float] | None = None,
) -> ModelFlops:
    """Forward FLOPs of `sequences` sequences of `seq` tokens, over all devices together.

    token_flops: of other products, for each token.
    documents: where attention stays within documents, how many of each length there are in all the
    sequences; None where a sequence is one. The output head is a `Matmul` like any other; the
    embedding look-up is none.
    Raises `ValueError` when seq or sequences is not positive.
    """
    if seq < 1 or sequences < 1:
        raise ValueError(f"seq={seq} and sequences={sequences} must both be at least 1")
    weights = sum(matmul.k * matmul.n * matmul.count for matmul in matmuls)
    layers, lengths = tuple(attention), {seq: sequences} if documents is None else documents
    return ModelFlops(
        matmul=(2 * weights + token_flops) * seq * sequences,
        attention_full=sum(layer.flops(seq * seq) for layer in layers) * sequences,
        attention_causal=sum(
            layer.flops(round(sum(layer.pairs(n) * count for n, count in lengths.items())))
            for layer in layers
        ),
    )


def mfu(flops: float, *, step_s: float, peak_flops_per_device: float, devices: int) -> float:
    """Model FLOPs utilisation: the share of the machine's dense peak that `flops` a step uses.

    Chowdhery et al. 2022, appendix B, with `ModelFlops.train_full` (log it as `mfu_full`); with
    `train_causal`, `mfu_causal`. `flops` is of the whole step, not of one device.
    """
    capacity = step_s * peak_flops_per_device * devices
    if capacity <= 0:
        raise ValueError(
            f"step_s={step_s}, peak_flops_per_device={peak_flops_per_device} and devices={devices} "
            "must all be positive"
        )
    return flops / capacity
