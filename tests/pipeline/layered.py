"""A pipeline stage of a few lines, and the same model as a dense function of one device.

Embedding rows and output columns are split over the stages, as a decoder's vocabulary is, so that
`enter`, `leave` and `exit` hold collectives. What a layer does depends on the microbatch and on its
chunk: a stage that is told a wrong one gives another loss.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxtrain.collectives.vary import vary
from jaxtrain.losses.cross_entropy import LossSums
from jaxtrain.pipeline.executor import Executor, Sums
from jaxtrain.pipeline.layout import StageLayout
from jaxtrain.pipeline.schedule import Schedule
from jaxtrain.pipeline.slots import forward_only, training
from jaxtrain.pipeline.tick import OnDevice, StageWork

EMBED, VOCAB = 8, 16
STAGE = "stage"


@jax.custom_vjp
def summed(x: jax.Array) -> jax.Array:
    """The sum over stages of a value that each has a part of; so is its gradient."""
    return vary(lax.psum(x, STAGE), (STAGE,))


summed.defvjp(lambda x: (summed(x), None), lambda _, dy: (summed(dy),))


def products(stash: Any) -> dict[str, jax.Array]:
    return {"w": jnp.stack([x.T @ dz for x, dz in zip(stash["x"], stash["dz"], strict=True)])}


def unseen(what: str) -> None:
    """Stands where a test counts how often `what` runs."""


def silent(x: jax.Array) -> jax.Array:
    """Stands where a layer's collectives would."""
    return x


def round_trip(x: jax.Array) -> jax.Array:
    """x, after it has been on every stage: a loop of collectives, as one over layers may be."""
    n = lax.axis_size(STAGE)
    pairs = [(i, (i + 1) % n) for i in range(n)]
    return lax.fori_loop(0, n, lambda _, x: lax.ppermute(x, STAGE, pairs), x)


@dataclass(frozen=True, eq=False)
class Layers:
    """A `Stage`: x -> tanh(x @ w + b) * factor in each layer. later: B leaves the gradients of w
    to W, and of b makes them. talk: what F, B and W send."""

    batch: dict[str, jax.Array]
    stages: int
    later: bool
    seen: Callable[[str], None] = unseen
    talk: Callable[[jax.Array], jax.Array] = silent

    def enter(self, outside: Any, microbatch: Any) -> jax.Array:
        rows = VOCAB // self.stages
        local = self.batch["tokens"][microbatch] - lax.axis_index(STAGE) * rows
        mine = (local >= 0) & (local < rows)

        @jax.custom_vjp
        def looked_up(table: jax.Array) -> jax.Array:
            self.seen("enter")
            return part(table)

        def part(table: jax.Array) -> jax.Array:
            return jnp.where(mine[:, None], table[jnp.where(mine, local, 0)], 0.0)

        def pull_back(table: jax.Array, dx: jax.Array) -> tuple[jax.Array]:
            self.seen("exit")
            return jax.vjp(part, table)[1](dx)

        looked_up.defvjp(lambda table: (part(table), table), pull_back)
        return summed(looked_up(outside["table"])) + outside["shift"]

    def leave(self, outside: Any, y: jax.Array, microbatch: Any) -> LossSums:
        self.seen("leave")
        columns = EMBED // self.stages
        first = lax.axis_index(STAGE) * columns
        due = lax.dynamic_slice_in_dim(self.batch["due"][microbatch], first, columns, 1)
        # The embedding's first rows again, as where weights are tied.
        found = summed(y) @ outside["head"] + outside["table"][:columns].sum(1)[None]
        weights = self.batch["weights"][microbatch]
        share = jnp.where(lax.axis_index(STAGE) == 0, weights.sum(), 0.0)
        return LossSums(jnp.sum(weights[:, None] * (found - due) ** 2), share)

    def forward(self, chunk: Any, x: jax.Array, work: StageWork) -> jax.Array:
        self.seen("forward")
        return self._through(chunk, x, work)[0]

    def forward_with_residuals(
        self, chunk: Any, x: jax.Array, work: StageWork
    ) -> tuple[jax.Array, Any]:
        self.seen("forward_with_residuals")
        return self._through(chunk, x, work)

    def backward(
        self, saved: Any, chunk: Any, dy: jax.Array, work: StageWork
    ) -> tuple[Any, jax.Array, Any]:
        self.seen("backward")
        layers, dz = len(chunk["w"]), []
        for layer in reversed(range(layers)):
            factor = self._factor(work, saved["number"][layer])
            dz.append(self.talk(dy * factor * (1 - saved["out"][layer] ** 2)))
            dy = dz[-1] @ chunk["w"][layer].T
        stash = {"x": saved["x"], "dz": jnp.stack(dz[::-1])}
        grads = {"b": self.talk(stash["dz"].sum(1))}
        if self.later:
            return grads, dy, stash
        return {**grads, **products(stash)}, dy, ()

    def weight_gradients(self, stash: Any, chunk: Any, work: StageWork) -> Any:
        self.seen("weight_gradients")
        return products({**stash, "dz": self.talk(stash["dz"])})

    def _through(self, chunk: Any, x: jax.Array, work: StageWork) -> tuple[jax.Array, Any]:
        x, saved = self.talk(x), []
        for layer in range(len(chunk["w"])):
            number = jnp.int32(layer + 1)
            out = jnp.tanh(x @ chunk["w"][layer] + chunk["b"][layer][None])
            saved.append({"x": x, "out": out, "number": number})
            x = out * self._factor(work, number)
        return x, jax.tree.map(lambda *leaves: jnp.stack(leaves), *saved)

    def _factor(self, work: StageWork, number: jax.Array) -> jax.Array:
        return self.batch["factor"][work.microbatch, work.chunk, number - 1]


@dataclass(frozen=True, eq=False)
class Problem:
    """Numbers of a model of stages x chunks x depth layers, and a batch."""

    schedule: Schedule
    depth: int = 1
    tokens: int = 3

    @property
    def layout(self) -> StageLayout:
        size = self.schedule
        return StageLayout(size.stages * size.chunks * self.depth, size.stages, size.chunks)

    def numbers(self) -> tuple[Any, Any, Any]:
        """(layers in natural order, parameters outside the pipeline, batch)"""
        rng, layers = np.random.default_rng(0), self.layout.layers
        normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
        blocks = {"w": normal(layers, EMBED, EMBED) * EMBED**-0.5, "b": normal(layers, EMBED)}
        outside = {"table": normal(VOCAB, EMBED), "shift": normal(1, EMBED)}
        outside["head"] = normal(EMBED, EMBED)
        count, chunks = self.schedule.microbatches, self.schedule.chunks
        batch = {
            "tokens": jnp.asarray(rng.integers(0, VOCAB, (count, self.tokens))),
            "due": normal(count, self.tokens, EMBED),
            "weights": jnp.asarray(rng.integers(1, 4, (count, self.tokens)), jnp.float32),
            "factor": jnp.asarray(rng.uniform(0.5, 1.5, (count, chunks, self.depth)), jnp.float32),
        }
        return blocks, outside, batch

    def dense(self, blocks: Any, outside: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
        """(loss, count) with no pipeline."""
        size = self.schedule
        # Columns of a stage meet the first rows of its part of the table.
        rows, columns = VOCAB // size.stages, EMBED // size.stages
        tied = np.concatenate([np.arange(columns) + s * rows for s in range(size.stages)])

        def one(batch: Any) -> jax.Array:
            x = outside["table"][batch["tokens"]] + outside["shift"]
            for layer in range(self.layout.layers):
                position, number = divmod(layer, self.depth)
                factor = batch["factor"][position // size.stages, number]
                x = jnp.tanh(x @ blocks["w"][layer] + blocks["b"][layer][None]) * factor
            found = x @ outside["head"] + outside["table"][tied].sum(1)[None]
            return jnp.sum(batch["weights"][:, None] * (found - batch["due"]) ** 2)

        return jax.vmap(one)(batch).sum(), batch["weights"].sum()

    def reference(self, scale: float) -> Sums:
        blocks, outside, batch = self.numbers()

        def scaled(blocks: Any, outside: Any) -> Any:
            loss, count = self.dense(blocks, outside, batch)
            return loss * scale, (loss, count)

        grads, found = jax.jit(jax.grad(scaled, argnums=(0, 1), has_aux=True))(blocks, outside)
        return Sums(LossSums(*found), *grads)

    def piped(
        self, *, save: bool = False, check_vma: bool = True, only_forward: bool = False, **more: Any
    ) -> tuple[Callable[..., Sums], tuple[Any, ...]]:
        """A function of (fill, scale, blocks, outside, batch), and the last three: gradients come
        back in natural order, all shares added up."""
        layout, stages = self.layout, self.schedule.stages
        later = self.schedule.weight is not None
        if only_forward:
            rows, buffers = forward_only(self.schedule)
        else:
            rows, buffers = training(self.schedule, keep_residuals=save)
        lead = P(None, STAGE) if layout.chunks > 1 else P(STAGE)
        split = {"table": P(STAGE), "shift": P(), "head": P(None, STAGE)}

        def on_device(fill: Any, scale: Any, blocks: Any, outside: Any, batch: Any) -> Sums:
            fill, scale, blocks, outside, batch = jax.tree.map(
                lambda leaf: vary(leaf, (STAGE,)), (fill, scale, blocks, outside, batch)
            )
            run = Executor(
                rows=rows,
                buffers=buffers,
                chunks=layout.chunks,
                stage=STAGE,
                axes=(STAGE,),
                entering=("table", "shift"),
                leaving=("head", "table"),
                fill=fill,
            )
            if layout.chunks == 1:
                blocks = {k: leaf[None] for k, leaf in blocks.items()}
            x = jax.ShapeDtypeStruct((self.tokens, EMBED), jnp.float32)
            found = run(OnDevice(Layers(batch, stages, later, **more), blocks, outside, x, scale))
            if layout.chunks == 1:
                found = found._replace(blocks={k: leaf[0] for k, leaf in found.blocks.items()})
            total = lax.psum(found.sums, STAGE)
            rest = dict(found.outside)
            if rest:
                rest["shift"] = lax.psum(rest["shift"], STAGE)
            return found._replace(sums=total, outside=rest)

        of_blocks = {k: lead for k in ("w", "b")} if not only_forward else {}
        out = Sums(P(), of_blocks, split if not only_forward else {})
        mapped = jax.shard_map(
            on_device,
            mesh=Mesh(np.array(jax.devices()[:stages]), (STAGE,)),
            in_specs=(P(), P(), {k: lead for k in ("w", "b")}, split, P()),
            out_specs=out,
            check_vma=check_vma,
        )
        blocks, outside, batch = self.numbers()
        return mapped, ({k: layout.to_slots(leaf) for k, leaf in blocks.items()}, outside, batch)


def far(found: Any, wanted: Any) -> float:
    """max|a - b| / max|b|, of the worst leaf."""
    return max(
        float(np.abs(a - b).max() / np.abs(b).max())
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    )
