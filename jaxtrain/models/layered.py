"""Protocols of a model with a description, and a base class of its module (tests/models/encoder.py
is a model outside this library).

A config is a frozen dataclass with `build(key)` and `describe()`. It builds a module whose repeated
blocks are stacked in `period`. Other rooms know the protocols here and
`description.ModelDescription`, never a class that implements them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import PyTree

from jaxtrain.arrays import Arrays
from jaxtrain.attention.kernels import AttentionKernel
from jaxtrain.collectives.vary import Index
from jaxtrain.losses.cross_entropy import LossSums
from jaxtrain.losses.objective import Objective
from jaxtrain.mesh.sharding import PaddedAxis
from jaxtrain.models.description import STACK, ModelDescription
from jaxtrain.nn.communicator import Communicator
from jaxtrain.nn.local import Local
from jaxtrain.nn.module import STACKED, put_together, take_apart
from jaxtrain.nn.param import named_key, normal
from jaxtrain.nn.remat import named_input, remat
from jaxtrain.nn.stack import Body, LayerLoop, Layers, Stream

TableMap = Mapping[str, jax.Array]


@runtime_checkable
class ModelConfig(Protocol):
    """A model of an experiment, with a description.

    It may also have `violations()`, a list of violations of its fields, each with its remedy (and
    `untried_violations()`, if it has `remedies.Clash`es whose remedies depend on a mesh); and for
    the certificate `shrunk(devices)`, the model with the same features, small enough for a laptop,
    and `varied(...)`, as in `DecoderConfig`.
    """

    def build(self, key: jax.Array, *, kernel: AttentionKernel | None = None) -> Model:
        """Returns the module with its initial parameters, a function of the key. kernel: of
        attention, None lets the platform choose."""
        ...

    def describe(self) -> ModelDescription: ...


class Model(Protocol):
    """The module of a model with a description. `LayeredModel` implements all but the first three
    methods."""

    def context(self, batch: Arrays, key: jax.Array | None, comm: Communicator) -> Any:
        """Returns the facts of a batch that every layer gets: a tree of arrays without derivatives.
        `key` turns dropout on."""
        ...

    def enter(
        self, tables: TableMap, batch: Arrays, context: PyTree, comm: Communicator, loop: LayerLoop
    ) -> Stream:
        """Returns the stack's input, [tokens share, embed], or a dict of the members that the
        description's `stream` names. tables: from `gather_lookups`."""
        ...

    def leave(
        self,
        tables: TableMap,
        x: Stream,
        batch: Arrays,
        context: PyTree,
        comm: Communicator,
        loop: LayerLoop,
    ) -> LossSums:
        """Returns this device's shares of the loss sum and the count, from the stack's output x;
        and, in a dict, of the sums that the description names."""
        ...

    def stack(self, comm: Communicator) -> tuple[dict[str, jax.Array], Body]:
        """Returns the stack's parameters, named without `period.`, and one period's function."""
        ...

    def loss(
        self,
        batch: Arrays,
        *,
        key: jax.Array | None = None,
        comm: Communicator = ...,
        loop: LayerLoop = ...,
    ) -> LossSums:
        """Returns the sums over a device's rows [rows, ...] of a batch, from lookup to loss."""
        ...


def description_of(model: object, objective: Objective | None = None) -> ModelDescription | None:
    """Returns the model's description, as it is with an objective; None for a model without
    one."""
    if not isinstance(model, ModelConfig):
        return None
    return model.describe() if objective is None else model.describe().with_preferences()


class LayeredModel(nnx.Module):
    """A model of blocks that repeat. A subclass sets `period`, by `stacked_blocks`, and implements
    `context`, `enter` and `leave`; `run_block` shows how its blocks are called."""

    period: Any
    first_layer: int = 0
    """Layers before the stack."""
    lookup: str = "embedding"
    """Name of the table of the tokens' vectors."""
    objective: Objective | None = None
    """Makes the sums that `leave` returns in place of its own, None for its own."""
    tokens: str = "tokens"
    """Field of a batch with their ids."""
    used_next: str | None = None
    """A parameter that `leave` uses: among its tables if gathered during the last layer."""

    def context(self, batch: Arrays, key: jax.Array | None, comm: Communicator) -> Any:
        raise NotImplementedError

    def enter(
        self, tables: TableMap, batch: Arrays, context: PyTree, comm: Communicator, loop: LayerLoop
    ) -> Stream:
        raise NotImplementedError

    def leave(
        self,
        tables: TableMap,
        x: Stream,
        batch: Arrays,
        context: PyTree,
        comm: Communicator,
        loop: LayerLoop,
    ) -> LossSums:
        raise NotImplementedError

    def run_block(
        self, block: Any, x: Stream, context: PyTree, comm: Communicator, *, layer: Index
    ) -> Stream:
        """Runs one layer on x, the residual stream; `layer` is its number in natural order."""
        return block(x, context, comm, layer=layer)

    def gather_lookups(self, comm: Communicator, batch: Arrays) -> tuple[TableMap, Arrays]:
        """Returns the gathered lookup tables and the batch: here the one table `lookup`, for the
        batch's `tokens`."""
        table, ids = self.gather_param(comm, self.lookup, batch[self.tokens])
        return {self.lookup: table}, {**batch, self.tokens: ids}

    def loss(
        self,
        batch: Arrays,
        *,
        key: jax.Array | None = None,
        comm: Communicator = Local(),  # noqa: B008 (frozen)
        loop: LayerLoop = LayerLoop(),  # noqa: B008 (frozen)
    ) -> LossSums:
        """Returns this device's shares of `leave`'s sums, over its rows of a batch; `key` turns
        dropout on."""
        tables, x, batch, context = self.run_to_leave(batch, key, comm, loop)
        return self.leave(tables, x, batch, context, comm, loop)

    def run_to_leave(
        self, batch: Arrays, key: jax.Array | None, comm: Communicator, loop: LayerLoop
    ) -> tuple[TableMap, Stream, Arrays, Any]:
        """Returns the first four arguments of `leave`: gathered tables, the stack's output, the
        batch and its context."""
        tables, batch = self.gather_lookups(comm, batch)
        context = self.context(batch, key, comm)
        x = self.enter(tables, batch, context, comm, loop)
        x, gathered = self.run_period(x, context, comm, loop)
        return {**tables, **gathered}, x, batch, context

    def gather_param(
        self, comm: Communicator, name: str, x: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Returns a gathered parameter of the model, and x, for which the gather waits."""
        params, x = comm.gather({name: getattr(self, name)[...]}, "", x)
        return params[name], x

    def run_period(
        self, x: Stream, context: PyTree, comm: Communicator, loop: LayerLoop
    ) -> tuple[Stream, TableMap]:
        """Returns x after all layers of the stack; and `used_next`, gathered during the last layer,
        if permutes of weights are tied to products."""
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
        """Returns the stack's parameters, named without `period.`, and one period's function."""
        parts = [take_apart(block) for block in self.period]
        first, n = self.first_layer, len(parts)
        stacked = {f"{i}.{k}": v for i, part in enumerate(parts) for k, v in part.params.items()}

        def body(params: Any, x: Stream, context: PyTree, number: Index) -> Stream:
            for i, part in enumerate(parts):
                own = {k: params[f"{i}.{k}"] for k in part.params}
                block = put_together(part.static, own)
                x = self.run_block(block, x, context, comm, layer=first + number * n + i)
            return x

        return stacked, body

    def run_outside(
        self,
        block: nnx.Module,
        path: str,
        x: Stream,
        context: PyTree,
        comm: Communicator,
        loop: LayerLoop,
        *,
        layer: int,
    ) -> Stream:
        """Runs a block outside the stack, whose leaves' names begin with `path`, under the loop's
        remat policy."""
        part = take_apart(block)

        def run(params: Any, x: Stream, context: PyTree) -> Stream:
            params, x = comm.gather(params, path, named_input(x))
            used = put_together(part.static, params)
            return self.run_block(used, x, context, comm, layer=layer)

        return remat(run, loop.remat, loop.offload)(part.params, x, context)


def layer_key(key: jax.Array, layer: Index) -> jax.Array:
    """Key of a layer, by its number in natural order."""
    return jax.random.fold_in(named_key(key, "layer"), layer)


def stacked_blocks(
    key: jax.Array,
    make: Sequence[Callable[[jax.Array], nnx.Module]],
    periods: int,
    *,
    first: int = 0,
) -> nnx.List:
    """Returns a model's `period`: the block of each function of `make`, from a layer's key, stacked
    over `periods`. first: layers before the stack."""

    def build(make: Callable[[jax.Array], nnx.Module], layer: jax.Array) -> nnx.Module:
        return make(layer_key(key, layer))

    numbers = first + len(make) * jnp.arange(periods)
    return nnx.List(
        [
            nnx.vmap(partial(build, block), transform_metadata=STACKED)(numbers + i)
            for i, block in enumerate(make)
        ]
    )


def vocabulary_table(
    key: jax.Array, name: str, shape: tuple[int, int], *, std: float, real: int
) -> nnx.Param:
    """A [vocab, embed] table whose rows from `real` on are zero and stay zero: they get no
    gradient, and weight decay of zero is zero."""
    table = normal(key, name, shape, (PaddedAxis("vocab", real), "embed"), std=std)
    table.set_value(jnp.where(jnp.arange(shape[0])[:, None] < real, table[...], 0.0))
    return table
