"""The sums of a step or an evaluation of a model on a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.arrays import Leaves
from jaxtrain.collectives.lax_form import Lax
from jaxtrain.losses.cross_entropy import LossSums
from jaxtrain.mesh.axes import STAGE
from jaxtrain.mesh.sharding import ways
from jaxtrain.models.description import STACK
from jaxtrain.models.stage import ModelStage, stream_share
from jaxtrain.nn.explicit import Explicit
from jaxtrain.pipeline.executor import Executor
from jaxtrain.pipeline.schedule import make_schedule
from jaxtrain.pipeline.slots import SlotTables, StageBuffers, forward_only, training
from jaxtrain.pipeline.tick import OnDevice
from jaxtrain.step.assembly import Assembly
from jaxtrain.step.gradients import Gradients, LocalSums, Reduction


def pipeline_sums(assembly: Assembly, comm: Explicit, reduction: Reduction) -> LocalSums:
    """A device's shares of a step's sums, with all microbatches in the pipeline at once."""
    keep = assembly.experiment.execution.pipeline.keeps_residuals
    rows, buffers = training(assembly.on_stages.schedule, keep_residuals=keep)
    run = executor_of(assembly, rows, buffers)
    wide = _wide(assembly, comm)

    def sums(params: Leaves, batch: Leaves, key: Any, scale: jax.Array) -> Gradients:
        summed = run(on_device(assembly, comm, params, batch, key, scale, reduction))
        layout = assembly.on_stages.layout
        grads = {STACK + k: layout.from_chunks(g) for k, g in summed.blocks.items()}
        outside = summed.outside
        if reduction.sharded:
            scattered = wide.scatter(outside, "")
            outside = reduction.reduce_microbatch(
                {k: g.astype(params[k].dtype) for k, g in scattered.items()}
            )
        return Gradients(summed.sums, {**grads, **outside}, {})

    return sums


def on_device(
    assembly: Assembly,
    comm: Explicit,
    params: Leaves,
    batch: Leaves,
    key: Any,
    scale: jax.Array,
    reduction: Reduction | None,
) -> OnDevice:
    """A device's part of a step. Names of its blocks are without `period.`. reduction: of training;
    None if the tables have no B."""
    blocks, outside = _stack_and_outside(params)
    wide, inner, loop = _wide(assembly, comm), comm, assembly.loop
    if reduction is not None:
        if assembly.experiment.execution.pipeline.keeps_residuals:
            loop = replace(loop, reshard_after_forward=True)
        if not reduction.sharded:
            inner, blocks = comm.pregathered(), comm.fetch_once(blocks)
    reduce_microbatch = (lambda g: g) if reduction is None else reduction.reduce_microbatch
    # From this batch's rows: their number changes in a batch ramp.
    tokens = batch[assembly.described.tokens][0].size // ways(comm.roles.stream, assembly.sizes)
    layout = assembly.on_stages.layout
    stage = ModelStage(
        static=assembly.split.static,
        described=assembly.described,
        layout=layout,
        split=assembly.on_stages.schedule.weight is not None,
        inner=inner,
        wide=wide.pregathered(),
        params=params,
        batch=batch,
        key=key,
        loop=loop,
        reduce_microbatch=reduce_microbatch,
    )
    return OnDevice(
        stage=stage,
        blocks={k.removeprefix(STACK): layout.by_chunk(p) for k, p in blocks.items()},
        outside=wide.fetch_once(outside),
        x=stream_share(assembly.described, tokens, comm.compute_dtype),
        scale=scale,
    )


def evaluated_at_once(assembly: Assembly) -> int:
    """Batches of one call of the evaluation step. A pipeline takes as many as it has stages, so
    that each stage works for more than half of the time."""
    return 1 if assembly.pipeline is None else assembly.on_stages.layout.stages


def pipeline_loss(
    assembly: Assembly, comm: Explicit
) -> Callable[[Leaves, Leaves, Leaves], LossSums]:
    """(params, {}, batch [`evaluated_at_once`, rows, ...]) -> shares of the sums."""
    layout = assembly.on_stages.layout
    kind = "interleaved" if layout.chunks > 1 else "one_f_one_b"
    batches = evaluated_at_once(assembly)
    schedule = make_schedule(kind, layout.stages, batches, layout.chunks)
    run = executor_of(assembly, *forward_only(schedule))

    def loss(params: Leaves, _: Leaves, batch: Leaves) -> LossSums:
        return run(on_device(assembly, comm, params, batch, None, jnp.float32(1.0), None)).sums

    return loss


def executor_of(assembly: Assembly, rows: SlotTables, buffers: StageBuffers) -> Executor:
    """Returns the executor of these tables."""
    described = assembly.described
    outside = [k for k in assembly.places if not k.startswith(STACK)]
    entering = tuple(k for k in outside if described.enters(k))
    leaving = tuple(k for k in outside if k not in entering)
    return assembly.on_stages.executor(
        rows=rows,
        buffers=buffers,
        chunks=assembly.on_stages.layout.chunks,
        stage=STAGE,
        axes=tuple(assembly.sizes),
        entering=entering,
        leaving=(*leaving, *described.tied),
        frozen=assembly.frozen,
        sum_names=described.sums,
    )


def _wide(assembly: Assembly, comm: Explicit) -> Explicit:
    """The communicator for operations that all stages share. Over (tensor, stage) it uses the
    compiler's collectives: no ring of links joins the devices of both."""
    collectives = replace(comm.collectives, tensor=Lax())
    return replace(comm, roles=comm.roles.outside_stack(), collectives=collectives)


def _stack_and_outside(params: Leaves) -> tuple[Leaves, Leaves]:
    """Divides parameters into those of the pipeline and those outside it."""
    blocks = {k: p for k, p in params.items() if k.startswith(STACK)}
    return blocks, {k: p for k, p in params.items() if k not in blocks}
