"""Programs that do one kind of a pipeline's work and nothing else, for `bench pipeline` to time.

The step's own executor follows the step's own tables, from which everything else is taken: in a
tick of F there is no B, no embedding and no head. The head is what a step does on stages without
layers; what is done once, the step with ticks that do not run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import PyTree

from jaxtrain.collectives.vary import Index, vary
from jaxtrain.mesh.sharding import STAGE, partition_spec
from jaxtrain.models.stage import ModelStage
from jaxtrain.pipeline.executor import Executor
from jaxtrain.pipeline.schedule import Schedule
from jaxtrain.pipeline.slots import Rows, training
from jaxtrain.pipeline.tick import At, Carry, OnDevice, Trees
from jaxtrain.step.assembly import Assembly
from jaxtrain.step.communicators import explicit_communicator
from jaxtrain.step.pipeline import executor_of, on_device
from jaxtrain.step.train_step import make_reduction

FILL = 1.0
"""What buffers hold. No zeros: on those arithmetic may be none."""

Arrays = dict[str, Any]
WORK = {"F": "forward", "B": "backward", "W": "weight"}


class _Empty(ModelStage):
    """A stage without layers: of a step it leaves what stands before and behind the pipeline."""

    def forward(self, chunk: Arrays, x: jax.Array, at: At) -> jax.Array:
        return x

    def forward_with_residuals(
        self, chunk: Arrays, x: jax.Array, at: At
    ) -> tuple[jax.Array, PyTree]:
        return x, ()

    def backward(
        self, saved: PyTree, chunk: Arrays, dy: jax.Array, at: At
    ) -> tuple[Arrays, jax.Array, PyTree]:
        return {}, dy, ()


def ticks_of(assembly: Assembly, mesh: jax.sharding.Mesh, kind: str) -> Callable[..., jax.Array]:
    """(params, batch, passes) -> an element of everything that was made, [stages, leaves].

    kind: F, B or W of the assembly's schedule: its ticks with that work alone, followed `passes`
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

    def local(params: Arrays, batch: Arrays, passes: Index) -> jax.Array:
        params, batch, scale = jax.tree.map(
            lambda x: vary(x, axes), (params, batch, jnp.float32(1.0))
        )
        given = on_device(assembly, comm, params, batch, None, scale, reduction)
        if kind == "head":
            assert isinstance(given.stage, ModelStage)
            parts = (getattr(given.stage, f.name) for f in fields(given.stage))
            given = given._replace(stage=_Empty(*parts), blocks={})
        carry, trees = run.start(given)
        # XLA knows what a product with ones is, and would not make it.
        carry = lax.optimization_barrier(carry)

        def again(_: Index, carry: Carry) -> Carry:
            return run.follow(carry, trees, given)

        leaves = jax.tree.leaves(lax.fori_loop(0, passes, again, carry))
        # What nobody reads XLA would not make.
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
    """Has ticks and runs none, which a compiler cannot know: it makes every buffer that goes from
    tick to tick."""

    def follow(self, carry: Carry, trees: Trees, given: OnDevice) -> Carry:
        def ticks(carry: Carry) -> Carry:
            return super(_Still, self).follow(carry, trees, given)

        weight = jax.tree.leaves(given.blocks)[0]
        nan = jnp.isnan(weight[(0,) * weight.ndim]).astype(jnp.int32)
        # All devices would run them or none: there are collectives in them.
        return lax.cond(lax.pmin(nan, self.axes) > 0, ticks, lambda carry: carry, carry)


def without_ticks(assembly: Assembly) -> Assembly:
    """An assembly whose step has its ticks in the program and does not run them: it makes what goes
    from tick to tick, reduces gradients (zeros) and updates the state."""
    return replace(assembly, pipeline=assembly.on_stages._replace(executor=_Still))


def only(rows: Rows, kind: str) -> Rows:
    """The ticks that have a work of the kind F, B or W, and of them nothing else."""
    mine = WORK[kind]
    ticks = np.any(getattr(rows, mine) >= 0, axis=1)
    found = Rows(*(table[ticks] for table in rows))
    return without(found, *({*WORK.values(), "enter", "leave", "exit"} - {mine}))


def without(rows: Rows, *names: str) -> Rows:
    return rows._replace(**{name: np.full_like(getattr(rows, name), -1) for name in names})


def runs_of(schedule: Schedule, kind: str) -> int:
    """How often one pass of `ticks_of` does its work."""
    if kind == "head":
        return schedule.microbatches
    return int((schedule.tables[kind] >= 0).any(1).sum())
