"""A pipeline's stage, made from a model with a description.

Operations before and after the pipeline are split over (tensor, stage) instead of tensor: every
stage has its slice of the vocabulary, and of the heads of blocks outside the stack.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import PyTree

from jaxtrain.arrays import Leaves
from jaxtrain.collectives.vary import Index, vary
from jaxtrain.losses.cross_entropy import LossSums
from jaxtrain.mesh.axes import STAGE
from jaxtrain.models.description import STACK, ModelDescription
from jaxtrain.models.layered import Model
from jaxtrain.nn.communicator import Communicator
from jaxtrain.nn.explicit import Explicit, gather_tokens, scatter_tokens
from jaxtrain.nn.module import put_together
from jaxtrain.nn.split import SplitLayers
from jaxtrain.nn.stack import Body, LayerLoop, Layers, Stream
from jaxtrain.pipeline.layout import StageLayout, layers_of_stage, where_real
from jaxtrain.pipeline.tick import StageWork


@dataclass(frozen=True, eq=False)
class ModelStage:
    """A `pipeline.tick.Stage` of a `Model`.

    static: the model without its parameters, from `nn.module.take_apart`. described: its
    description. layout: places of the layers. split: True if the schedule has W. inner: the
    communicator within a stage. wide: that of operations that all stages share. params: sharded as
    at rest. batch: [microbatches, rows, ...]. key: the step's, None for no dropout.
    reduce_microbatch: reduces one microbatch's gradients of blocks before they are accumulated.
    """

    static: Any
    described: ModelDescription
    layout: StageLayout
    split: bool
    inner: Explicit
    wide: Explicit
    params: Leaves
    batch: Leaves
    key: jax.Array | None
    loop: LayerLoop
    reduce_microbatch: Callable[[Leaves], Leaves]

    def enter(self, outside: Leaves, microbatch: Index) -> Stream:
        model, batch = self._model(outside, entering=True), self._batch(microbatch)
        context = model.context(batch, self._key(microbatch), self.wide)
        x = model.enter(self._tables(outside), batch, context, self.wide, self.loop)
        _refuse_other_stream(self.described, self.wide.compute_dtype, x)
        algorithm = self.inner.collectives.tensor
        gather = partial(gather_tokens, "pipeline input gradients", (STAGE,), algorithm)
        return jax.tree.map(gather, x)

    def leave(self, outside: Leaves, y: Stream, microbatch: Index) -> LossSums:
        model, batch = self._model(outside, entering=False), self._batch(microbatch)
        context = model.context(batch, self._key(microbatch), self.wide)
        algorithm = self.inner.collectives.tensor
        y = jax.tree.map(partial(scatter_tokens, "pipeline output", (STAGE,), algorithm), y)
        tables = self._tables(outside)
        return model.leave(tables, y, batch, context, self.wide, self.loop)

    def forward(self, chunk: Leaves, x: Stream, work: StageWork) -> Stream:
        return self._layers(chunk, x, self._extras(work))

    def forward_with_residuals(
        self, chunk: Leaves, x: Stream, work: StageWork
    ) -> tuple[Stream, Any]:
        layers = self._layers if self._split is None else self._split
        return layers.forward_with_residuals(chunk, x, self._extras(work))

    def backward(
        self, saved: PyTree, chunk: Leaves, dy: Stream, work: StageWork
    ) -> tuple[Leaves, Stream, Any]:
        if self._split is not None:
            grads, dx, stash = self._split.backward(saved, chunk, dy, self._extras(work))
            return self._reduce_chunk(grads, work), dx, stash
        grads, dx = self._layers.backward(saved, chunk, dy, self._extras(work))
        return self._reduce_chunk(grads, work), dx, ()

    def weight_gradients(self, stash: PyTree, chunk: Leaves, work: StageWork) -> Leaves:
        assert self._split is not None, "a schedule without W asks for none"
        return self._reduce_chunk(self._split.weight_gradients(stash, chunk), work)

    @cached_property
    def _split(self) -> SplitLayers | None:
        if not self.split:
            return None
        zero = partial(vary, axes=self.inner.axes)
        return SplitLayers(self._layers, self._body, self.inner, vary=zero)

    @cached_property
    def _layers(self) -> Layers:
        return Layers(
            self._body(self.inner),
            fetch=lambda p: self.inner.fetch(p, STACK),
            scatter=lambda g: self.inner.scatter(g, STACK),
            loop=self.loop,
            frozen=frozenset(
                k.removeprefix(STACK) for k in self.inner.frozen if k.startswith(STACK)
            ),
            tiled=self.inner.tiled_products(STACK, self._body),
            flops_per_byte=self.inner.tied_flops_per_byte,
        )

    def _reduce_chunk(self, grads: Leaves, work: StageWork) -> Leaves:
        """Reduces one chunk's gradients; `reduce_microbatch` expects a leaf in slots. Padding's
        gradients become zero: the backward pass may give NaN there."""
        layout = self.layout
        if layout.padding:
            real = layers_of_stage(layout, STAGE)[work.chunk] >= 0
            grads = {k: where_real(real, g) for k, g in grads.items()}
        many = layout.chunks > 1
        reduced = self.reduce_microbatch(
            {STACK + k: g[None] if many else g for k, g in grads.items()}
        )
        return {k.removeprefix(STACK): g[0] if many else g for k, g in reduced.items()}

    def _body(self, comm: Communicator) -> Body:
        """Function of one period with the communicator `comm`."""

        def body(params: Leaves, x: Stream, extras: PyTree, slot: Index) -> Stream:
            context, layers = extras
            turn = self._model({}).stack(comm)[1]
            if not self.layout.padding:
                return turn(params, x, context, layers[slot])
            real = layers[slot] >= 0
            # The gradient of a block of zeros may be NaN, as is 0 times it. Both branches are x:
            # this costs nothing in the forward pass, and drops padding's gradient in the backward.
            into = jax.tree.map(partial(jnp.where, real), x, lax.stop_gradient(x))
            y = turn(params, into, context, jnp.maximum(layers[slot], 0))
            return jax.tree.map(partial(jnp.where, real), y, x)

        return body

    def _extras(self, work: StageWork) -> tuple[Any, jax.Array]:
        """Returns the microbatch's context, and the layer in each slot of the chunk."""
        model, batch = self._model({}), self._batch(work.microbatch)
        layers = layers_of_stage(self.layout, STAGE)[work.chunk]
        return model.context(batch, self._key(work.microbatch), self.inner), layers

    def _model(self, outside: Leaves, *, entering: bool | None = None) -> Model:
        """The model. entering: only leaves that are read before the stack may be read (True), or
        only those after it: gradients of others would not be computed."""
        # A model knows no chunks: any chunk serves.
        first = self.layout.by_chunk
        params = {k: first(p)[0] if k.startswith(STACK) else p for k, p in self.params.items()}
        arrays: dict[str, Any] = {**params, **outside}
        for name in outside if entering is not None else ():
            if self.described.enters(name) != entering and name not in self.described.tied:
                arrays[name] = _NotThere(name, entering=bool(entering))
        return put_together(self.static, arrays)

    def _tables(self, outside: Leaves) -> Leaves:
        return {name: outside.get(name, self.params[name]) for name in self.described.lookups}

    def _batch(self, microbatch: Index) -> Leaves:
        take = lax.dynamic_index_in_dim
        return {k: take(v, microbatch, 0, keepdims=False) for k, v in self.batch.items()}

    def _key(self, microbatch: Index) -> Any:
        return None if self.key is None else jax.random.fold_in(self.key, microbatch)


class _NotThere:
    """Replaces a parameter that one side of the stack must not read."""

    def __init__(self, name: str, *, entering: bool) -> None:
        names = "does not name" if entering else "names"
        self._message = (
            f"{'enter' if entering else 'leave'}() reads {name}, which describe() {names} among "
            f"what is read before the stack (lookups, entering): in a pipeline its gradient "
            f"would not be made; {'name it there' if entering else 'take it out'}"
        )

    def __jax_array__(self) -> jax.Array:
        raise ValueError(self._message)

    def __getitem__(self, index: object) -> jax.Array:
        raise ValueError(self._message)

    shape = dtype = ndim = astype = property(__jax_array__)


def stream_share(described: ModelDescription, tokens: int, dtype: DTypeLike) -> PyTree:
    """Shapes and dtypes of the residual stream of a device's share of the tokens."""
    widths = {name: member.width for name, member in described.members.items()}
    shapes = {k: jax.ShapeDtypeStruct((tokens, width), dtype) for k, width in widths.items()}
    return shapes if described.stream else shapes[""]


def _refuse_other_stream(described: ModelDescription, dtype: DTypeLike, x: object) -> None:
    """Raises ValueError for a stream of other members than those of the description."""
    arrays = x if isinstance(x, dict) and described.stream else {"": x}
    returned = {k: getattr(v, "shape", ())[-1:] for k, v in arrays.items()}
    widths = {name: member.width for name, member in described.members.items()}
    if returned != {name: (width,) for name, width in widths.items()}:
        raise ValueError(
            f"model.describe(): the stream is of width {widths if described.stream else widths['']}"
            f", and enter() returns {jax.tree.map(jnp.shape, x)}; say that, or return what it says"
        )
    others = {k: v.dtype.name for k, v in arrays.items() if v.dtype != dtype}
    if others:
        raise ValueError(
            f"enter() returns {others}, and the stream is in {jnp.dtype(dtype).name}, the "
            "communicator's compute_dtype"
        )
