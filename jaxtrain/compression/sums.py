"""Sums of gradients by a compressed reducer: which program a step is, and what it does on a device.

Whether a step is exact, and with which codec, is the host's choice among compiled steps: on the
device it would be a branch that holds collectives.
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

from jaxtrain.collectives.algorithm import Algorithm
from jaxtrain.collectives.compressed import Compressed, ErrorState, compressed_all_reduce
from jaxtrain.collectives.compression import Codec
from jaxtrain.collectives.named import gradient_sum
from jaxtrain.collectives.powersgd import PowerSGD, PowerSGDState, powersgd_all_reduce
from jaxtrain.collectives.reducer import Reducer
from jaxtrain.collectives.ring import put, take
from jaxtrain.collectives.vary import MeshAxes, same, vary, varying_axes
from jaxtrain.compression.residuals import CompressedLeaf, Residuals
from jaxtrain.nn.param import named_key

Arrays = dict[str, Any]


class Choice(NamedTuple):
    """One of a run's compiled steps. codec None: sums are exact, and what earlier ones lack is
    added unless the guard has tripped. measured: the exact sums are made too, and the distance to
    them is in the metrics."""

    codec: Any = None
    measured: bool = False


def choose(reducer: Reducer | None, step: int, tripped: int) -> Choice:
    """The program of step `step`, counted from 0. `tripped`: the step the guard refused, or -1; the
    host knows of it two steps later, when it dispatches `tripped + 2`, and stays exact from there
    on. The same after a resume, since the step is part of the state."""
    if not isinstance(reducer, Compressed) or 0 <= tripped <= step - 2:
        return Choice()
    codec, guard = reducer.at(step), reducer.guard
    first = reducer.warmup_steps
    measured = codec is not None and guard is not None and (step - first) % guard.every == 0
    return Choice(codec, measured)


def program_key(batch: int, choice: Choice) -> int | tuple[int, Choice]:
    """Under which a compiled step is kept: the batch size, for exact sums alone."""
    return batch if choice == Choice() else (batch, choice)


@dataclass
class GuardReader:
    """The host's side of the guard: `step` is the next to dispatch; it reads the metrics of the
    step before the last, which are there while the last one runs."""

    step: int = 0
    tripped: int = -1
    unread: list[Any] = field(default_factory=list)

    def choose(self, reducer: Reducer | None) -> Choice:
        if len(self.unread) > 1:
            seen = self.unread.pop(0)
            if seen is not None and self.tripped < 0:
                self.tripped = int(seen)
        return choose(reducer, self.step, self.tripped)

    def push(self, metrics: Mapping[str, Any]) -> None:
        self.step += 1
        self.unread.append(metrics.get("guard_tripped"))


class CompressedSums(NamedTuple):
    """What one program does with the leaves that the reducer compresses."""

    reducer: Compressed
    parts: Mapping[str, CompressedLeaf]
    choice: Choice

    def sum(
        self, grads: Arrays, residuals: Residuals, unit: jax.Array, key: jax.Array
    ) -> tuple[Arrays, Residuals, Arrays]:
        """Inside shard_map: (sums over `CompressedLeaf.whole`, residuals after, exact sums where
        measured).

        unit: what makes sums means. Residuals are means, so that a loss scale or a batch of
        another size leaves them right. The key of each part of each leaf is its own.
        """
        out, exact = {}, {}
        after: Residuals = {name: dict(tree) for name, tree in residuals.items()}
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
                    after["factors"][name] = same(q, part.whole)[None]
            else:
                total = mean if error is None else mean + error
                total = gradient_sum("gradients", total, part.whole, self.reducer.by)
                lost = None if error is None else jnp.zeros_like(error)
            if lost is not None:
                after["errors"][name] = lost[None]
            if self.choice.measured:
                exact[name] = gradient_sum("gradients", mean, part.whole, self.reducer.by) * unit
            out[name] = total * unit
        return out, after, exact

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
        """(sum, what it lacks, PowerSGD's next factor) of one leaf."""
        codec, by, shape = self.choice.codec, self.reducer.by, mean.shape
        if isinstance(codec, PowerSGD):
            assert q is not None, "PowerSGD's factor is among the residuals"
            stacked = None if error is None else error.reshape(part.matrices)
            state = PowerSGDState(stacked, q)
            total, state = powersgd_all_reduce(mean.reshape(part.matrices), state, part.whole, by)
            lost = None if state.error is None else state.error.reshape(shape)
            return same(total.reshape(shape), part.whole), lost, state.q
        assert isinstance(by, Algorithm), "Compressed lets no codec have another"
        flat = None if error is None else error.reshape(-1)
        total, lost = all_reduce_with_one_error(mean.reshape(-1), flat, part.whole, codec, key, by)
        lost = None if lost is None else lost.reshape(shape)
        return same(total.reshape(shape), part.whole), lost, q


def all_reduce_with_one_error(
    x: Float32[Array, " size"],
    error: Float32[Array, " size"] | None,
    axes: MeshAxes,
    codec: Codec,
    key: Key[Array, ""],
    by: Algorithm,
) -> tuple[Float32[Array, " size"], Float32[Array, " size"] | None]:
    """`compressed_all_reduce` of `x`, whose owner's error joins the same device's own.

    What the owner of a tile could not send it sends in its next numbers instead of in the next
    sum: it is encoded twice, and the state is of the leaf's shape, which any mesh can take over.
    """
    if error is None:
        return compressed_all_reduce(x, None, axes, codec, key, by)[0], None
    tile = math.ceil(x.size / lax.axis_size(axes))
    owner = vary(jnp.zeros(tile, jnp.float32), varying_axes(x))
    total, after = compressed_all_reduce(x, ErrorState(error, owner), axes, codec, key, by)
    assert after is not None
    me, n = lax.axis_index(axes), lax.axis_size(axes)
    padded = jnp.pad(after.worker, (0, n * tile - x.size))
    mine = take(padded, me, n, 0) + after.owner
    return total, put(padded, mine, me, n, 0)[: x.size]


def pay_back(grads: Arrays, residuals: Residuals, unit: jax.Array) -> tuple[Arrays, Residuals]:
    """On one device: what earlier sums lack joins the gradients, and nothing is lacking now."""
    errors = residuals.get("errors", {})
    grads = grads | {k: grads[k] + e[0] * unit for k, e in errors.items()}
    zeros = {"errors": {k: jnp.zeros_like(e) for k, e in errors.items()}} if errors else {}
    return grads, residuals | zeros
