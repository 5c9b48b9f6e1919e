"""One tick of a pipeline: the works of a stage in it, and the storage of their results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.tree_util import PyTreeDef
from jaxtyping import PyTree

from jaxtrain.arrays import Arrays
from jaxtrain.collectives.order import after
from jaxtrain.collectives.vary import Index, vary
from jaxtrain.losses.cross_entropy import LossSums, refuse_other_sums
from jaxtrain.nn.stack import Stream
from jaxtrain.pipeline.slots import SlotTables, StageBuffers

Tree = TypeVar("Tree")


@runtime_checkable
class Stage(Protocol):
    """Work of a stage, on this device's part of all arrays. `work`: a chunk and a microbatch.

    Gradients are by the names of their parameters.
    """

    def enter(self, outside: Arrays, microbatch: Index) -> Stream:
        """Returns the first chunk's input, on every stage. Differentiable: its cotangent is 0 on
        all stages but the first."""
        ...

    def leave(self, outside: Arrays, y: Stream, microbatch: Index) -> LossSums:
        """Returns this device's shares of loss, count and other sums; y is 0 on all stages but the
        last. Differentiable."""
        ...

    def forward(self, chunk: Arrays, x: Stream, work: StageWork) -> Stream:
        """Runs the chunk's layers."""
        ...

    def forward_with_residuals(
        self, chunk: Arrays, x: Stream, work: StageWork
    ) -> tuple[Stream, PyTree]:
        """`forward`, and the residuals of `backward`: arrays, no weights."""
        ...

    def backward(
        self, saved: PyTree, chunk: Arrays, dy: Stream, work: StageWork
    ) -> tuple[Arrays, Stream, PyTree]:
        """Returns gradients of the chunk, ready to accumulate, and of x; and a tree of arrays from
        which `weight_gradients` computes the other gradients."""
        ...

    def weight_gradients(self, stash: PyTree, chunk: Arrays, work: StageWork) -> Arrays:
        """Returns the gradients that `backward` left out, in a schedule with W."""
        ...


class StageWork(NamedTuple):
    """What a stage computes in a tick: a chunk, for a microbatch, by their numbers."""

    chunk: Index
    microbatch: Index


class OnDevice(NamedTuple):
    """A device's arrays that ticks read. blocks: [V, layers of a position, ...], as `stage` takes
    them. outside: gathered parameters outside the pipeline. x: shapes and dtypes of the stream.
    scale: of the loss for its gradients."""

    stage: Stage
    blocks: Arrays
    outside: Arrays
    x: PyTree
    scale: jax.Array


class Carry(NamedTuple):
    """State that is carried from tick to tick. Buffers have a leading dim of their number.
    residuals: leaves that F saves for B. stash: leaves that B saves for W."""

    total: jax.Array
    inputs: Stream
    cotangents: Any
    residuals: list[jax.Array]
    stash: list[jax.Array]
    blocks: Arrays
    outside: Arrays
    arriving: Stream
    """Value from the previous stage in the last tick. It is put among the inputs first: at the end
    of the tick, next to B's read of them, XLA would copy them all in every tick."""
    turn: jax.Array
    """A scalar that depends on all values sent so far; the next send reads it (`_in_turn`). It
    depends on received or added values, not on their buffers: XLA would copy those."""

    def after_sending(self, sent: PyTree, **changes: Any) -> Carry:
        """Returns the carry with these fields changed, after `sent` was sent."""
        return self._replace(turn=after(self.turn, sent), **changes)


class Trees(NamedTuple):
    """Tree structures of `Carry.residuals` and `Carry.stash`."""

    residuals: PyTreeDef | None
    stash: PyTreeDef | None


@dataclass(frozen=True, kw_only=True)
class Tables:
    """A schedule's tables on the mesh axis `stage`.

    axes: every mesh axis of the shard_map. chunks: V. entering, leaving: names of the parameters
    outside the pipeline that `Stage.enter` and `Stage.leave` read; `frozen` ones of them have no
    gradient. sum_names: names of `Stage.leave`'s sums besides loss and count.
    """

    rows: SlotTables
    buffers: StageBuffers
    chunks: int
    stage: str
    axes: tuple[str, ...]
    entering: tuple[str, ...]
    leaving: tuple[str, ...]
    frozen: frozenset[str] = frozenset()
    sum_names: tuple[str, ...] = ()

    def stack(self, sums: LossSums) -> jax.Array:
        """Returns [loss, count, other sums in the order of `sum_names`]. Raises ValueError if the
        names differ."""
        refuse_other_sums(self.sum_names, sums)
        return jnp.stack([sums.loss, sums.count, *(sums.others[k] for k in self.sum_names)])

    @property
    def training(self) -> bool:
        """True if the tables have a backward pass."""
        return self.buffers.cotangents > 0


@dataclass(frozen=True, eq=False)
class Tick:
    """Body of one scan: ticks with the same `kinds` of work.

    One part at a time sends (`_in_turn`): a layer's collectives may be in a loop, those that all
    stages share in a branch, and XLA:CPU would run others at the same time.
    """

    run: Tables
    device: OnDevice
    trees: Trees
    kinds: str
    rows: SlotTables
    arrived: np.ndarray
    """`SlotTables.receive_input` of the previous ticks. Both are of all ticks, as constants."""

    def body(self, carry: Carry, tick: tuple[SlotTables, jax.Array]) -> tuple[Carry, None]:
        """Runs one tick. A method: of a callable object JAX takes the text, constants and all."""
        row, arrived = tick
        if (self.arrived >= 0).any():
            inputs = _put(carry.inputs, self._own(arrived), carry.arriving)
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
            # After B has read its cotangent: the received one may go to the same slot.
            if (self.rows.receive_cotangent >= 0).any():
                slot = self._own(row.receive_cotangent)
                arriving = self._permute(_in_turn(carry, dx), -1)
                carry = carry.after_sending(
                    arriving, cotangents=_put(carry.cotangents, slot, arriving)
                )
        if "W" in self.kinds:
            carry = self._weight_gradients(carry, row)
        return carry, None

    def _forward(self, carry: Carry, row: SlotTables) -> tuple[Carry, Stream]:
        first = lax.axis_index(self.run.stage) == 0
        slot = self._own(row.forward_input)
        stage, outside = self.device.stage, self.device.outside
        idle = jax.tree.map(lambda buffer: buffer[0], carry.inputs)
        x = self._sometimes("enter", lambda m, _: stage.enter(outside, m), idle, row)
        entering = first & (row.enter >= 0)
        inputs = _put(carry.inputs, jnp.where(entering, slot, -1), x)
        carry = carry._replace(inputs=inputs)
        work = self._at(row.forward)
        chunk, x = chunk_of(self.device.blocks, work.chunk), _in_turn(carry, _take(inputs, slot))
        with jax.named_scope("F"):
            if not carry.residuals:
                return carry, stage.forward(chunk, x, work)
            y, saved = stage.forward_with_residuals(chunk, x, work)
        return carry._replace(
            residuals=_put_all(carry.residuals, self._own(row.forward_residuals), saved)
        ), y

    def _leave(self, carry: Carry, row: SlotTables, y: Stream) -> Carry:
        """Runs the head and the loss of the microbatch that leaves the last stage, and its
        gradient."""
        last = lax.axis_index(self.run.stage) == lax.axis_size(self.run.stage) - 1
        y = _where(last & (row.leave >= 0), y)
        stage, outside = self.device.stage, self.device.outside
        if not self.run.training:
            total = self._sometimes(
                "leave",
                lambda m, total: total + self.run.stack(stage.leave(outside, y, m)),
                carry.total,
                row,
            )
            return carry.after_sending(total, total=total)
        names = [k for k in self.run.leaving if k not in self.run.frozen]
        outside_sums = {k: carry.outside[k] for k in names}

        def leave(m: Index, previous: tuple[jax.Array, Arrays, Stream]) -> PyTree:
            total, sums, _ = previous

            def scaled(used: Arrays, y: Stream) -> tuple[jax.Array, jax.Array]:
                sums = stage.leave({**outside, **used}, y, m)
                return sums.loss * self.device.scale, self.run.stack(sums)

            used = {k: outside[k] for k in names}
            (grads, dy), more = jax.grad(scaled, argnums=(0, 1), has_aux=True)(used, y)
            return total + more, _add(sums, grads), dy

        total, sums, dy = self._sometimes("leave", leave, (carry.total, outside_sums, y), row)
        slot = jnp.where(last, row.leave_cotangent, -1)
        return carry.after_sending(
            dy,
            total=total,
            outside={**carry.outside, **sums},
            cotangents=_put(carry.cotangents, slot, dy),
        )

    def _backward(self, carry: Carry, row: SlotTables) -> tuple[Carry, Stream]:
        work, y = self._at(row.backward), None
        x = _in_turn(carry, _take(carry.inputs, self._own(row.backward_input)))
        if not carry.residuals:
            # The barrier keeps a compiler from reusing another tick's forward pass: with one
            # microbatch its input is the same.
            x, cotangents = lax.optimization_barrier((x, carry.cotangents))
            carry = carry._replace(cotangents=cotangents)
        chunk = chunk_of(self.device.blocks, work.chunk)
        with jax.named_scope("B"):
            if carry.residuals:
                saved = _take_all(
                    carry.residuals, self._own(row.backward_residuals), self.trees.residuals
                )
            else:
                y, saved = self.device.stage.forward_with_residuals(chunk, x, work)
                # What `backward` sends first need not read what was made here: the weights of the
                # last layer, where a loop fetches them ahead.
                carry = carry.after_sending(saved)
        if self.run.buffers.late_head:
            assert y is not None, "a late head reads what B makes again"
            carry = self._leave(carry, row, y)
        dy = _in_turn(carry, _take(carry.cotangents, self._own(row.backward_cotangent)))
        with jax.named_scope("B"):
            grads, dx, stash = self.device.stage.backward(saved, chunk, dy, work)
        carry = self._accumulate(carry, row.backward, grads)
        if carry.stash:
            slot = self._own(row.backward_stash)
            carry = carry._replace(stash=_put_all(carry.stash, slot, stash))
        return carry, dx

    def _weight_gradients(self, carry: Carry, row: SlotTables) -> Carry:
        work = self._at(row.weight)
        chunk = chunk_of(self.device.blocks, work.chunk)
        stash = _take_all(carry.stash, self._own(row.weight_stash), self.trees.stash)
        stash = _in_turn(carry, stash)
        with jax.named_scope("W"):
            grads = self.device.stage.weight_gradients(stash, chunk, work)
        return self._accumulate(carry, row.weight, grads)

    def _accumulate(self, carry: Carry, works: jax.Array, grads: Arrays) -> Carry:
        """Adds the gradients of the work's chunk to its sums, if there is a work."""
        chunk = self._at(works).chunk
        slot = jnp.where(self._own(works) >= 0, chunk, -1)
        sums = {
            k: _put(carry.blocks[k], slot, _take(carry.blocks[k], chunk) + grads[k]) for k in grads
        }
        return carry.after_sending(grads, blocks={**carry.blocks, **sums})

    def _backward_of_enter(self, carry: Carry, row: SlotTables, dx: Stream) -> Carry:
        """Propagates the pipeline input's gradient into the embedding."""
        first = lax.axis_index(self.run.stage) == 0
        dx = _where(first & (row.exit >= 0), _in_turn(carry, dx))
        names = [k for k in self.run.entering if k not in self.run.frozen]
        if not names:
            return carry

        def backward(m: Index, sums: Arrays) -> Arrays:
            # The barrier keeps a compiler from reusing the forward pass: a few ticks are unrolled,
            # and a microbatch's number is the same constant as when it entered.
            m, dy = lax.optimization_barrier((m, dx))

            def entered(used: Arrays) -> Stream:
                return self.device.stage.enter({**self.device.outside, **used}, m)

            _, pull_back = jax.vjp(entered, {k: self.device.outside[k] for k in names})
            return _add(sums, pull_back(dy)[0])

        sums = self._sometimes("exit", backward, {k: carry.outside[k] for k in names}, row)
        return carry.after_sending(sums, outside={**carry.outside, **sums})

    def _sometimes(
        self, name: str, work: Callable[[Index, Tree], Tree], value: Tree, row: SlotTables
    ) -> Tree:
        """Returns work(microbatch, value) in ticks with a microbatch, `value` in others. If all or
        none of the scan's ticks have one, nothing is decided at run time."""
        column, m = getattr(self.rows, name), getattr(row, name)
        if (column < 0).all():
            return value
        axes = self.run.axes

        def typed(m: Index, value: Tree) -> Tree:
            return jax.tree.map(lambda leaf: vary(leaf, axes), work(m, value))

        with jax.named_scope(name):
            if (column >= 0).all():
                return typed(m, value)
            return lax.cond(m >= 0, typed, lambda m, value: value, m, value)

    def _permute(self, x: Stream, way: int) -> Stream:
        """Returns the value from the neighbour: the previous stage (way 1) or the next (-1)."""
        n = lax.axis_size(self.run.stage)
        pairs = [(i, (i + way) % n) for i in range(n)]
        if self.run.chunks == 1:
            pairs = [(a, b) for a, b in pairs if b - a == way]
        return lax.ppermute(x, self.run.stage, pairs)

    def _at(self, row: jax.Array) -> StageWork:
        work = jnp.maximum(self._own(row), 0)
        return StageWork(work % self.run.chunks, work // self.run.chunks)

    def _own(self, row: jax.Array) -> jax.Array:
        return row[lax.axis_index(self.run.stage)]


def _in_turn(carry: Carry, tree: Tree) -> Tree:
    """`tree`, to be read after all sends so far, in this tick and before it."""
    return after(tree, carry.turn)


def chunk_of(blocks: Arrays, chunk: Index) -> Arrays:
    """The leaves of one chunk."""
    return {k: _take(leaf, chunk) for k, leaf in blocks.items()}


def _where(condition: jax.Array, tree: Tree) -> Tree:
    """`tree`, zeros where the condition is false."""
    return jax.tree.map(lambda x: jnp.where(condition, x, jnp.zeros((), x.dtype)), tree)


def _take(buffers: Tree, slot: Index) -> Tree:
    """buffer[slot] of each buffer; an arbitrary value for slot -1."""

    def one(buffer: jax.Array) -> jax.Array:
        if len(buffer) == 1:
            return buffer[0]
        return lax.dynamic_index_in_dim(buffer, jnp.maximum(slot, 0), 0, keepdims=False)

    return jax.tree.map(one, buffers)


def _put(buffers: Tree, slot: Index, values: PyTree) -> Tree:
    """Returns each buffer with its value at `slot`; unchanged for slot -1."""

    def one(buffer: jax.Array, value: jax.Array) -> jax.Array:
        updated = jnp.where(slot >= 0, value.astype(buffer.dtype), _take(buffer, slot))
        return lax.dynamic_update_index_in_dim(buffer, updated, jnp.maximum(slot, 0), 0)

    return jax.tree.map(one, buffers, values)


def _take_all(buffers: list[jax.Array], slot: Index, tree: PyTreeDef | None) -> PyTree:
    return jax.tree.unflatten(tree, _take(buffers, slot))


def _put_all(buffers: list[jax.Array], slot: Index, tree: PyTree) -> list[jax.Array]:
    return _put(buffers, slot, jax.tree.leaves(tree))


def _add(sums: Arrays, grads: Arrays) -> Arrays:
    return {k: sums[k] + grads[k].astype(jnp.float32) for k in sums}
