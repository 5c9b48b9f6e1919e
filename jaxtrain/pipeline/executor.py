"""The one executor: a step that follows any schedule's tables.

Lock-step: in a tick every stage runs the same kinds of work, on garbage where it has no work, and
`jnp.where` drops the results. So no collective inside a stage is in a branch that devices take
differently. Ticks of equal kinds are one `lax.scan`. Operations that all stages share (the
embedding before the pipeline, the head after it) run only in the ticks in which a microbatch enters
or leaves, in a `lax.cond` whose predicate is a constant of the table: the same on all devices.

Runs inside `jax.shard_map`; every value is typed as varying over all of its mesh axes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import PyTree

from jaxtrain.arrays import Arrays
from jaxtrain.collectives.order import after
from jaxtrain.collectives.vary import vary
from jaxtrain.losses.cross_entropy import LossSums
from jaxtrain.nn.stack import Stream
from jaxtrain.pipeline.slots import SlotTables
from jaxtrain.pipeline.tick import Carry, OnDevice, StageWork, Tables, Tick, Trees, chunk_of


class Sums(NamedTuple):
    """Sums over all microbatches: this device's shares of `Stage.leave`'s sums, and gradients of
    scale * loss. blocks: [V, ...], from `Stage.backward`. outside: fp32."""

    sums: LossSums
    blocks: Arrays
    outside: Arrays


@dataclass(frozen=True, kw_only=True)
class Executor(Tables):
    """Runs a schedule's tables on one device, tick by tick. fill: initial value of buffers (tests
    fill them with NaN)."""

    fill: float = 0.0

    def __call__(self, device: OnDevice) -> Sums:
        """Runs all ticks and returns the sums. Tables without B give no gradients."""
        carry, trees = self.start(device)
        carry = self.follow(carry, trees, device)
        loss, count, *extra = carry.total
        named = dict(zip(self.sum_names, extra, strict=True))
        sums = Sums(LossSums(loss, count, named), carry.blocks, carry.outside)
        # Some sums do not depend on the last ticks, which still send.
        return after(sums, carry.turn)

    def follow(self, carry: Carry, trees: Trees, device: OnDevice) -> Carry:
        """Runs the ticks of the tables, from the carry of `start` to the last one."""
        sent = self.rows.receive_input
        arrived = np.concatenate([np.full_like(sent[:1], -1), sent[:-1]])
        for number, span in enumerate(self.rows.spans):
            ticks = slice(span.start, span.stop)
            rows, arrivals = SlotTables(*(table[ticks] for table in self.rows)), arrived[ticks]
            tick = Tick(self, device, trees, span.kinds, rows, arrivals)
            with jax.named_scope(f"ticks{number}"):
                carry, _ = lax.scan(tick.body, carry, jax.tree.map(jnp.asarray, (rows, arrivals)))
        return carry

    def start(self, device: OnDevice) -> tuple[Carry, Trees]:
        """Returns empty buffers and sums, and the tree structures of the buffers' leaves."""
        stage, x = device.stage, device.x
        typed = lambda value: vary(value, self.axes)  # noqa: E731

        def room(count: int, leaf: jax.Array | jax.ShapeDtypeStruct) -> jax.Array:
            value = self.fill if jnp.issubdtype(leaf.dtype, jnp.inexact) else 0
            return typed(jnp.full((count, *leaf.shape), value, leaf.dtype))

        inputs = jax.tree.map(partial(room, self.buffers.inputs), x)
        total = typed(jnp.zeros(2 + len(self.sum_names), jnp.float32))
        zero = jax.tree.map(lambda leaf: typed(jnp.zeros(leaf.shape, leaf.dtype)), x)
        empty = Carry(total, inputs, (), [], [], {}, {}, zero, typed(jnp.zeros((), jnp.float32)))
        if not self.training:
            return empty, Trees(None, None)

        def every(chunk: Arrays, x: Stream) -> tuple[PyTree, PyTree, Arrays]:
            y, saved = stage.forward_with_residuals(chunk, x, StageWork(0, 0))
            grads, _, stash = stage.backward(saved, chunk, y, StageWork(0, 0))
            if self.buffers.stashes:
                grads = {**grads, **stage.weight_gradients(stash, chunk, StageWork(0, 0))}
            return saved, stash, grads

        saved, stash, grads = jax.eval_shape(every, chunk_of(device.blocks, 0), zero)
        shapes = {k: (self.chunks, *g.shape) for k, g in grads.items()}

        def rooms(count: int, tree: PyTree) -> list[jax.Array]:
            return [room(count, leaf) for leaf in jax.tree.leaves(tree) if count]

        carry = empty._replace(
            cotangents=jax.tree.map(partial(room, self.buffers.cotangents), x),
            residuals=rooms(self.buffers.residuals, saved),
            stash=rooms(self.buffers.stashes, stash),
            blocks={k: typed(jnp.zeros(shapes[k], g.dtype)) for k, g in grads.items()},
            outside={
                k: typed(jnp.zeros(p.shape, jnp.float32))
                for k, p in device.outside.items()
                if k not in self.frozen
            },
        )
        return carry, Trees(jax.tree.structure(saved), jax.tree.structure(stash))
