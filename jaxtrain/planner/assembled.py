"""Reads from an assembled decoder the facts from which its step is predicted."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxtrain.collectives.hierarchical import Hierarchical
from jaxtrain.collectives.lax_form import Lax
from jaxtrain.collectives.recursive import Recursive
from jaxtrain.collectives.ring import Ring
from jaxtrain.collectives.rounded import Rounded
from jaxtrain.collectives.rows import Ragged
from jaxtrain.compression.compressed import Compressed
from jaxtrain.compression.powersgd import PowerSGD
from jaxtrain.compression.residuals import CompressedLeaf
from jaxtrain.compression.sums import Choice
from jaxtrain.context.methods import GatheredKeys
from jaxtrain.losses.cross_entropy import chunk_count
from jaxtrain.mesh.axes import STACKING_AXES, STAGE
from jaxtrain.mesh.sharding import Leaf, ways
from jaxtrain.models.buffers import without_buffers
from jaxtrain.models.description import STACK
from jaxtrain.optim.adafactor import factored
from jaxtrain.optim.leaves import hidden_matrices, leaf_dims
from jaxtrain.optim.optimizer import ELEMENTWISE, SHARDED, Adafactor, Lamb, Lars, Muon
from jaxtrain.pipeline.analysis import Span
from jaxtrain.pipeline.slots import SlotTables, training
from jaxtrain.planner.facts import (
    Algorithms,
    LeafFacts,
    LeafSumFacts,
    LoopFacts,
    OptimizerFacts,
    PipelineFacts,
    SequenceFacts,
    StepFacts,
    SumFacts,
)
from jaxtrain.quantization.recipe import Products
from jaxtrain.step.assembly import Assembly
from jaxtrain.step.running_kernels import local_rows


def steady(assembly: Assembly) -> Choice:
    """The program of a run's last steps: with exact or compressed sums, without measurements."""
    e = assembly.experiment
    reducer = e.execution.reducer
    return Choice(reducer.at(e.steps - 1)) if isinstance(reducer, Compressed) else Choice()


def why_not_predicted(assembly: Assembly) -> str | None:
    """Returns the reason why an assembly's collectives are not predicted; None if they are."""
    if not assembly.explicit or assembly.description is None:
        return (
            "only the explicit step of a model that describes itself states its collectives; under "
            "gspmd, and on one device, there is nothing to hold a program to"
        )
    optimizer = assembly.experiment.optimizer
    if not isinstance(optimizer, (*ELEMENTWISE, *SHARDED)):
        return f"what an optimizer of your own sends, {type(optimizer).__name__}, is not known here"
    if assembly.frozen and _splits_backward(assembly):
        return (
            "with frozen leaves a schedule that has W gathers for some products of a layer and not "
            "for others, which is not predicted"
        )
    if assembly.buffers.scales & assembly.frozen:
        return (
            "with delayed scales and a stack below which nothing is trained, its products have "
            "scales of the moment, and what they send beside others is not predicted"
        )
    entering = {k for k in assembly.places if assembly.described.enters(k)}
    partly = entering & assembly.frozen and entering - assembly.frozen
    if assembly.pipeline is not None and assembly.described.prefix and partly:
        return "what a pipeline with frozen leaves before it sends there is not predicted"
    trained, described = assembly.places.keys() - assembly.frozen, assembly.described
    if described.stream and not described.all_members_have_gradients(trained):
        return (
            "some members of the stream have no gradient before the stack, and what is sent for "
            "the others is not predicted"
        )
    loop = assembly.loop
    if assembly.pipeline is None and (loop.unroll or loop.prefetch) and described.leaves_unread:
        return (
            "the last layer computes values of the stream that nothing reads, which a compiler "
            "leaves out, and what is sent without them is not predicted"
        )
    return None


def facts_of(assembly: Assembly) -> StepFacts:
    """Returns the facts of an assembly from which its step is predicted."""
    e, loop, model = assembly.experiment, assembly.loop, assembly.described
    updated = without_buffers(assembly.places, assembly.buffers)
    rows, seq = local_rows(assembly)
    leaves = {
        path: LeafFacts(
            shape=place.shape,
            dtype=place.dtype,
            params=place.params,
            optimizer=place.optimizer,
            in_use=place.in_use,
            stacked=sum(axis in STACKING_AXES for axis in place.axes),
            trained=place.trained,
        )
        for path, place in assembly.places.items()
    }
    return StepFacts(
        sizes=assembly.sizes,
        roles=assembly.roles,
        tokens=rows * seq,
        chunks=chunk_count(rows * seq, rows, assembly.chunk_tokens),
        microbatches=e.microbatches,
        leaves=leaves,
        model=model,
        loop=LoopFacts(
            loop.unroll,
            loop.remat,
            loop.prefetch and not _splits_backward(assembly),
            loop.reshard_after_forward or _keeps_residuals(assembly) or _splits_backward(assembly),
            assembly.pipeline is None,
            e.execution.expert_chunk,
        ),
        compute=jnp.dtype(e.precision.compute).name,
        reduce=jnp.dtype(e.precision.reduce).name,
        sharded=e.sharding.accumulate_sharded,
        sums=_sum_facts(assembly),
        optimizer=_optimizer_facts(e.optimizer, {k: p for k, p in updated.items() if p.trained}),
        algorithms=_algorithms(assembly),
        scaling=_scaling(e.precision.products),
        pipeline=None if assembly.pipeline is None else _pipeline_facts(assembly),
    )


def _sequence_facts(assembly: Assembly) -> SequenceFacts | None:
    method = assembly.context
    if method is None:
        return None
    cut = ways(assembly.roles.seq, assembly.sizes)
    group = method.trading(cut)
    return SequenceFacts(
        assembly.roles.seq,
        local_rows(assembly)[1],
        cut // group,
        group,
        method.order(cut).zigzag,
        isinstance(method, GatheredKeys),
    )


def _scaling(products: Products | None) -> str | None:
    """`StepFacts.scaling` of a recipe for products in 8 bits."""
    if products is None:
        return None
    return "current" if products.scaling is None else "delayed"


def _algorithms(assembly: Assembly) -> Algorithms:
    chosen, rows = assembly.collectives, assembly.collectives.experts
    return Algorithms(
        algorithm_name(chosen.fsdp),
        algorithm_name(chosen.tensor),
        algorithm_name(chosen.scatters),
        tiled=isinstance(chosen.weight_gradients, Ring),
        experts="ragged" if isinstance(rows, Ragged) else algorithm_name(rows.by),
        context=_sequence_facts(assembly),
    )


def _keeps_residuals(assembly: Assembly) -> bool:
    """True if F keeps what B needs, in a pipeline; it never keeps gathered weights."""
    keeps = assembly.experiment.execution.pipeline.keeps_residuals
    return assembly.pipeline is not None and keeps


def _splits_backward(assembly: Assembly) -> bool:
    """True if the schedule splits the backward pass into B and W. Its loop over layers neither
    prefetches nor keeps weights."""
    return assembly.pipeline is not None and assembly.pipeline.schedule.weight is not None


def pipeline_tables(assembly: Assembly) -> tuple[SlotTables, list[Span]]:
    """The tables that a pipeline's step follows, and the loops it runs them in."""
    rows, _ = training(assembly.on_stages.schedule, keep_residuals=_keeps_residuals(assembly))
    return rows, rows.spans


def _tallied(assembly: Assembly) -> int:
    counted = {k: p for k, p in assembly.places.items() if k in assembly.buffers.tallies}
    stacked = (place for k, place in counted.items() if k.startswith(STACK))
    return sum(math.prod(place.shape) for place in stacked)


def _pipeline_facts(assembly: Assembly) -> PipelineFacts:
    rows, loops = pipeline_tables(assembly)
    _, buffers = training(assembly.on_stages.schedule, keep_residuals=_keeps_residuals(assembly))

    def ticks(kind: str, received: np.ndarray | None = None) -> int:
        """Returns the number of ticks of loops with a pass of that kind. received: counts only
        loops in which some stage receives."""
        return sum(
            loop.stop - loop.start
            for loop in loops
            if kind in loop.kinds
            and (received is None or (received[loop.start : loop.stop] >= 0).any())
        )

    layout = assembly.on_stages.layout
    return PipelineFacts(
        axis=STAGE,
        forward=ticks("F"),
        backward=ticks("B"),
        weight=ticks("W"),
        sent_on=ticks("F", rows.receive_input),
        sent_back=ticks("B", rows.receive_cotangent),
        chunks=layout.chunks,
        depth=layout.depth,
        keeps_residuals=_keeps_residuals(assembly),
        late_head=buffers.late_head,
        ends_alone=loops[-1].stop - loops[-1].start == 1,
        tallied=_tallied(assembly),
    )


def _sum_facts(assembly: Assembly) -> SumFacts:
    execution = assembly.experiment.execution
    reducer = execution.reducer
    exact = reducer.by if isinstance(reducer, Compressed) else reducer
    slow, fast = exact, None
    if isinstance(exact, Rounded):
        slow = exact.by
    if isinstance(exact, Hierarchical):
        slow, fast = exact.slow, algorithm_name(exact.fast)
    choice = steady(assembly)
    parts = {k: part for k, part in assembly.parts.items() if part.takes(choice.codec)}
    low_rank = isinstance(choice.codec, PowerSGD)
    return SumFacts(
        algorithm_name(slow),
        fast,
        execution.small_leaf,
        execution.reduce_layers,
        rounded=isinstance(exact, Rounded),
        apart=frozenset(assembly.parts),
        encoded={} if low_rank else {k: _tile_bytes(p, choice.codec) for k, p in parts.items()},
        factors={k: _factor_sizes(p, choice.codec) for k, p in parts.items()} if low_rank else {},
    )


def _tile_bytes(part: CompressedLeaf, codec: Any) -> int:
    return codec.payload_bytes(math.ceil(math.prod(part.shape) / ways(part.summed, part.sizes)))


def _factor_sizes(part: CompressedLeaf, codec: PowerSGD) -> tuple[int, int]:
    stack, rows, cols = part.matrices
    return stack * rows * codec.rank, stack * cols * codec.rank


def _optimizer_facts(optimizer: Any, places: Mapping[str, Leaf]) -> OptimizerFacts:
    """Returns the cross-device sums in each optimizer's equations, in their order."""
    dims = {k: leaf_dims(place.axes) for k, place in places.items()}
    layers = {k: (*d.rows, *d.columns) for k, d in dims.items()}
    if isinstance(optimizer, Muon):
        inner = {k: dims[k].stacked for k, p in places.items() if hidden_matrices(p.axes)}
        return OptimizerFacts((), inner)
    if isinstance(optimizer, (Lamb, Lars)):
        norms = tuple(
            LeafSumFacts(k, layers[k]) for k, p in places.items() if optimizer.adapt(p.axes)
        )
        return OptimizerFacts((("norms of parameters and updates", norms * 2),))
    if isinstance(optimizer, Adafactor):
        smallest = optimizer.min_dim_size_to_factor
        split = [k for k, p in places.items() if factored(p.shape, p.axes, smallest)]
        moments = tuple(LeafSumFacts(k, dims[k].columns) for k in split)
        moments += tuple(LeafSumFacts(k, dims[k].rows) for k in split)
        of_rows = tuple(LeafSumFacts(k, dims[k].rows, dims[k].columns) for k in split)
        every = tuple(LeafSumFacts(k, layers[k]) for k in places)
        sums = [("second moments", moments), ("means of row moments", of_rows)]
        if optimizer.clipping_threshold is not None:
            sums.append(("RMS of updates", every))
        if optimizer.relative:
            sums.append(("RMS of parameters", every))
        return OptimizerFacts(tuple(sums))
    return OptimizerFacts()


def algorithm_name(algorithm: Any) -> str:
    """Returns the name in `collectives.cost.steps.SCHEDULES` of an algorithm. Raises ValueError for
    an algorithm that is not there."""
    if isinstance(algorithm, Ring):
        return f"ring_{algorithm.directions}{'' if algorithm.unroll else '_looped'}"
    if isinstance(algorithm, Lax | Recursive):
        return "lax" if isinstance(algorithm, Lax) else "recursive"
    raise ValueError(
        f"{algorithm!r} is no algorithm whose steps are known; use Lax(), Ring() or Recursive()"
    )
