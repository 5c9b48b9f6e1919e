"""What a model is that describes itself, and a module to make one from (tests/models/encoder.py is
one that is not of this library).

A config is a frozen dataclass with `build(key)` and `describe()`; what it builds is a module whose
repeated blocks are stacked in `period`. The rest of the house knows the protocols here and
`description.ModelDescription`, never a class that has them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import PyTree

from jaxtrain.attention.kernels import AttentionKernel
from jaxtrain.collectives.vary import Index
from jaxtrain.mesh.sharding import PaddedAxis
from jaxtrain.models.description import STACK, ModelDescription
from jaxtrain.nn.communicator import Communicator, Local
from jaxtrain.nn.loss import LossSums
from jaxtrain.nn.module import STACKED, put_together, take_apart
from jaxtrain.nn.param import named_key, normal
from jaxtrain.nn.remat import named_input, remat
from jaxtrain.nn.stack import Body, LayerLoop, Layers

Batch = dict[str, jax.Array]
Tables = Mapping[str, jax.Array]


@runtime_checkable
class ModelConfig(Protocol):
    """A model of an experiment that describes itself.

    It may also have `violations()`, a list of what is wrong with its fields, each with its remedy
    (`untried_violations()`, where it has `remedies.Clash`es whose remedies a mesh may change);
    and for the certificate `shrunk(devices)`, the model with the same features, small enough for a
    laptop, and `varied(...)`, as `DecoderConfig` has them.
    """

    def build(self, key: jax.Array, *, kernel: AttentionKernel | None = None) -> Model:
        """The module with its first parameters, the same for the same key. kernel: of attention,
        None lets the platform choose."""
        ...

    def describe(self) -> ModelDescription: ...


class Model(Protocol):
    """The module of a model that describes itself. `LayeredModel` has all but the first three."""

    def context(self, batch: Batch, key: jax.Array | None, comm: Communicator) -> Any:
        """What every layer is told of a batch: a tree of arrays, none differentiated. `key` turns
        dropout on."""
        ...

    def enter(
        self, tables: Tables, batch: Batch, context: PyTree, comm: Communicator, loop: LayerLoop
    ) -> jax.Array:
        """What the stack begins with, [tokens share, embed]. tables: as `gather_lookups` gives
        them."""
        ...

    def leave(
        self,
        tables: Tables,
        x: jax.Array,
        batch: Batch,
        context: PyTree,
        comm: Communicator,
        loop: LayerLoop,
    ) -> LossSums:
        """This device's shares of the loss sum and the count, of what the stack ends with; and, in
        a dict, of the sums that the description names."""
        ...

    def stack(self, comm: Communicator) -> tuple[dict[str, jax.Array], Body]:
        """The stack's parameters, named without `period.`, and what one turn of it does."""
        ...

    def loss(
        self,
        batch: Batch,
        *,
        key: jax.Array | None = None,
        comm: Communicator = ...,
        loop: LayerLoop = ...,
    ) -> LossSums:
        """All of it on a device's rows [rows, ...] of a batch."""
        ...


def description_of(model: object) -> ModelDescription | None:
    """What a model says of itself; None of a model that does not."""
    return model.describe() if isinstance(model, ModelConfig) else None


class LayeredModel(nnx.Module):
    """A model of blocks that repeat. A subclass sets `period`, by `stacked_blocks`, and has
    `context`, `enter` and `leave`; its blocks are called as `run_block` says."""

    period: Any
    first_layer: int = 0
    """Layers before the stack."""
    lookup: str = "embedding"
    """The parameter by which tokens enter."""
    tokens: str = "tokens"
    """The field of a batch that has their ids."""
    used_next: str | None = None
    """A parameter that `leave` uses: among its tables if gathered while the last layer ran."""

    def context(self, batch: Batch, key: jax.Array | None, comm: Communicator) -> Any:
        raise NotImplementedError

    def enter(
        self, tables: Tables, batch: Batch, context: PyTree, comm: Communicator, loop: LayerLoop
    ) -> jax.Array:
        raise NotImplementedError

    def leave(
        self,
        tables: Tables,
        x: jax.Array,
        batch: Batch,
        context: PyTree,
        comm: Communicator,
        loop: LayerLoop,
    ) -> LossSums:
        raise NotImplementedError

    def run_block(
        self, block: Any, x: jax.Array, context: PyTree, comm: Communicator, *, layer: Index
    ) -> jax.Array:
        """One layer, x [tokens share, embed]; `layer` is its number in natural order."""
        return block(x, context, comm, layer=layer)

    def gather_lookups(self, comm: Communicator, batch: Batch) -> tuple[Tables, Batch]:
        """The tables that tokens enter by, as they are used, and the batch: here one, `lookup`, by
        the batch's `tokens`."""
        whole, ids = self.gather_param(comm, self.lookup, batch[self.tokens])
        return {self.lookup: whole}, {**batch, self.tokens: ids}

    def loss(
        self,
        batch: Batch,
        *,
        key: jax.Array | None = None,
        comm: Communicator = Local(),  # noqa: B008 (frozen)
        loop: LayerLoop = LayerLoop(),  # noqa: B008 (frozen)
    ) -> LossSums:
        """This device's shares of what `leave` sums, of its rows of a batch; `key` turns dropout
        on."""
        tables, batch = self.gather_lookups(comm, batch)
        context = self.context(batch, key, comm)
        x = self.enter(tables, batch, context, comm, loop)
        x, gathered = self.run_period(x, context, comm, loop)
        return self.leave({**tables, **gathered}, x, batch, context, comm, loop)

    def gather_param(
        self, comm: Communicator, name: str, after: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """A parameter of the model's own as it is used, and `after`, before which it is not."""
        whole, after = comm.gather({name: getattr(self, name)[...]}, "", after)
        return whole[name], after

    def run_period(
        self, x: jax.Array, context: PyTree, comm: Communicator, loop: LayerLoop
    ) -> tuple[jax.Array, Tables]:
        """x after all layers of the stack, and `used_next`, gathered meanwhile where permutes of
        weights are tied to products."""
        name, tied = self.used_next, comm.tied_flops_per_byte is not None
        tables = {name: getattr(self, name)[...]} if name and tied else {}
        stacked, body = self.stack(comm)
        layers = Layers(
            body,
            fetch=lambda p: comm.fetch(p, STACK),
            scatter=lambda g: comm.scatter(g, STACK),
            loop=loop,
            frozen=comm.frozen_of(stacked, STACK),
            tiled=comm.tiled_products(STACK, lambda other: self.stack(other)[1]),
            flops_per_byte=comm.tied_flops_per_byte,
            fetch_tables=lambda p: comm.fetch(p, ""),
            scatter_tables=lambda g: comm.scatter(g, ""),
        )
        return layers.with_tables(stacked, x, context, tables)

    def stack(self, comm: Communicator) -> tuple[dict[str, jax.Array], Body]:
        """The stack's parameters, named without `period.`, and what one turn of it does."""
        parts = [take_apart(block) for block in self.period]
        first, n = self.first_layer, len(parts)
        stacked = {f"{i}.{k}": v for i, part in enumerate(parts) for k, v in part.params.items()}

        def body(params: Any, x: jax.Array, context: PyTree, number: Index) -> jax.Array:
            for i, part in enumerate(parts):
                mine = {k: params[f"{i}.{k}"] for k in part.params}
                block = put_together(part.static, mine)
                x = self.run_block(block, x, context, comm, layer=first + number * n + i)
            return x

        return stacked, body

    def run_outside(
        self,
        block: nnx.Module,
        path: str,
        x: jax.Array,
        context: PyTree,
        comm: Communicator,
        loop: LayerLoop,
        *,
        layer: int,
    ) -> jax.Array:
        """A block beside the stack whose leaves' names begin with `path`, under the loop's remat
        policy."""
        part = take_apart(block)

        def run(params: Any, x: jax.Array, context: PyTree) -> jax.Array:
            params, x = comm.gather(params, path, named_input(x))
            used = put_together(part.static, params)
            return self.run_block(used, x, context, comm, layer=layer)

        return remat(run, loop.remat, loop.offload)(part.params, x, context)


def layer_key(key: jax.Array, layer: Index) -> jax.Array:
    """The key of a layer, by its number in natural order."""
    return jax.random.fold_in(named_key(key, "layer"), layer)


def stacked_blocks(
    key: jax.Array,
    make: Sequence[Callable[[jax.Array], nnx.Module]],
    periods: int,
    *,
    first: int = 0,
) -> nnx.List:
    """A model's `period`: what each of `make` builds of a layer's key, stacked over `periods`.
    first: layers before the stack."""

    def build(make: Callable[[jax.Array], nnx.Module], layer: jax.Array) -> nnx.Module:
        return make(layer_key(key, layer))

    numbers = first + len(make) * jnp.arange(periods)
    return nnx.List(
        [
            nnx.vmap(partial(build, each), transform_metadata=STACKED)(numbers + i)
            for i, each in enumerate(make)
        ]
    )


def vocabulary_table(
    key: jax.Array, name: str, shape: tuple[int, int], *, std: float, real: int
) -> nnx.Param:
    """A [vocab, embed] table whose rows from `real` on are zero, and stay so: they get no
    gradient, and weight decay of zero is zero."""
    table = normal(key, name, shape, (PaddedAxis("vocab", real), "embed"), std=std)
    table.set_value(jnp.where(jnp.arange(shape[0])[:, None] < real, table[...], 0.0))
    return table
