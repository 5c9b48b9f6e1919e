"""The one executor: a step that follows a schedule's tables, whatever they are.

Lock-step: in a tick every stage runs the same kinds of work, on garbage where it is not its turn,
and what comes of that is dropped by `jnp.where`. So no collective inside a stage ever stands in a
branch that devices take differently. Ticks of equal kinds are one `lax.scan`. What all stages share
(the embedding before the pipeline, the head behind it) runs only in the ticks in which a microbatch
enters or leaves, in a `lax.cond` whose predicate is a constant of the table: the same everywhere.

Runs inside `jax.shard_map`; every value is typed as varying over all of its mesh axes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import PyTree

from jaxtrain.collectives.order import after
from jaxtrain.collectives.vary import vary
from jaxtrain.nn.loss import LossSums
from jaxtrain.pipeline.slots import Rows
from jaxtrain.pipeline.tick import Arrays, At, Carry, OnDevice, Tables, Tick, Trees, chunk_of


class Sums(NamedTuple):
    """Over all microbatches: this device's shares of what `Stage.leave` sums, and gradients of
    scale * loss. `blocks`: [V, ...] as `Stage.backward` gives them; `outside`: fp32."""

    sums: LossSums
    blocks: Arrays
    outside: Arrays


@dataclass(frozen=True, kw_only=True)
class Executor(Tables):
    """Runs tables. fill: what buffers hold before they hold anything (tests fill them with NaN)."""

    fill: float = 0.0

    def __call__(self, given: OnDevice) -> Sums:
        """Where the tables have no B there are no gradients."""
        carry, trees = self.start(given)
        carry = self.follow(carry, trees, given)
        loss, count, *beside = carry.total
        named = dict(zip(self.beside, beside, strict=True))
        sums = Sums(LossSums(loss, count, named), carry.blocks, carry.outside)
        # The last ticks, still sending, have nothing to do with some of them.
        return after(sums, carry.turn)

    def follow(self, carry: Carry, trees: Trees, given: OnDevice) -> Carry:
        """What the ticks of the tables make of what `start` gives."""
        sent = self.rows.receive_input
        arrived = np.concatenate([np.full_like(sent[:1], -1), sent[:-1]])
        for number, span in enumerate(self.rows.spans):
            ticks = slice(span.start, span.stop)
            rows, came = Rows(*(table[ticks] for table in self.rows)), arrived[ticks]
            tick = Tick(self, given, trees, span.kinds, rows, came)
            with jax.named_scope(f"ticks{number}"):
                carry, _ = lax.scan(tick, carry, jax.tree.map(jnp.asarray, (rows, came)))
        return carry

    def start(self, given: OnDevice) -> tuple[Carry, Trees]:
        """Empty buffers and sums, and what the leaves in buffers are of."""
        stage, x = given.stage, given.x
        typed = lambda value: vary(value, self.axes)  # noqa: E731

        def room(count: int, leaf: jax.Array | jax.ShapeDtypeStruct) -> jax.Array:
            value = self.fill if jnp.issubdtype(leaf.dtype, jnp.inexact) else 0
            return typed(jnp.full((count, *leaf.shape), value, leaf.dtype))

        held = room(self.buffers.inputs, x)
        total = typed(jnp.zeros(2 + len(self.beside), jnp.float32))
        zero = typed(jnp.zeros(x.shape, x.dtype))
        empty = Carry(total, held, (), [], [], {}, {}, zero, typed(jnp.zeros((), jnp.float32)))
        if not self.training:
            return empty, Trees(None, None)

        def every(chunk: Arrays, x: jax.Array) -> tuple[PyTree, PyTree, Arrays]:
            y, saved = stage.forward_with_residuals(chunk, x, At(0, 0))
            grads, _, stash = stage.backward(saved, chunk, y, At(0, 0))
            if self.buffers.stashes:
                grads = {**grads, **stage.weight_gradients(stash, chunk, At(0, 0))}
            return saved, stash, grads

        saved, stash, grads = jax.eval_shape(every, chunk_of(given.blocks, 0), zero)
        shapes = {k: (self.chunks, *g.shape) for k, g in grads.items()}

        def rooms(count: int, tree: PyTree) -> list[jax.Array]:
            return [room(count, leaf) for leaf in jax.tree.leaves(tree) if count]

        carry = empty._replace(
            cotangents=room(self.buffers.cotangents, x),
            kept=rooms(self.buffers.kept, saved),
            stash=rooms(self.buffers.stashes, stash),
            blocks={k: typed(jnp.zeros(shapes[k], g.dtype)) for k, g in grads.items()},
            outside={
                k: typed(jnp.zeros(p.shape, jnp.float32))
                for k, p in given.outside.items()
                if k not in self.frozen
            },
        )
        return carry, Trees(jax.tree.structure(saved), jax.tree.structure(stash))
