"""Programs that do one kind of a pipeline's work and nothing else, for `bench pipeline` to time.

The step's own executor follows the step's own tables, from which everything else is taken: in a
tick of F there is no B, no embedding and no head. The head is what a step does on stages without
layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxtrain.collectives.vary import vary
from jaxtrain.mesh.sharding import STAGE, partition_spec
from jaxtrain.pipeline.schedule import Schedule
from jaxtrain.pipeline.slots import Rows, training
from jaxtrain.pipeline.tick import At
from jaxtrain.train.assembly import Assembly
from jaxtrain.train.pipelined import DecoderStage, executor_of, on_device
from jaxtrain.train.step import explicit_communicator, make_reduction

FILL = 1.0
"""What buffers hold. No zeros: on those arithmetic may be none."""

Arrays = dict[str, Any]
WORK = {"F": "forward", "B": "backward", "W": "weight"}


class _Empty(DecoderStage):
    """A stage without layers: of a step it leaves what stands before and behind the pipeline."""

    def forward(self, chunk: Arrays, x: jax.Array, at: At) -> jax.Array:
        return x

    def linearised(self, chunk: Arrays, x: jax.Array, at: At) -> tuple[jax.Array, Any]:
        return x, ()

    def pulled_back(
        self, saved: Any, chunk: Arrays, dy: jax.Array, at: At
    ) -> tuple[Arrays, jax.Array, Any]:
        return {}, dy, ()


def ticks_of(assembly: Assembly, mesh: jax.sharding.Mesh, kind: str) -> Callable[..., jax.Array]:
    """(params, batch, passes) -> an element of everything that was made, [stages, leaves].

    kind: F, B or W of the assembly's schedule: its ticks with that work alone, followed `passes`
    times; or `head`: the whole schedule, on stages without layers.
    """
    rows, buffers = training(assembly.on_stages.schedule, keep_residuals=False)
    run = executor_of(assembly, rows if kind == "head" else only(rows, kind), buffers, FILL)
    reduction = make_reduction(assembly)
    comm = explicit_communicator(assembly, reduction)
    axes = tuple(assembly.sizes)

    def local(params: Arrays, batch: Arrays, passes: Any) -> jax.Array:
        params, batch, scale = jax.tree.map(
            lambda x: vary(x, axes), (params, batch, jnp.float32(1.0))
        )
        stage, blocks, outside, x = on_device(assembly, comm, reduction, params, batch, None)
        if kind == "head":
            stage, blocks = _Empty(*(getattr(stage, f.name) for f in fields(stage))), {}
        carry, trees = run.start(stage, blocks, outside, x)
        # XLA knows what a product with ones is, and would not make it.
        carry = lax.optimization_barrier(carry)

        def again(_: Any, carry: Any) -> Any:
            return run.follow(carry, trees, stage, blocks, outside, scale)

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


def only(rows: Rows, kind: str) -> Rows:
    """The ticks that have a work of the kind F, B or W, and of them nothing else."""
    mine = WORK[kind]
    ticks = np.any(getattr(rows, mine) >= 0, axis=1)
    found = Rows(*(table[ticks] for table in rows))
    others = [name for name in (*WORK.values(), "enter", "leave", "exit") if name != mine]
    return found._replace(**{name: np.full_like(getattr(found, name), -1) for name in others})


def runs_of(schedule: Schedule, kind: str) -> int:
    """How often one pass of `ticks_of` does its work."""
    if kind == "head":
        return schedule.microbatches
    return int((schedule.tables[kind] >= 0).any(1).sum())
