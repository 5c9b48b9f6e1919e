"""Sums of gradients by a compressed reducer: the choice of a step's program, and the sums.

The host chooses among compiled steps: exact sums, or sums by a codec. On the device this choice
would be a branch that contains collectives.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, Key

from jaxtrain.arrays import Leaves
from jaxtrain.collectives.algorithm import Algorithm
from jaxtrain.collectives.named import gradient_sum
from jaxtrain.collectives.ring import put, take
from jaxtrain.collectives.vary import same, vary, varying_axes
from jaxtrain.compression.codecs import Codec
from jaxtrain.compression.compressed import Compressed, ErrorState, compressed_all_reduce
from jaxtrain.compression.powersgd import PowerSGD, PowerSGDState, powersgd_all_reduce
from jaxtrain.compression.reducer import Reducer
from jaxtrain.compression.residuals import CodecState, CompressedLeaf
from jaxtrain.mesh.axes import MeshAxes
from jaxtrain.nn.param import named_key


class Choice(NamedTuple):
    """One of a run's compiled steps.

    codec: None for exact sums, to which the errors of earlier steps are added unless the guard has
        tripped.
    measured: exact sums are computed too, and the distance to them is in the metrics.
    """

    codec: Any = None
    measured: bool = False


def choose(reducer: Reducer | None, step: int, tripped: int) -> Choice:
    """Returns the program of step `step`, counted from 0.

    tripped: the step that the guard refused, or -1. The host learns of it when it dispatches step
    `tripped + 2`, and sums exactly from there on. A resumed run does the same, since the refused
    step is part of the state."""
    if not isinstance(reducer, Compressed) or 0 <= tripped <= step - 2:
        return Choice()
    codec, guard = reducer.at(step), reducer.guard
    first = reducer.warmup_steps
    measured = codec is not None and guard is not None and (step - first) % guard.every == 0
    return Choice(codec, measured)


def program_key(batch: int, choice: Choice) -> int | tuple[int, Choice]:
    """Key of a compiled step: the batch size, and the choice unless sums are exact."""
    return batch if choice == Choice() else (batch, choice)


@dataclass
class GuardReader:
    """The host's side of the guard.

    It reads the metrics of the step before the last, which exist while the last one runs.
    step: the next to dispatch. tripped: the step that the guard refused, or -1.
    unread: the guard's metric of the last steps.
    """

    step: int = 0
    tripped: int = -1
    unread: list[Any] = field(default_factory=list)

    def choose(self, reducer: Reducer | None) -> Choice:
        if len(self.unread) > 1:
            tripped = self.unread.pop(0)
            if tripped is not None and self.tripped < 0:
                self.tripped = int(tripped)
        return choose(reducer, self.step, self.tripped)

    def push(self, metrics: Mapping[str, Any]) -> None:
        self.step += 1
        self.unread.append(metrics.get("guard_tripped"))


class CompressedSums(NamedTuple):
    """Sums of the compressed leaves in one program."""

    reducer: Compressed
    parts: Mapping[str, CompressedLeaf]
    choice: Choice

    def sum(
        self, grads: Leaves, residuals: CodecState, unit: jax.Array, key: jax.Array
    ) -> tuple[Leaves, CodecState, Leaves]:
        """Returns (sums over `CompressedLeaf.summed`, updated residuals, exact sums if measured).
        Runs inside shard_map.

        unit: divisor that makes a sum a mean. Residuals are means, so that they stay right under
        another loss scale or batch size. Every part of every leaf has its own key.
        """
        out, exact = {}, {}
        updated: CodecState = {name: dict(tree) for name, tree in residuals.items()}
        for name, g in grads.items():
            part, mean = self.parts[name], g / unit
            error = residuals["errors"][name][0] if "errors" in residuals else None
            if part.takes(self.choice.codec):
                q = residuals["factors"][name][0] if "factors" in residuals else None
                own_key = named_key(key, f"reducer.{name}")
                if part.split:
                    own_key = jax.random.fold_in(own_key, lax.axis_index(part.split))
                total, lost, q = self._compressed(part, mean, error, q, own_key)
                if q is not None:
                    updated["factors"][name] = same(q, part.summed)[None]
            else:
                total = mean if error is None else mean + error
                total = gradient_sum("gradients", total, part.summed, self.reducer.by)
                lost = None if error is None else jnp.zeros_like(error)
            if lost is not None:
                updated["errors"][name] = lost[None]
            if self.choice.measured:
                exact[name] = gradient_sum("gradients", mean, part.summed, self.reducer.by) * unit
            out[name] = total * unit
        return out, updated, exact

    def _compressed(
        self,
        part: CompressedLeaf,
        mean: Float32[Array, " *shape"],
        error: Float32[Array, " *shape"] | None,
        q: Float32[Array, "stack cols rank"] | None,
        key: Key[Array, ""],
    ) -> tuple[
        Float32[Array, " *shape"],
        Float32[Array, " *shape"] | None,
        Float32[Array, "stack cols rank"] | None,
    ]:
        """Returns (sum, its error, PowerSGD's next factor) of one leaf."""
        codec, algorithm, shape = self.choice.codec, self.reducer.by, mean.shape
        if isinstance(codec, PowerSGD):
            assert q is not None, "PowerSGD's factor is among the residuals"
            stacked = None if error is None else error.reshape(part.matrices)
            state = PowerSGDState(stacked, q)
            matrix = mean.reshape(part.matrices)
            total, state = powersgd_all_reduce(matrix, state, part.summed, algorithm)
            lost = None if state.error is None else state.error.reshape(shape)
            return same(total.reshape(shape), part.summed), lost, state.q
        assert isinstance(algorithm, Algorithm), "Compressed accepts no other beside a codec"
        flat = None if error is None else error.reshape(-1)
        total, lost = all_reduce_with_one_error(
            mean.reshape(-1), flat, part.summed, codec, key, algorithm
        )
        lost = None if lost is None else lost.reshape(shape)
        return same(total.reshape(shape), part.summed), lost, q


def all_reduce_with_one_error(
    x: Float32[Array, " size"],
    error: Float32[Array, " size"] | None,
    axes: MeshAxes,
    codec: Codec,
    key: Key[Array, ""],
    algorithm: Algorithm,
) -> tuple[Float32[Array, " size"], Float32[Array, " size"] | None]:
    """Returns the `compressed_all_reduce` of `x` and one error of its shape on each device.

    The device that sums a tile adds the error of encoding the sum to its own error, so it corrects
    it in its next contribution rather than in the next sum. The state then has the leaf's shape,
    which any mesh can take over.
    """
    if error is None:
        return compressed_all_reduce(x, None, axes, codec, key, algorithm)[0], None
    tile = math.ceil(x.size / lax.axis_size(axes))
    owner = vary(jnp.zeros(tile, jnp.float32), varying_axes(x))
    state = ErrorState(error, owner)
    total, state = compressed_all_reduce(x, state, axes, codec, key, algorithm)
    assert state is not None
    device, n = lax.axis_index(axes), lax.axis_size(axes)
    padded = jnp.pad(state.worker, (0, n * tile - x.size))
    own = take(padded, device, n, 0) + state.owner
    return total, put(padded, own, device, n, 0)[: x.size]


def pay_back(grads: Leaves, residuals: CodecState, unit: jax.Array) -> tuple[Leaves, CodecState]:
    """Returns the gradients plus earlier errors, and zero errors: the exact sum on one device."""
    errors = residuals.get("errors", {})
    grads = grads | {k: grads[k] + e[0] * unit for k, e in errors.items()}
    zeros = {"errors": {k: jnp.zeros_like(e) for k, e in errors.items()}} if errors else {}
    return grads, residuals | zeros
