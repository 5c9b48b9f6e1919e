"""A decoder on a pipeline: what a stage does, and the sums of a step or an evaluation.

What stands before and behind the pipeline is split over (tensor, stage) as it else is over tensor:
every stage has its slice of the vocabulary, and of the heads of blocks outside the period.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain.collectives.lax_form import Lax
from jaxtrain.collectives.vary import vary
from jaxtrain.mesh.sharding import STAGE, ways
from jaxtrain.models.block import Context
from jaxtrain.nn.explicit import Explicit, gather_tokens, scatter_tokens
from jaxtrain.nn.module import put_together
from jaxtrain.nn.split import SplitLayers
from jaxtrain.nn.stack import Body, LayerLoop, Layers
from jaxtrain.pipeline.executor import Executor
from jaxtrain.pipeline.layout import StageLayout
from jaxtrain.pipeline.schedule import make_schedule
from jaxtrain.pipeline.slots import forward_only, training
from jaxtrain.pipeline.tick import At, OnDevice
from jaxtrain.step.assembly import Assembly
from jaxtrain.step.gradients import Gradients, LocalSums, Reduction
from jaxtrain.step.padding import where_real

Arrays = dict[str, Any]
PERIOD = "period."


@dataclass(frozen=True, eq=False)
class DecoderStage:
    """A `pipeline.executor.Stage`. inner: the communicator within a stage; wide: of what all stages
    share. model: with parameters of any values. key: the step's, None for no dropout. settle:
    one microbatch's gradients of blocks to what is accumulated."""

    assembly: Assembly
    inner: Explicit
    wide: Explicit
    params: Arrays
    batch: Arrays
    key: Any
    loop: LayerLoop
    settle: Callable[[Arrays], Arrays]

    def enter(self, outside: Arrays, microbatch: Any) -> jax.Array:
        model, batch = self._model(outside), self._batch(microbatch)
        context = model.context(batch, self._key(microbatch), self.wide)
        x = model.enter(model.embedding[...], batch, context, self.wide, self.loop)
        by = self.inner.collectives.tensor
        return gather_tokens("pipeline input gradients", (STAGE,), by, x)

    def leave(self, outside: Arrays, y: jax.Array, microbatch: Any) -> tuple[jax.Array, jax.Array]:
        model, batch = self._model(outside), self._batch(microbatch)
        context = model.context(batch, self._key(microbatch), self.wide)
        y = scatter_tokens("pipeline output", (STAGE,), self.inner.collectives.tensor, y)
        return model.leave(model.embedding[...], y, batch, context, self.wide, self.loop)

    def forward(self, chunk: Arrays, x: jax.Array, at: At) -> jax.Array:
        return self._layers(chunk, x, self._extras(at))

    def linearised(self, chunk: Arrays, x: jax.Array, at: At) -> tuple[jax.Array, Any]:
        layers = self._layers if self._split is None else self._split
        return layers.linearised(chunk, x, self._extras(at))

    def pulled_back(
        self, saved: Any, chunk: Arrays, dy: jax.Array, at: At
    ) -> tuple[Arrays, jax.Array, Any]:
        if self._split is not None:
            grads, dx, stash = self._split.pulled_back(saved, chunk, dy, self._extras(at))
            return self._settled(grads, at), dx, stash
        grads, dx = self._layers.pulled_back(saved, chunk, dy, self._extras(at))
        return self._settled(grads, at), dx, ()

    def weight_gradients(self, stash: Any, chunk: Arrays, at: At) -> Arrays:
        assert self._split is not None, "a schedule without W asks for none"
        return self._settled(self._split.weight_gradients(stash, chunk), at)

    @cached_property
    def _split(self) -> SplitLayers | None:
        if self.assembly.on_stages.schedule.weight is None:
            return None
        axes = tuple(self.assembly.sizes)
        zero = partial(vary, axes=axes)
        return SplitLayers(self._layers, self._body, self.inner, vary=zero)

    @cached_property
    def _layers(self) -> Layers:
        return Layers(
            self._body(self.inner),
            fetch=lambda p: self.inner.fetch(p, PERIOD),
            scatter=lambda g: self.inner.scatter(g, PERIOD),
            loop=self.loop,
            frozen=frozenset(k.removeprefix(PERIOD) for k in self.inner.frozen if _stacked(k)),
        )

    def _settled(self, grads: Arrays, at: At) -> Arrays:
        """Of one chunk, which `settle` knows as a part of the laid leaf only; zero in slots of
        padding, where the backward pass may have made what is no number."""
        layout = self.assembly.on_stages.layout
        if layout.padding:
            real = layers_here(layout)[at.chunk] >= 0
            grads = {k: where_real(real, g) for k, g in grads.items()}
        many = layout.chunks > 1
        settled = self.settle({PERIOD + k: g[None] if many else g for k, g in grads.items()})
        return {k.removeprefix(PERIOD): g[0] if many else g for k, g in settled.items()}

    def _body(self, comm: Any) -> Body:
        """One turn of the period, asking `comm`."""

        def body(params: Arrays, x: jax.Array, extras: Any, slot: Any) -> jax.Array:
            context, layers = extras
            turn = self._model({}).stack(comm)[1]
            if not self.assembly.on_stages.layout.padding:
                return turn(params, x, context, layers[slot])
            real = layers[slot] >= 0
            # The gradient of a block of zeros may be no number, and 0 times it is none. The same x
            # either way: forward this costs nothing, and backward it drops what padding gives.
            into = jnp.where(real, x, lax.stop_gradient(x))
            y = turn(params, into, context, jnp.maximum(layers[slot], 0))
            return jnp.where(real, y, x)

        return body

    def _extras(self, at: At) -> tuple[Context, jax.Array]:
        """The microbatch's context, and which layer is in each slot of the chunk."""
        model, batch = self._model({}), self._batch(at.microbatch)
        layers = layers_here(self.assembly.on_stages.layout)[at.chunk]
        return model.context(batch, self._key(at.microbatch), self.inner), layers

    def _model(self, outside: Arrays) -> Any:
        # A model knows no chunks: any one of them.
        first = self.assembly.on_stages.layout.by_chunk
        params = {k: first(p)[0] if k.startswith(PERIOD) else p for k, p in self.params.items()}
        return put_together(self.assembly.split.static, {**params, **outside})

    def _batch(self, microbatch: Any) -> Arrays:
        take = lax.dynamic_index_in_dim
        return {k: take(v, microbatch, 0, keepdims=False) for k, v in self.batch.items()}

    def _key(self, microbatch: Any) -> Any:
        return None if self.key is None else jax.random.fold_in(self.key, microbatch)


def pipeline_sums(
    assembly: Assembly,
    comm: Explicit,
    reduction: Reduction,
    *,
    fill: float = 0.0,
    executor: type[Executor] = Executor,
) -> LocalSums:
    """The shares of a step's sums that a device makes, all microbatches on their way at once. fill,
    executor: as `executor_of` has them."""
    keep = assembly.experiment.execution.pipeline.keeps_residuals
    rows, buffers = training(assembly.on_stages.schedule, keep_residuals=keep)
    run = executor_of(assembly, rows, buffers, fill, executor)
    wide = _wide(assembly, comm)

    def sums(params: Arrays, batch: Arrays, key: Any, scale: jax.Array) -> Gradients:
        found = run(on_device(assembly, comm, params, batch, key, scale, reduction))
        layout = assembly.on_stages.layout
        grads = {PERIOD + k: layout.from_chunks(g) for k, g in found.blocks.items()}
        rest = found.outside
        if reduction.sharded:
            scattered = wide.scatter(rest, "")
            rest = reduction.settle({k: g.astype(params[k].dtype) for k, g in scattered.items()})
        return Gradients(found.loss, found.count, {**grads, **rest}, {})

    return sums


def layers_here(layout: StageLayout) -> jax.Array:
    """[chunks, depth]: which layer is in each slot of this stage, -1 of padding."""
    of_stages = layout.layer_of.reshape(layout.chunks, layout.stages, layout.depth)
    return jnp.asarray(of_stages)[:, lax.axis_index(STAGE)]


def on_device(
    assembly: Assembly,
    comm: Explicit,
    params: Arrays,
    batch: Arrays,
    key: Any,
    scale: jax.Array,
    reduction: Reduction | None,
) -> OnDevice:
    """This device's part of a step. Names of its blocks are without `period.`. reduction: of
    training; None where the tables have no B."""
    blocks, outside = _parted(params)
    wide, inner, loop = _wide(assembly, comm), comm, assembly.loop
    if reduction is not None:
        if assembly.experiment.execution.pipeline.keeps_residuals:
            loop = replace(loop, reshard_after_forward=True)
        if not reduction.sharded:
            inner, blocks = comm.whole(), comm.fetch(blocks, "")
    settle = (lambda g: g) if reduction is None else reduction.settle
    # Of the rows that are here: a batch ramp has more than one number of them.
    shape = activation_share(assembly, *batch["tokens"].shape[1:])
    layout = assembly.on_stages.layout
    return OnDevice(
        DecoderStage(assembly, inner, wide.whole(), params, batch, key, loop, settle),
        {k.removeprefix(PERIOD): layout.by_chunk(p) for k, p in blocks.items()},
        wide.fetch(outside, ""),
        jax.ShapeDtypeStruct(shape, comm.compute_dtype),
        scale,
    )


def evaluated_at_once(assembly: Assembly) -> int:
    """Batches that a call of the evaluation step takes: of a pipeline as many as it has stages, so
    that each of them works for more than half of the time."""
    return 1 if assembly.pipeline is None else assembly.on_stages.layout.stages


def pipeline_loss(assembly: Assembly, comm: Explicit) -> Callable[[Arrays, Arrays, Arrays], Any]:
    """(params, {}, batch [`evaluated_at_once`, rows, ...]) -> (share of loss sum, of the count)."""
    layout = assembly.on_stages.layout
    kind = "interleaved" if layout.chunks > 1 else "one_f_one_b"
    batches = evaluated_at_once(assembly)
    schedule = make_schedule(kind, layout.stages, batches, layout.chunks)
    run = executor_of(assembly, *forward_only(schedule), 0.0)

    def loss(params: Arrays, _: Arrays, batch: Arrays) -> tuple[jax.Array, jax.Array]:
        found = run(on_device(assembly, comm, params, batch, None, jnp.float32(1.0), None))
        return found.loss, found.count

    return loss


def executor_of(
    assembly: Assembly, rows: Any, buffers: Any, fill: float, executor: type[Executor] = Executor
) -> Executor:
    """The executor of these tables; fill: what its buffers hold before anything else; executor: the
    class that follows them."""
    tied = assembly.experiment.model.tied
    outside = [k for k in assembly.places if not k.startswith(PERIOD)]
    entering = tuple(k for k in outside if k.startswith(("embedding", "positions", "prefix.")))
    leaving = tuple(k for k in outside if k not in entering)
    return executor(
        rows=rows,
        buffers=buffers,
        chunks=assembly.on_stages.layout.chunks,
        stage=STAGE,
        axes=tuple(assembly.sizes),
        entering=entering,
        leaving=(*leaving, "embedding") if tied else leaving,
        frozen=assembly.frozen,
        fill=fill,
    )


def _wide(assembly: Assembly, comm: Explicit) -> Explicit:
    """The communicator of what all stages share. Over (tensor, stage) by the compiler's own
    collectives: no ring of links joins the devices of both."""
    collectives = replace(comm.collectives, tensor=Lax())
    return replace(comm, tensor=(*assembly.tensor, STAGE), collectives=collectives)


def _stacked(name: str) -> bool:
    return name.startswith(PERIOD)


def _parted(params: Arrays) -> tuple[Arrays, Arrays]:
    """Those of the pipeline, and those outside it."""
    blocks = {k: p for k, p in params.items() if _stacked(k)}
    return blocks, {k: p for k, p in params.items() if k not in blocks}


def activation_share(assembly: Assembly, rows: int, seq: int) -> tuple[int, int]:
    """Shape of the residual stream on a device of a stage whose part of a microbatch is [rows, seq]
    tokens."""
    return rows * seq // ways(assembly.tensor, assembly.sizes), assembly.experiment.model.embed
