"""Programs that do one kind of a pipeline's work and nothing else, for `bench pipeline` to time.

The step's own executor follows the step's own tables, without all other work: a tick of F has no B,
no embedding and no head. The head is a step on stages without layers; work done once is the step
with ticks that do not run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import PyTree

from jaxtrain.arrays import Leaves
from jaxtrain.collectives.vary import Index, vary
from jaxtrain.mesh.axes import STAGE
from jaxtrain.mesh.sharding import partition_spec
from jaxtrain.models.stage import ModelStage
from jaxtrain.pipeline.executor import Executor
from jaxtrain.pipeline.schedule import Schedule
from jaxtrain.pipeline.slots import SlotTables, training
from jaxtrain.pipeline.tick import Carry, OnDevice, StageWork, Trees
from jaxtrain.step.assembly import Assembly
from jaxtrain.step.communicators import explicit_communicator
from jaxtrain.step.mean_gradients import make_reduction
from jaxtrain.step.pipeline import executor_of, on_device

FILL = 1.0
"""Value of buffers, not zero: arithmetic on zeros may be skipped."""

WORK = {"F": "forward", "B": "backward", "W": "weight"}


class _Empty(ModelStage):
    """A stage without layers: only the work before and behind the pipeline remains of a step."""

    def forward(self, chunk: Leaves, x: jax.Array, work: StageWork) -> jax.Array:
        return x

    def forward_with_residuals(
        self, chunk: Leaves, x: jax.Array, work: StageWork
    ) -> tuple[jax.Array, PyTree]:
        return x, ()

    def backward(
        self, saved: PyTree, chunk: Leaves, dy: jax.Array, work: StageWork
    ) -> tuple[Leaves, jax.Array, PyTree]:
        return {}, dy, ()


def ticks_of(assembly: Assembly, mesh: jax.sharding.Mesh, kind: str) -> Callable[..., jax.Array]:
    """Returns (params, batch, passes) -> an element of every result, [stages, leaves].

    kind: F, B or W of the assembly's schedule: its ticks with that work alone, repeated `passes`
    times; or `head`: the whole schedule, on stages without layers that send nothing.
    """
    rows, buffers = training(assembly.on_stages.schedule, keep_residuals=False)
    if kind == "head":
        rows = without(rows, "receive_input", "receive_cotangent")  # F's and B's
    else:
        rows = only(rows, kind)
    run = replace(executor_of(assembly, rows, buffers), fill=FILL)
    reduction = make_reduction(assembly)
    comm = explicit_communicator(assembly, reduction)
    axes = tuple(assembly.sizes)

    def local(params: Leaves, batch: Leaves, passes: Index) -> jax.Array:
        params, batch, scale = jax.tree.map(
            lambda x: vary(x, axes), (params, batch, jnp.float32(1.0))
        )
        inputs = on_device(assembly, comm, params, batch, None, scale, reduction)
        if kind == "head":
            assert isinstance(inputs.stage, ModelStage)
            parts = (getattr(inputs.stage, f.name) for f in fields(inputs.stage))
            inputs = inputs._replace(stage=_Empty(*parts), blocks={})
        carry, trees = run.start(inputs)
        # XLA would simplify a product with ones.
        carry = lax.optimization_barrier(carry)

        def again(_: Index, carry: Carry) -> Carry:
            return run.follow(carry, trees, inputs)

        leaves = jax.tree.leaves(lax.fori_loop(0, passes, again, carry))
        # XLA would remove results that nobody reads.
        return jnp.stack([leaf[(0,) * leaf.ndim].astype(jnp.float32) for leaf in leaves])[None]

    specs = {name: partition_spec(place.params) for name, place in assembly.places.items()}
    program = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(specs, assembly.batch_specs, partition_spec(())),
        out_specs=partition_spec(((STAGE,),)),
        check_vma=assembly.check_vma,
    )
    return assembly.with_matmul_precision(program)


@dataclass(frozen=True, kw_only=True)
class _Still(Executor):
    """Has ticks in the program and runs none, which the compiler cannot know: it makes every buffer
    that goes from tick to tick."""

    def follow(self, carry: Carry, trees: Trees, device: OnDevice) -> Carry:
        def ticks(carry: Carry) -> Carry:
            return super(_Still, self).follow(carry, trees, device)

        weight = jax.tree.leaves(device.blocks)[0]
        nan = jnp.isnan(weight[(0,) * weight.ndim]).astype(jnp.int32)
        # All devices run them or none, since they contain collectives.
        return lax.cond(lax.pmin(nan, self.axes) > 0, ticks, lambda carry: carry, carry)


def without_ticks(assembly: Assembly) -> Assembly:
    """Returns an assembly whose step has its ticks in the program and does not run them: it makes
    the buffers between ticks, reduces gradients (zeros) and updates the state."""
    return replace(assembly, pipeline=assembly.on_stages._replace(executor=_Still))


def only(rows: SlotTables, kind: str) -> SlotTables:
    """Returns the ticks with a work of kind F, B or W, and nothing else of them."""
    field = WORK[kind]
    ticks = np.any(getattr(rows, field) >= 0, axis=1)
    selected = SlotTables(*(table[ticks] for table in rows))
    return without(selected, *({*WORK.values(), "enter", "leave", "exit"} - {field}))


def without(rows: SlotTables, *names: str) -> SlotTables:
    return rows._replace(**{name: np.full_like(getattr(rows, name), -1) for name in names})


def runs_of(schedule: Schedule, kind: str) -> int:
    """Returns how often one pass of `ticks_of` does its work."""
    if kind == "head":
        return schedule.microbatches
    return int((schedule.tables[kind] >= 0).any(1).sum())
