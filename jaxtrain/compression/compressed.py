"""An all-reduce of compressed numbers in two phases, each with error feedback.

Encode, all-to-all, decode and sum in fp32, encode again, all-gather, decode (Tang et al. 2021,
1-bit Adam; Karimireddy et al. 2019). So the bytes a device sends do not grow with the
number of devices, as they do where everybody's encoding goes to everybody. What an encoding loses
is added to the next step's numbers, on the worker and on the owner alike: late, never lost.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, Integer, Key, UInt8

from jaxtrain.collectives.algorithm import Algorithm, all_gather, all_to_all
from jaxtrain.collectives.hierarchical import Hierarchical
from jaxtrain.collectives.lax_form import Lax
from jaxtrain.collectives.vary import vary
from jaxtrain.compression.codecs import Codec
from jaxtrain.compression.powersgd import PowerSGD
from jaxtrain.mesh.axes import MeshAxes
from jaxtrain.violations import count, flag, is_number, raise_violations


@dataclass(frozen=True)
class Guard:
    """When compressed sums are given up for exact ones: at the first sample beyond a bound.

    every: steps between samples, the first compressed step being the first of them; a sampled step
      makes the exact sums too, and pays for both.
    max_error: bound of |compressed - exact| / |exact|, over all compressed leaves. min_cosine:
      bound of the cosine between them. With error feedback what earlier sums lack is in the
      compressed one, so neither is that of the codec alone. None: no bound. Sums that are not
      finite where the exact ones are lie beyond any bound. What the codec has left unsent by then
      is dropped, not added.
    """

    every: int = 50
    max_error: float | None = None
    min_cosine: float | None = 0.1

    def __post_init__(self) -> None:
        violations = count("every", self.every)
        if self.max_error is None and self.min_cosine is None:
            violations.append("max_error and min_cosine are both None; use for example 2.0 or 0.1")
        error, cosine = self.max_error, self.min_cosine
        if error is not None and not (is_number(error) and error > 0):
            violations.append(f"max_error={error!r} must be a positive number; use for example 2.0")
        if cosine is not None and not (is_number(cosine) and -1 <= cosine <= 1):
            violations.append(f"min_cosine={cosine!r} must be a number in [-1, 1]; use 0.1")
        raise_violations(violations)


@dataclass(frozen=True)
class Compressed:
    """Sum of gradients in fewer bytes.

    Error feedback compensates the errors of a codec if the update is linear in the gradient, as in
    SGD without clipping. AdamW and `clip_norm` are not linear: with them `Sign` and `TopK` end well
    above the exact run, while `Int8`, `Fp8` and a `PowerSGD` of some rank do not
    (experiments/LOG.md).

    codec: `PowerSGD` for matrices by `powersgd_all_reduce`, any other by `compressed_all_reduce`.
      In training one error a leaf is kept on each device: there the owner's joins the same device's
      worker error, to be sent with its next numbers.
    error_feedback: False drops what was lost and the state that carries it. `Sign`, `TopK` and
      `PowerSGD` are biased, and need not converge without.
    warmup_steps: the first steps, which sum exactly (Tang et al. 2021 take about 15% of the run,
      until Adam's second moment has settled).
    by: what moves the bytes; `Hierarchical` for `PowerSGD` only, whose factors are plain sums.
    guard: when to go back to exact sums for good; None: never.
    """

    codec: Codec | PowerSGD
    error_feedback: bool = True
    warmup_steps: int = 0
    by: Algorithm | Hierarchical = field(default_factory=Lax)
    guard: Guard | None = None

    def __post_init__(self) -> None:
        violations = flag("error_feedback", self.error_feedback)
        if isinstance(self.codec, type) or not hasattr(self.codec, "payload_bytes"):
            violations.append(f"codec={self.codec!r} is no codec; use a value such as Int8()")
        violations += count("warmup_steps", self.warmup_steps, 0) + self._by_violations()
        if self.guard is not None and not isinstance(self.guard, Guard):
            violations.append(f"guard={self.guard!r} is no guard; use Guard(), or None for none")
        raise_violations(violations)

    def _by_violations(self) -> list[str]:
        value, algorithms = self.by, "Lax(), Ring() or Recursive()"
        if isinstance(value, type) or not hasattr(value, "all_reduce"):
            return [f"by={value!r} is no algorithm; use {algorithms}"]
        if isinstance(self.codec, PowerSGD) or hasattr(value, "all_to_all"):
            return []
        return [
            f"by={value!r} makes sums only, and codec={self.codec!r} sends its bytes by an "
            f"all-to-all and an all-gather; use by={algorithms}, or codec=PowerSGD(), whose "
            "factors are sums"
        ]

    def at(self, step: int) -> Codec | PowerSGD | None:
        """The codec of step `step`, counted from 0; None: sum exactly. The host keeps a compiled
        step for each value: a branch on the device would hold a collective."""
        return None if step < self.warmup_steps else self.codec.at(step)


class ErrorState(NamedTuple):
    """Errors of one device's encodings that are not sent yet: of its own numbers (worker), and of
    the sums in its tile (owner). Over all devices, the workers' errors plus the owners' errors
    joined are exactly the true sums less the results so far."""

    worker: Float32[Array, " size"]
    owner: Float32[Array, " tile"]
    """tile = ceil(size / n); 0 beyond the end of the last one."""


def no_errors(size: int, n: int) -> ErrorState:
    """The state before the first step, of one of n devices."""
    worker, owner = (jnp.zeros(shape, jnp.float32) for shape in (size, math.ceil(size / n)))
    return ErrorState(worker, owner)


def compressed_all_reduce(
    x: Float32[Array, " size"],
    error: ErrorState | None,
    axes: MeshAxes,
    codec: Codec,
    key: Key[Array, ""],
    algorithm: Algorithm,
) -> tuple[Float32[Array, " size"], ErrorState | None]:
    """Returns the approximate sum of `x` over devices, with equal bits on all, and the next state.

    Runs inside `jax.shard_map`. `key`: the same on all devices, another each step. `error` None: no
    feedback. One device gets `x` and `error` back. A number in `x` or in a sum that is not finite
    makes the result and the next state not finite: keep the old state if the step is skipped.
    Raises ValueError for numbers or a state of another shape or dtype.
    """
    n = lax.axis_size(axes) if axes else 1
    check_operands(x, error, n)
    if n == 1 or x.size == 0:
        return x, error
    # Tang et al. 2021, algorithm 1: worker i sends C(x_i + e_i) a tile to each owner and keeps
    # e_i <- x_i + e_i - C(x_i + e_i); the owner of a tile sends C(sum + o) to all and keeps
    # o <- sum + o - C(sum + o).
    size, tile, me = x.size, math.ceil(x.size / n), lax.axis_index(axes)
    x = vary(x, axes)
    corrected = x if error is None else x + error.worker
    rows = jnp.pad(corrected, (0, n * tile - size)).reshape(n, tile)
    payload, lost = encode_with_error(rows, codec, key, me)
    arrived = all_to_all(payload, axes, 0, 0, algorithm)

    total = codec.decode(arrived, tile, key).sum(0) + (0 if error is None else error.owner)
    # Padding that is not zero would enter the scales of the numbers beside it, and grow.
    inside = me * tile + jnp.arange(tile) < size
    total = jnp.where(inside, total, 0)
    payload, lost_sum = encode_with_error(total[None], codec, key, n + me)
    gathered = all_gather(payload, axes, 0, algorithm)
    result = codec.decode(gathered, tile, key).reshape(-1)[:size]
    if error is None:
        return result, None
    return result, ErrorState(lost.reshape(-1)[:size], jnp.where(inside, lost_sum[0], 0))


def encode_with_error(
    rows: Float32[Array, "rows size"],
    codec: Codec,
    key: Key[Array, ""],
    stream: Integer[Array, ""],
) -> tuple[UInt8[Array, "rows bytes"], Float32[Array, "rows size"]]:
    """Returns the payload that is sent for `rows`, and its error: rows - decode(payload)."""
    # What is subtracted must be the bytes that are sent: without the barrier a compiler may encode
    # once more with other roundings, or take a rounding and its inverse for nothing at all.
    payload = lax.optimization_barrier(codec.encode(rows, key, stream))
    return payload, rows - codec.decode(payload, rows.shape[1], key)


def check_operands(x: jax.Array, error: ErrorState | None, n: int) -> None:
    """Raises ValueError for numbers that are not fp32 of one dim, or a state of another size."""
    violations = []
    if x.ndim != 1 or x.dtype != jnp.float32:
        violations.append(
            f"what is compressed must be fp32 of one dim and is {x.dtype}{list(x.shape)}; "
            "use x.astype(float32).reshape(-1)"
        )
    wanted = ((x.size,), (math.ceil(x.size / n),))
    if error is not None and (error.worker.shape, error.owner.shape) != wanted:
        violations.append(
            f"the errors of {x.size} numbers on {n} devices have shapes {wanted} and these "
            f"{(error.worker.shape, error.owner.shape)}; begin with no_errors({x.size}, {n})"
        )
    raise_violations(violations)
