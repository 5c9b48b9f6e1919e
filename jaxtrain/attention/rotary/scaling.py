"""Scalings of rotary frequencies, for longer sequences than a model was trained with.

Two of them, `DynamicNtk` and `LongRope`, depend on the length of the sequence. In training that is
the length of a row, packed or not, so all steps turn alike. In generation it is the number of
tokens so far, including those of the call. Cached keys stay as `DynamicNtk` turned them when they
were added; where `LongRope` changes its factors the cache is computed anew.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float64, Int

Frequencies = Float64[np.ndarray, " pairs"]
"""Radians per position of each pair of dims."""
Seq = int | Int[Array, ""]
"""Tokens of a sequence; an array where one program serves many lengths."""
ScaledFrequencies = Frequencies | Float[Array, " pairs"]
"""A JAX array only if the length is one."""


@runtime_checkable
class RopeScaling(Protocol):
    """Changes the frequencies so that a longer context can be read."""

    @property
    def attention_scaling(self) -> float:
        """Factor of cos and sin; scores get its square."""
        ...

    def scaled(self, frequencies: Frequencies, theta: float, seq: Seq) -> ScaledFrequencies:
        """Returns the changed frequencies. frequencies[i] of pair i is theta ** (-i / pairs)."""
        ...


class _Unscaled:
    """Leaves cos and sin unscaled."""

    @property
    def attention_scaling(self) -> float:
        return 1.0


def _shortens(factor: float) -> list[str]:
    return [] if factor >= 1 else [f"factor={factor} would shorten the context; use 1 or more"]


def _no_length(original_seq: int, least: int = 1) -> list[str]:
    return [] if original_seq >= least else [f"original_seq={original_seq} must be {least} or more"]


def _negative(name: str, value: float | None) -> list[str]:
    sound = value is None or 0 < value < math.inf
    return [] if sound else [f"{name}={value} must be above 0, or None for that of the paper"]


def _raise(problems: list[str]) -> None:
    if problems:
        raise ValueError("; ".join(problems))


@dataclass(frozen=True)
class LinearScaling(_Unscaled):
    """Position interpolation (Chen et al. 2023): every frequency divided by `factor`."""

    factor: float

    def __post_init__(self) -> None:
        _raise(_shortens(self.factor))

    def scaled(self, frequencies: Frequencies, theta: float, seq: Seq) -> ScaledFrequencies:
        return frequencies / self.factor


@dataclass(frozen=True)
class Llama3Scaling(_Unscaled):
    """Llama 3.1's: wavelengths above original_seq / `low_freq_factor` are stretched by `factor`,
    those below original_seq / `high_freq_factor` kept, and between them the two are blended.
    original_seq: the sequence length of the first training."""

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_seq: int = 8192

    def __post_init__(self) -> None:
        problems = _shortens(self.factor)
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            problems.append(
                f"low_freq_factor={self.low_freq_factor} must be above 0 and below "
                f"high_freq_factor={self.high_freq_factor}; Llama 3.1 has 1 and 4"
            )
        _raise(problems + _no_length(self.original_seq))

    def scaled(self, frequencies: Frequencies, theta: float, seq: Seq) -> ScaledFrequencies:
        turns = self.original_seq * frequencies / (2 * math.pi)
        low, high = self.low_freq_factor, self.high_freq_factor
        unchanged = np.clip((turns - low) / (high - low), 0.0, 1.0)
        return frequencies * (unchanged + (1 - unchanged) / self.factor)


@dataclass(frozen=True)
class Yarn:
    """YaRN (Peng et al. 2023): pairs that turn `beta_fast` times or more in original_seq positions
    are kept, those that turn `beta_slow` times or less are divided by `factor`, and between them
    (eq. 23-24) the share goes linearly with the pair's number.

    original_seq: the sequence length of the first training. truncate: those two bounds are whole
    numbers of pairs, the lower one rounded down and the upper one up.

    attention_factor: what cos and sin are multiplied by; None for m(1) (eq. 25, which puts its
    square before the scores), with m(s) = 0.1 s ln(factor) + 1. mscale, mscale_all_dim: where both
    are given, None is m(mscale) / m(mscale_all_dim) instead (DeepSeek-V2).
    """

    factor: float
    original_seq: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        problems = _shortens(self.factor) + _no_length(self.original_seq)
        if not 0 < self.beta_slow < self.beta_fast:
            problems.append(
                f"beta_slow={self.beta_slow} must be above 0 and below "
                f"beta_fast={self.beta_fast}; the paper has 1 and 32"
            )
        problems += _negative("attention_factor", self.attention_factor)
        problems += _negative("mscale", self.mscale)
        _raise(problems + _negative("mscale_all_dim", self.mscale_all_dim))

    @property
    def attention_scaling(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor

        def m(scale: float) -> float:
            return 0.1 * scale * math.log(self.factor) + 1.0

        if self.mscale is None or self.mscale_all_dim is None:
            return m(1.0)
        return m(self.mscale) / m(self.mscale_all_dim)

    def scaled(self, frequencies: Frequencies, theta: float, seq: Seq) -> ScaledFrequencies:
        pairs = len(frequencies)

        def pair_of(turns: float) -> float:
            return pairs * math.log(self.original_seq / (2 * math.pi * turns)) / math.log(theta)

        low, high = pair_of(self.beta_fast), pair_of(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * pairs - 1)
        high = low + 0.001 if low == high else high
        divided = np.clip((np.arange(pairs) - low) / (high - low), 0.0, 1.0)
        return frequencies * (1 - divided + divided / self.factor)


@dataclass(frozen=True)
class DynamicNtk(_Unscaled):
    """Dynamic NTK-aware interpolation (Peng et al. 2023, section 3.3): a sequence longer than
    `original_seq` is turned by a theta that grows with its length,
    theta (factor seq / original_seq - factor + 1) ** (head_dim / (head_dim - 2)).

    original_seq: the longest sequence that is turned as without, that of the first training.
    factor: how fast theta grows; at 1 it is in proportion.
    """

    factor: float
    original_seq: int

    def __post_init__(self) -> None:
        _raise(_shortens(self.factor) + _no_length(self.original_seq))

    def scaled(self, frequencies: Frequencies, theta: float, seq: Seq) -> ScaledFrequencies:
        pairs, xp = len(frequencies), np if isinstance(seq, int) else jnp
        longer = xp.maximum(seq, self.original_seq) / self.original_seq
        grown = self.factor * longer - (self.factor - 1)
        return frequencies * grown ** (-np.arange(pairs) / (pairs - 1))

    def unfit(self, pairs: int) -> list[str]:
        """Reasons why heads of so many pairs cannot be scaled."""
        if pairs > 1:
            return []
        return [
            "dynamic NTK scaling stretches all pairs of a head but the first, and there is no "
            "other; turn 4 dims or more"
        ]


@dataclass(frozen=True)
class LongRope:
    """LongRoPE (Ding et al. 2024) as Phi 3 has it: each pair's frequency divided by a factor of its
    own, of `short_factor` in sequences of up to `original_seq` tokens, else of `long_factor`.

    factor: how many times longer the longest sequence is than original_seq, that of the first
    training. attention_factor: what cos and sin are multiplied by at any length, None for
    sqrt(1 + ln(factor) / ln(original_seq)).
    """

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    factor: float
    original_seq: int
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        problems = _shortens(self.factor) + _no_length(self.original_seq, least=2)
        problems += _negative("attention_factor", self.attention_factor)
        for name in ("short_factor", "long_factor"):
            wrong = [factor for factor in getattr(self, name) if not 0 < factor < math.inf]
            if wrong:
                problems.append(f"{name} has {wrong[0]}; divide frequencies by numbers above 0")
        _raise(problems)

    @property
    def attention_scaling(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        return math.sqrt(1 + math.log(self.factor) / math.log(self.original_seq))

    def scaled(self, frequencies: Frequencies, theta: float, seq: Seq) -> ScaledFrequencies:
        short, long = frequencies / self.short_factor, frequencies / self.long_factor
        if isinstance(seq, int):
            return long if seq > self.original_seq else short
        return jnp.where(seq > self.original_seq, jnp.asarray(long), jnp.asarray(short))

    def unfit(self, pairs: int) -> list[str]:
        """Reasons why heads of so many pairs cannot be scaled."""
        counts = {name: len(getattr(self, name)) for name in ("short_factor", "long_factor")}
        return [
            f"{name} has {count} numbers and heads turn {pairs} pairs of dims; give {pairs}"
            for name, count in counts.items()
            if count != pairs
        ]
