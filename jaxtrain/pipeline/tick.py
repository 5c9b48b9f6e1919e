"""One tick of a pipeline: which of a stage's works are done in it, and what becomes of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.tree_util import PyTreeDef
from jaxtyping import Array, Float, PyTree

from jaxtrain.collectives.order import after
from jaxtrain.collectives.vary import Index, vary
from jaxtrain.nn.loss import LossSums, refuse_other_sums
from jaxtrain.pipeline.slots import Buffers, Rows

Arrays = dict[str, jax.Array]
Stream = Float[Array, "tokens embed"]
"""The residual stream of a microbatch, or its cotangent: this device's share."""

Tree = TypeVar("Tree")


@runtime_checkable
class Stage(Protocol):
    """What a stage can do, on this device's part of everything; `at` is a chunk and a microbatch.

    Gradients are by the names of their parameters.
    """

    def enter(self, outside: Arrays, microbatch: Index) -> Stream:
        """The first chunk's input, on every stage. Differentiable: its cotangent is 0 on all stages
        but the first."""
        ...

    def leave(self, outside: Arrays, y: Stream, microbatch: Index) -> LossSums:
        """This device's shares of loss, count and what is summed beside them; y is 0 on all stages
        but the last. Differentiable."""
        ...

    def forward(self, chunk: Arrays, x: Stream, at: At) -> Stream:
        """The chunk's layers."""
        ...

    def forward_with_residuals(self, chunk: Arrays, x: Stream, at: At) -> tuple[Stream, PyTree]:
        """`forward`, and what `backward` needs beside the chunk: arrays, no weights."""
        ...

    def backward(
        self, saved: PyTree, chunk: Arrays, dy: Stream, at: At
    ) -> tuple[Arrays, Stream, PyTree]:
        """Gradients of the chunk, as they are accumulated, and of x; and what `weight_gradients`
        needs for those that are left to it, a tree of arrays."""
        ...

    def weight_gradients(self, stash: PyTree, chunk: Arrays, at: At) -> Arrays:
        """The gradients that `backward` left, of a schedule that has W."""
        ...


class At(NamedTuple):
    """A work: which chunk of which microbatch."""

    chunk: Index
    microbatch: Index


class OnDevice(NamedTuple):
    """A device's part of what ticks read. blocks: [V, layers of a position, ...], as `stage` takes
    them; outside: the parameters outside the pipeline, as they are used; x: shape and dtype of an
    activation; scale: of the loss whose gradients are made."""

    stage: Stage
    blocks: Arrays
    outside: Arrays
    x: jax.ShapeDtypeStruct
    scale: jax.Array


class Carry(NamedTuple):
    """What goes from tick to tick. Buffers have a leading dim of their number; `kept` are the
    leaves of what F saves for B, `stash` of what B leaves to W."""

    total: jax.Array
    inputs: jax.Array
    cotangents: Any
    kept: list[jax.Array]
    stash: list[jax.Array]
    blocks: Arrays
    outside: Arrays
    arriving: jax.Array
    """What the stage before sent in the last tick. It is put among the inputs before anything else:
    put at the tick's end, beside B's read of them, XLA would copy them all in every tick."""
    turn: jax.Array
    """A scalar, made after all that was sent so far: what is sent next reads it (`_in_turn`). Made
    of what came or was added, not of the buffers it went to: XLA would copy those."""

    def after_sending(self, what: PyTree, **changes: Any) -> Carry:
        """With these fields, `what` having been sent for them."""
        return self._replace(turn=after(self.turn, what), **changes)


class Trees(NamedTuple):
    """What the leaves of `Carry.kept` and `Carry.stash` are of."""

    kept: PyTreeDef | None
    stash: PyTreeDef | None


@dataclass(frozen=True, kw_only=True)
class Tables:
    """A schedule's tables on the mesh axis `stage`.

    axes: every mesh axis of the shard_map. chunks: V. entering, leaving: names of the parameters
    outside the pipeline that `Stage.enter` and `Stage.leave` read; `frozen` ones of them have no
    gradient. beside: names of what `Stage.leave` sums beside loss and count.
    """

    rows: Rows
    buffers: Buffers
    chunks: int
    stage: str
    axes: tuple[str, ...]
    entering: tuple[str, ...]
    leaving: tuple[str, ...]
    frozen: frozenset[str] = frozenset()
    beside: tuple[str, ...] = ()

    def stack(self, sums: LossSums) -> jax.Array:
        """[loss, count, those beside in the order of `beside`]. Raises ValueError where others are
        there."""
        refuse_other_sums(self.beside, sums)
        return jnp.stack([sums.loss, sums.count, *(sums.beside[k] for k in self.beside)])

    @property
    def training(self) -> bool:
        """Whether they have a backward pass."""
        return self.buffers.cotangents > 0


@dataclass(frozen=True, eq=False)
class Tick:
    """The body of one scan: ticks in which the same `kinds` of work are done.

    One part at a time sends (`_in_turn`): a layer's collectives may stand in a loop, those of what
    all stages share in a branch, and XLA:CPU would run others beside them.
    """

    run: Tables
    given: OnDevice
    trees: Trees
    kinds: str
    rows: Rows
    arrived: np.ndarray
    """`Rows.receive_input` of the ticks before. Both of all ticks, as constants."""

    def __call__(self, carry: Carry, at: tuple[Rows, jax.Array]) -> tuple[Carry, None]:
        row, arrived = at
        if (self.arrived >= 0).any():
            inputs = _put(carry.inputs, self._mine(arrived), carry.arriving)
            carry = carry._replace(inputs=inputs)
        if "F" in self.kinds:
            carry, y = self._forward(carry, row)
            if not self.run.buffers.late_head:
                carry = self._leave(carry, row, y)
            if (self.rows.receive_input >= 0).any():
                arriving = self._permute(_in_turn(carry, y), +1)
                carry = carry.after_sending(arriving, arriving=arriving)
        if "B" in self.kinds:
            carry, dx = self._backward(carry, row)
            carry = self._backward_of_enter(carry, row, dx)
            # After B has read its own: what comes may be put where that was.
            if (self.rows.receive_cotangent >= 0).any():
                slot = self._mine(row.receive_cotangent)
                arriving = self._permute(_in_turn(carry, dx), -1)
                carry = carry.after_sending(
                    arriving, cotangents=_put(carry.cotangents, slot, arriving)
                )
        if "W" in self.kinds:
            carry = self._weight_gradients(carry, row)
        return carry, None

    def _forward(self, carry: Carry, row: Rows) -> tuple[Carry, jax.Array]:
        first = lax.axis_index(self.run.stage) == 0
        slot = self._mine(row.forward_input)
        stage, outside = self.given.stage, self.given.outside
        x = self._sometimes("enter", lambda m, _: stage.enter(outside, m), carry.inputs[0], row)
        entering = first & (row.enter >= 0)
        inputs = _put(carry.inputs, jnp.where(entering, slot, -1), x)
        carry = carry._replace(inputs=inputs)
        at = self._at(row.forward)
        chunk, x = chunk_of(self.given.blocks, at.chunk), _in_turn(carry, _take(inputs, slot))
        with jax.named_scope("F"):
            if not carry.kept:
                return carry, stage.forward(chunk, x, at)
            y, saved = stage.forward_with_residuals(chunk, x, at)
        return carry._replace(kept=_put_all(carry.kept, self._mine(row.forward_kept), saved)), y

    def _leave(self, carry: Carry, row: Rows, y: jax.Array) -> Carry:
        """The head and the loss of the microbatch that has run through, and its gradient."""
        last = lax.axis_index(self.run.stage) == lax.axis_size(self.run.stage) - 1
        y = jnp.where(last & (row.leave >= 0), y, jnp.zeros((), y.dtype))
        stage, outside = self.given.stage, self.given.outside
        if not self.run.training:
            total = self._sometimes(
                "leave",
                lambda m, total: total + self.run.stack(stage.leave(outside, y, m)),
                carry.total,
                row,
            )
            return carry.after_sending(total, total=total)
        names = [k for k in self.run.leaving if k not in self.run.frozen]
        mine = {k: carry.outside[k] for k in names}

        def leave(m: Index, before: tuple[jax.Array, Arrays, Stream]) -> PyTree:
            total, sums, _ = before

            def scaled(used: Arrays, y: jax.Array) -> tuple[jax.Array, jax.Array]:
                sums = stage.leave({**outside, **used}, y, m)
                return sums.loss * self.given.scale, self.run.stack(sums)

            used = {k: outside[k] for k in names}
            (grads, dy), more = jax.grad(scaled, argnums=(0, 1), has_aux=True)(used, y)
            return total + more, _add(sums, grads), dy

        total, sums, dy = self._sometimes("leave", leave, (carry.total, mine, y), row)
        slot = jnp.where(last, row.leave_cotangent, -1)
        return carry.after_sending(
            dy,
            total=total,
            outside={**carry.outside, **sums},
            cotangents=_put(carry.cotangents, slot, dy),
        )

    def _backward(self, carry: Carry, row: Rows) -> tuple[Carry, jax.Array]:
        at, y = self._at(row.backward), None
        x = _in_turn(carry, _take(carry.inputs, self._mine(row.backward_input)))
        if not carry.kept:
            # Run again in this tick, whatever a compiler finds equal: with one microbatch the same
            # input lies there in other ticks.
            x, cotangents = lax.optimization_barrier((x, carry.cotangents))
            carry = carry._replace(cotangents=cotangents)
        chunk = chunk_of(self.given.blocks, at.chunk)
        with jax.named_scope("B"):
            if carry.kept:
                saved = _take_all(carry.kept, self._mine(row.backward_kept), self.trees.kept)
            else:
                y, saved = self.given.stage.forward_with_residuals(chunk, x, at)
        if self.run.buffers.late_head:
            assert y is not None, "a late head reads what B makes again"
            carry = self._leave(carry, row, y)
        dy = _in_turn(carry, _take(carry.cotangents, self._mine(row.backward_cotangent)))
        with jax.named_scope("B"):
            grads, dx, stash = self.given.stage.backward(saved, chunk, dy, at)
        carry = self._accumulate(carry, row.backward, grads)
        if carry.stash:
            slot = self._mine(row.backward_stash)
            carry = carry._replace(stash=_put_all(carry.stash, slot, stash))
        return carry, dx

    def _weight_gradients(self, carry: Carry, row: Rows) -> Carry:
        at = self._at(row.weight)
        chunk = chunk_of(self.given.blocks, at.chunk)
        stash = _take_all(carry.stash, self._mine(row.weight_stash), self.trees.stash)
        stash = _in_turn(carry, stash)
        with jax.named_scope("W"):
            grads = self.given.stage.weight_gradients(stash, chunk, at)
        return self._accumulate(carry, row.weight, grads)

    def _accumulate(self, carry: Carry, works: jax.Array, grads: Arrays) -> Carry:
        """Gradients of the work's chunk added to its sums, where there is a work."""
        chunk = self._at(works).chunk
        slot = jnp.where(self._mine(works) >= 0, chunk, -1)
        sums = {
            k: _put(carry.blocks[k], slot, _take(carry.blocks[k], chunk) + grads[k]) for k in grads
        }
        return carry.after_sending(grads, blocks={**carry.blocks, **sums})

    def _backward_of_enter(self, carry: Carry, row: Rows, dx: jax.Array) -> Carry:
        """The gradient that comes out of the pipeline's beginning, into the embedding."""
        first = lax.axis_index(self.run.stage) == 0
        dx = jnp.where(first & (row.exit >= 0), _in_turn(carry, dx), jnp.zeros((), dx.dtype))
        names = [k for k in self.run.entering if k not in self.run.frozen]
        if not names:
            return carry

        def backward(m: Index, sums: Arrays) -> Arrays:
            # Run again here, whatever a compiler finds equal: where ticks are few they are written
            # out, and a microbatch's number is the constant that it was when it entered.
            m, dy = lax.optimization_barrier((m, dx))

            def entered(used: Arrays) -> jax.Array:
                return self.given.stage.enter({**self.given.outside, **used}, m)

            _, pull_back = jax.vjp(entered, {k: self.given.outside[k] for k in names})
            return _add(sums, pull_back(dy)[0])

        sums = self._sometimes("exit", backward, {k: carry.outside[k] for k in names}, row)
        return carry.after_sending(sums, outside={**carry.outside, **sums})

    def _sometimes(
        self, name: str, work: Callable[[Index, Tree], Tree], before: Tree, row: Rows
    ) -> Tree:
        """work(microbatch, before) in the ticks that have one, in others `before`. Nothing is
        decided at run time where all ticks or none of the scan have."""
        column, m = getattr(self.rows, name), getattr(row, name)
        if (column < 0).all():
            return before
        axes = self.run.axes

        def typed(m: Index, before: Tree) -> Tree:
            return jax.tree.map(lambda leaf: vary(leaf, axes), work(m, before))

        with jax.named_scope(name):
            if (column >= 0).all():
                return typed(m, before)
            return lax.cond(m >= 0, typed, lambda m, before: before, m, before)

    def _permute(self, x: jax.Array, way: int) -> jax.Array:
        """What the neighbour has sent, of the stage before (way 1) or behind (-1)."""
        n = lax.axis_size(self.run.stage)
        pairs = [(i, (i + way) % n) for i in range(n)]
        if self.run.chunks == 1:
            pairs = [(a, b) for a, b in pairs if b - a == way]
        return lax.ppermute(x, self.run.stage, pairs)

    def _at(self, row: jax.Array) -> At:
        work = jnp.maximum(self._mine(row), 0)
        return At(work % self.run.chunks, work // self.run.chunks)

    def _mine(self, row: jax.Array) -> jax.Array:
        return row[lax.axis_index(self.run.stage)]


def _in_turn(carry: Carry, tree: Tree) -> Tree:
    """`tree`, to be read after all that was sent so far, in this tick and before it."""
    return after(tree, carry.turn)


def chunk_of(blocks: Arrays, chunk: Index) -> Arrays:
    """The leaves of one chunk."""
    return {k: _take(leaf, chunk) for k, leaf in blocks.items()}


def _take(buffer: jax.Array, slot: Index) -> jax.Array:
    """buffer[slot]; of slot -1 anything."""
    if len(buffer) == 1:
        return buffer[0]
    return lax.dynamic_index_in_dim(buffer, jnp.maximum(slot, 0), 0, keepdims=False)


def _put(buffer: jax.Array, slot: Index, value: jax.Array) -> jax.Array:
    """`buffer` with `value` at `slot`; with slot -1 as it was."""
    kept = jnp.where(slot >= 0, value.astype(buffer.dtype), _take(buffer, slot))
    return lax.dynamic_update_index_in_dim(buffer, kept, jnp.maximum(slot, 0), 0)


def _take_all(buffers: list[jax.Array], slot: Index, tree: PyTreeDef | None) -> PyTree:
    return jax.tree.unflatten(tree, [_take(buffer, slot) for buffer in buffers])


def _put_all(buffers: list[jax.Array], slot: Index, tree: PyTree) -> list[jax.Array]:
    leaves = jax.tree.leaves(tree)
    return [_put(b, slot, leaf) for b, leaf in zip(buffers, leaves, strict=True)]


def _add(sums: Arrays, grads: Arrays) -> Arrays:
    return {k: sums[k] + grads[k].astype(jnp.float32) for k in sums}
