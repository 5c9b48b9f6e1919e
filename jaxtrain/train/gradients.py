"""Loss and gradients of a step on a mesh: sum, count, and stated reductions.

`Explicit`: one shard_map over the whole mesh, every axis manual. The local share of the loss sum is
differentiated, and no reduction stands inside the differentiated function but the adjoint pairs of
the communicator; gradients, loss and count are reduced after. `Gspmd`: the same function under
sharding constraints. Both accumulate microbatches of raw sums in fp32 and divide once.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain.collectives.algorithm import Algorithm
from jaxtrain.collectives.named import sum_over, sum_scatter
from jaxtrain.collectives.vary import vary
from jaxtrain.mesh.sharding import Dims, Leaf, partition_spec

Arrays = dict[str, Any]
SMALL_LEAF = 16384
"""Elements; gradients of leaves up to this size are summed in one bucket."""

LossFunction = Callable[[Arrays, Arrays, Arrays, Any], tuple[jax.Array, jax.Array, Arrays]]
"""(params, rest, microbatch, key) -> (share of the loss sum, share of the count, rest after)."""


class Gradients(NamedTuple):
    """Sums over the batch: nothing is divided yet. `grads` rest as the optimizer's state does."""

    loss: jax.Array
    count: jax.Array
    grads: Arrays
    rest: Arrays


def accumulate(
    loss: LossFunction,
    params: Arrays,
    rest: Arrays,
    batch: Arrays,
    *,
    key: jax.Array,
    scale: jax.Array,
    settle: Callable[[Arrays], Arrays],
    types: Callable[[Any], Any],
) -> Gradients:
    """Sums over microbatches (dim 0 of every leaf of `batch`), gradients of scale * loss in fp32.

    `settle` reduces one microbatch's gradients to what is accumulated; `types` gives the scan's
    starting values the types its body returns.
    """

    def one(rest: Arrays, at: Any) -> tuple[Any, Any, Arrays, Arrays]:
        number, micro = at

        def scaled(params: Arrays) -> tuple[jax.Array, Any]:
            total, count, after = loss(params, rest, micro, jax.random.fold_in(key, number))
            return total * scale, (total, count, after)

        grads, (total, count, after) = jax.grad(scaled, has_aux=True)(params)
        return total, count, settle(grads), after

    microbatches = len(jax.tree.leaves(batch)[0])
    first = jax.tree.map(lambda x: x[0], batch)
    if microbatches == 1:
        total, count, grads, rest = one(rest, (0, first))
        return Gradients(total, count, grads, rest)

    def step(carry: Gradients, at: Any) -> tuple[Gradients, None]:
        total, count, grads, rest = one(carry.rest, at)
        before = (carry.loss, carry.count, carry.grads)
        total, count, grads = jax.tree.map(jnp.add, before, (total, count, grads))
        return Gradients(total, count, grads, rest), None

    shapes = jax.eval_shape(lambda: one(rest, (0, first)))
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes[:3])
    total, count, grads = types(zeros)
    start = Gradients(total, count, grads, rest)
    return lax.scan(step, start, (jnp.arange(microbatches), batch))[0]


class Reduction(NamedTuple):
    """How the gradients of all leaves get from where the backward pass leaves them to the
    optimizer's split, on mesh axes `sizes`."""

    places: Mapping[str, Leaf]
    sizes: Mapping[str, int]
    sharded: bool
    """Scatter each microbatch (ZeRO-2, FSDP) or once a step (ZeRO-1)."""
    scatter_by: Algorithm

    def settle(self, grads: Arrays) -> Arrays:
        """One microbatch: fp32, scattered to the optimizer's split when that is per microbatch."""
        grads = {k: g.astype(jnp.float32) for k, g in grads.items()}
        return self._scattered(grads) if self.sharded else grads

    def finish(self, grads: Arrays) -> Arrays:
        """Once a step: what is left to scatter, and sums over the axes a leaf is whole on."""
        return self._summed(grads if self.sharded else self._scattered(grads))

    def begins(self, place: Leaf) -> Dims:
        """The split in which the backward pass leaves a leaf's gradient."""
        return place.params if self.sharded else place.in_use

    def _scattered(self, grads: Arrays) -> Arrays:
        out = dict(grads)
        for name in grads:
            place = self.places[name]
            for dim, (now, then) in enumerate(
                zip(self.begins(place), place.optimizer, strict=True)
            ):
                axes = then[len(now) :]
                out[name] = sum_scatter(
                    "optimizer gradients", out[name], axes, dim, self.scatter_by
                )
        return out

    def _summed(self, grads: Arrays) -> Arrays:
        """All-reduce over the axes on which a leaf is whole; small leaves in one bucket."""
        out = dict(grads)
        buckets: dict[tuple[str, ...], list[str]] = defaultdict(list)
        for name, g in grads.items():
            split = {a for d in self.places[name].optimizer for a in d}
            axes = tuple(a for a in self.sizes if a not in split)
            if axes and g.size <= SMALL_LEAF:
                buckets[axes].append(name)
            else:
                out[name] = sum_over("gradients", g, axes)
        for axes, names in buckets.items():
            flat = jnp.concatenate([grads[name].reshape(-1) for name in names])
            flat, start = sum_over("small gradients", flat, axes), 0
            for name in names:
                g = grads[name]
                out[name] = flat[start : start + g.size].reshape(g.shape)
                start += g.size
        return out


def explicit(
    loss: LossFunction,
    *,
    mesh: jax.sharding.Mesh,
    reduction: Reduction,
    batch_specs: Arrays,
    fetch: Callable[[Arrays], Arrays],
    check_vma: bool = True,
) -> Callable[..., Gradients]:
    """(params, rest, batch, key, scale) -> Gradients, by one shard_map, every axis manual.

    `fetch` gathers all parameters for use; needed when gradients are scattered once a step.
    """
    places, axes = reduction.places, tuple(reduction.sizes)

    def typed(tree: Any) -> Any:
        return jax.tree.map(lambda x: vary(x, axes), tree)

    def on_device(params: Arrays, batch: Arrays, key: Any, scale: Any) -> Any:
        params, batch, scale = typed(params), typed(batch), typed(scale)
        if not reduction.sharded:
            params = fetch(params)
        sums = accumulate(
            loss, params, {}, batch, key=key, scale=scale, settle=reduction.settle, types=typed
        )
        total, count = sum_over("loss", jnp.stack([sums.loss, sums.count]), axes)
        return total, count, reduction.finish(sums.grads)

    run = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(
            {k: partition_spec(p.params) for k, p in places.items()},
            batch_specs,
            partition_spec(()),
            partition_spec(()),
        ),
        out_specs=(
            partition_spec(()),
            partition_spec(()),
            {k: partition_spec(p.optimizer) for k, p in places.items()},
        ),
        check_vma=check_vma,
    )
    return lambda params, rest, batch, key, scale: Gradients(
        *run(params, batch, key, scale), rest=rest
    )


def gspmd(loss: LossFunction, *, constrain: Callable[[Arrays], Arrays]) -> Callable[..., Gradients]:
    """As `explicit`, under sharding constraints: `constrain` states the optimizer's split of
    gradients, and XLA chooses the collectives, whose dtype is that of the operations they complete
    (`Gspmd.reduce_dtype`). On one device this is plain code."""

    def run(params: Arrays, rest: Arrays, batch: Arrays, key: Any, scale: Any) -> Gradients:
        def settle(grads: Arrays) -> Arrays:
            return constrain({k: g.astype(jnp.float32) for k, g in grads.items()})

        return accumulate(
            loss, params, rest, batch, key=key, scale=scale, settle=settle, types=lambda x: x
        )

    return run


def squared_norm(
    trees: tuple[Arrays, ...], *, splits: Mapping[str, Dims], mesh: jax.sharding.Mesh | None
) -> jax.Array:
    """[len(trees)] squared 2-norms; on a mesh each device sums its part and one psum adds them.

    A leaf that is whole on some axes is counted once: its local sum is divided by its copies.
    """

    def local(trees: tuple[Arrays, ...], copies: Mapping[str, int]) -> jax.Array:
        def part(name: str, x: jax.Array) -> jax.Array:
            return jnp.sum(jnp.square(x.astype(jnp.float32))) / copies[name]

        return jnp.stack([sum(part(k, x) for k, x in tree.items()) for tree in trees])

    if mesh is None:
        return local(trees, defaultdict(lambda: 1))
    sizes = dict(mesh.shape)
    copies = {
        name: math.prod(n for a, n in sizes.items() if a not in {a for d in split for a in d})
        for name, split in splits.items()
    }

    def on_device(trees: tuple[Arrays, ...]) -> jax.Array:
        return sum_over("gradient norm", vary(local(trees, copies), tuple(sizes)), tuple(sizes))

    specs = {name: partition_spec(split) for name, split in splits.items()}
    run = jax.shard_map(
        on_device, mesh=mesh, in_specs=((specs,) * len(trees),), out_specs=partition_spec(())
    )
    return run(trees)
