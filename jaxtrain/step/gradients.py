"""Loss and gradients of a step on a mesh: sum, count, and stated reductions.

`Explicit`: one shard_map over the whole mesh, every axis manual. The local share of the loss sum is
differentiated. The differentiated function has no reductions except the adjoint pairs of the
communicator; gradients, loss and count are reduced after it. `Gspmd`: the same function under
sharding constraints. Both accumulate microbatches of raw sums in fp32 and divide once.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Set
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain.arrays import Leaves
from jaxtrain.collectives.algorithm import Algorithm
from jaxtrain.collectives.buckets import SMALL_LEAF, buckets
from jaxtrain.collectives.lax_form import Lax
from jaxtrain.collectives.named import AllReduce, gradient_sum, sum_over
from jaxtrain.collectives.order import after
from jaxtrain.collectives.vary import same, vary
from jaxtrain.compression.residuals import CodecState
from jaxtrain.compression.sums import pay_back
from jaxtrain.losses.cross_entropy import LossSums
from jaxtrain.mesh.axes import Dims
from jaxtrain.mesh.sharding import Leaf, partition_spec, ways
from jaxtrain.nn.bundle import bundles, gather_bundle, rounds, scatter_bundle

LossFunction = Callable[[Leaves, Leaves, Leaves, Any], tuple[LossSums, Leaves]]
"""(params, model state, microbatch, key) -> (shares of the sums, updated model state)."""


class Gradients(NamedTuple):
    """Sums over the batch, not divided yet. `grads` are sharded as the optimizer's state is.

    residuals: what compression left out of the sums, for the next step. exact: the same gradients
    summed without compression, in steps that measure its error.
    """

    sums: LossSums
    grads: Leaves
    model_state: Leaves
    residuals: CodecState = {}  # noqa: RUF012 (never changed)
    exact: Leaves = {}  # noqa: RUF012


def accumulate(
    loss: LossFunction,
    params: Leaves,
    model_state: Leaves,
    batch: Leaves,
    *,
    key: jax.Array,
    scale: jax.Array,
    reduce_microbatch: Callable[[Leaves], Leaves],
    types: Callable[[Any], Any],
    frozen: Set[str] = frozenset(),
) -> Gradients:
    """Sums over microbatches (dim 0 of every leaf of `batch`): gradients of scale * loss in fp32,
    by the parameters that are not `frozen`.

    `reduce_microbatch` reduces one microbatch's gradients before they are accumulated. `types`
    gives the scan's starting values the types that its body returns.
    """

    moved = {k: p for k, p in params.items() if k not in frozen}

    def one(model_state: Leaves, indexed: Any) -> tuple[LossSums, Leaves, Leaves]:
        number, micro = indexed

        def scaled(moved: Leaves) -> tuple[jax.Array, tuple[LossSums, Leaves]]:
            used = {**params, **moved}
            sums, updated = loss(used, model_state, micro, jax.random.fold_in(key, number))
            return sums.loss * scale, (sums, updated)

        grads, (sums, updated) = jax.grad(scaled, has_aux=True)(moved)
        return sums, reduce_microbatch(grads), updated

    microbatches = len(jax.tree.leaves(batch)[0])
    first = jax.tree.map(lambda x: x[0], batch)
    if microbatches == 1:
        return Gradients(*one(model_state, (0, first)))

    def step(carry: Gradients, indexed: Any) -> tuple[Gradients, None]:
        *added, model_state = one(carry.model_state, indexed)
        sums, grads = jax.tree.map(jnp.add, (carry.sums, carry.grads), tuple(added))
        return carry._replace(sums=sums, grads=grads, model_state=model_state), None

    # A gradient has its parameter's shape: no backward pass, and a third of the tracing less.
    sums, _ = jax.eval_shape(lambda: loss(params, model_state, first, jax.random.fold_in(key, 0)))
    shapes = sums, jax.eval_shape(lambda: reduce_microbatch(moved))
    sums, grads = types(jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes))
    start = Gradients(sums, grads, model_state)
    return lax.scan(step, start, (jnp.arange(microbatches), batch))[0]


class Reduction(NamedTuple):
    """Reductions of all gradients from the backward pass's split to the optimizer's, on mesh axes
    `sizes`."""

    places: Mapping[str, Leaf]
    sizes: Mapping[str, int]
    sharded: bool
    """Scatter each microbatch (ZeRO-2, FSDP) or once a step (ZeRO-1)."""
    scatter_by: Algorithm = Lax()
    reducer: AllReduce = Lax()
    """Sums over the axes on which a leaf is replicated."""
    small_leaf: int = SMALL_LEAF
    """Leaves whose part on a device has up to this many elements travel together."""
    layers: bool = False
    """True: the backward pass sums the gradients of each layer (`by_layer`)."""

    @property
    def frozen(self) -> frozenset[str]:
        """Names of the leaves that have no gradient."""
        return frozenset(name for name, place in self.places.items() if not place.trained)

    def reduce_microbatch(self, grads: Leaves) -> Leaves:
        """Casts one microbatch's gradients to fp32; scatters them if that is per microbatch."""
        grads = {k: g.astype(jnp.float32) for k, g in grads.items()}
        return self._scatter(grads) if self.sharded else grads

    def reduce_step(self, grads: Leaves) -> Leaves:
        """Once a step: remaining scatters, then sums over axes on which leaves are replicated."""
        return self.all_reduce(self.scatter_remaining(grads))

    def scatter_remaining(self, grads: Leaves) -> Leaves:
        """ZeRO-1: reduce-scatters the accumulated gradients; otherwise the identity."""
        return grads if self.sharded else self._scatter(grads)

    def gradient_split(self, place: Leaf) -> Dims:
        """The split in which the backward pass leaves a leaf's gradient."""
        return place.params if self.sharded else place.in_use

    def _scatter(self, grads: Leaves) -> Leaves:
        places = {name: self.places[name] for name in grads}
        for split in rounds({k: (self.gradient_split(p), p.optimizer) for k, p in places.items()}):
            parts = {k: grads[k].size // ways(axes, self.sizes) for k, (_, axes) in split.items()}
            for bundle in bundles(split, parts, self.small_leaf):
                grads = scatter_bundle(grads, bundle, self.scatter_by, "optimizer gradients")
        return grads

    def gather_updated_params(self, shards: Leaves) -> Leaves:
        """Gathers parameters that each device has updated in part (ZeRO-1 and 2) to their split at
        rest, small ones together."""
        places = {name: self.places[name] for name in shards}
        params = {name: vary(x, tuple(self.sizes)) for name, x in shards.items()}
        for split in rounds({k: (p.params, p.optimizer) for k, p in places.items()}):
            parts = {name: params[name].size for name in split}
            for bundle in bundles(split, parts, self.small_leaf):
                params = gather_bundle(params, bundle, self.scatter_by)
        split_over = {k: {a for d in p.params for a in d} for k, p in places.items()}
        return {
            k: same(x, tuple(a for a in self.sizes if a not in split_over[k]))
            for k, x in params.items()
        }

    def replicated_axes(self, name: str) -> tuple[str, ...]:
        """Mesh axes on which the optimizer's part of a leaf is replicated, in mesh order."""
        split = {a for d in self.places[name].optimizer for a in d}
        return tuple(a for a in self.sizes if a not in split)

    def by_layer(self, name: str) -> bool:
        """True if the backward pass sums the leaf's gradient layer by layer: a leaf that is stacked
        over layers and needs no scatter first."""
        place = self.places[name]
        return (
            self.layers and "layers" in place.axes and self.gradient_split(place) == place.optimizer
        )

    def all_reduce_layer(self, grads: Leaves, prefix: str) -> Leaves:
        """Sums one layer's `by_layer` gradients in fp32; names are without `prefix`. Results are
        typed as varying, as all values of the backward pass."""
        axes = {k: self.replicated_axes(prefix + k) for k in grads if self.by_layer(prefix + k)}
        unsummed = {k: grads[k].astype(jnp.float32) for k in axes}
        summed = self._all_reduce(unsummed, axes, "layer gradients", "layer gradients")
        return {**grads, **{k: vary(g, tuple(self.sizes)) for k, g in summed.items()}}

    def all_reduce(self, grads: Leaves) -> Leaves:
        """Sums the gradients that the backward pass has not summed, over the axes on which a leaf
        is replicated."""
        axes = {name: self.replicated_axes(name) for name in grads}
        done = {k: same(g, axes[k]) for k, g in grads.items() if self.by_layer(k)}
        remaining = {k: g for k, g in grads.items() if k not in done}
        return done | self._all_reduce(remaining, axes, "gradients", "small gradients")

    def _all_reduce(self, grads: Leaves, axes: Mapping[str, Any], large: str, small: str) -> Leaves:
        """Sums `grads` by the reductions named `large` and `small`, small leaves in buckets."""
        together = buckets(grads, axes, self.small_leaf)
        bucketed = {name for bucket in together for name in bucket.names}
        out = {
            k: gradient_sum(large, g, axes[k], self.reducer)
            for k, g in grads.items()
            if k not in bucketed
        }
        for bucket in together:
            flat = gradient_sum(small, bucket.concatenate(grads), bucket.axes, self.reducer)
            out |= bucket.split(flat, grads)
        return out


LocalSums = Callable[[Leaves, Leaves, Any, jax.Array], Gradients]
"""(params, batch, key, scale) -> a device's shares, with gradients for `Reduction.reduce_step`; all
are typed as varying over all mesh axes."""


def microbatch_sums(
    loss: LossFunction, reduction: Reduction, fetch: Callable[[Leaves], Leaves]
) -> LocalSums:
    """Runs one microbatch after another. `fetch` gathers all parameters for use; needed when
    gradients are scattered once a step."""
    axes = tuple(reduction.sizes)

    def sums(params: Leaves, batch: Leaves, key: Any, scale: jax.Array) -> Gradients:
        if not reduction.sharded:
            params = fetch(params)
        typed = partial(jax.tree.map, lambda x: vary(x, axes))
        options: Any = dict(
            reduce_microbatch=reduction.reduce_microbatch, types=typed, frozen=reduction.frozen
        )
        gradients = accumulate(loss, params, {}, batch, key=key, scale=scale, **options)
        # Some gradients are ready before the backward loop over layers; their sums wait for it.
        return after(gradients, gradients)

    return sums


class StepSums(Protocol):
    """Sums of gradients that are made once a step, as a transform with a state."""

    @property
    def state_specs(self) -> Any:
        """PartitionSpecs of the leaves of the state."""
        ...

    @property
    def measured(self) -> Collection[str]:
        """Names of the leaves whose exact sums are computed too."""
        ...

    def __call__(
        self, grads: Leaves, state: CodecState, scale: jax.Array, count: jax.Array, key: jax.Array
    ) -> tuple[Leaves, CodecState, Leaves]:
        """Inside shard_map: returns (sums, new state, exact sums of `measured`). grads: of scale *
        loss, from `LocalSums`. count: the loss's divisor."""
        ...


def explicit_gradients(
    local: LocalSums,
    step_sums: StepSums,
    *,
    mesh: jax.sharding.Mesh,
    reduction: Reduction,
    batch_specs: Leaves,
    check_vma: bool = True,
) -> Callable[..., Gradients]:
    """(params, model state, batch, key, scale, state of `step_sums`) -> Gradients, by one
    shard_map, every axis manual."""
    places, axes = reduction.places, tuple(reduction.sizes)

    def typed(tree: Any) -> Any:
        return jax.tree.map(lambda x: vary(x, axes), tree)

    def on_device(params: Leaves, batch: Leaves, key: Any, scale: Any, residuals: Any) -> Any:
        unvarying_scale, params, batch, scale = scale, typed(params), typed(batch), typed(scale)
        shares = local(params, batch, key, scale)
        sums = all_reduce_sums(shares.sums, axes)
        return sums, *step_sums(shares.grads, residuals, unvarying_scale, sums.count, key)

    scalar = partition_spec(())
    specs = {k: partition_spec(p.optimizer) for k, p in places.items() if p.trained}
    run = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(
            {k: partition_spec(p.params) for k, p in places.items()},
            *(batch_specs, scalar, scalar, step_sums.state_specs),
        ),
        out_specs=(scalar, specs, step_sums.state_specs, {k: specs[k] for k in step_sums.measured}),
        check_vma=check_vma,
    )

    def sums(params: Leaves, model_state: Leaves, *inputs: Any) -> Gradients:
        summed, grads, residuals, exact = run(params, *inputs)
        return Gradients(summed, grads, model_state, residuals, exact)

    return sums


def all_reduce_sums(sums: LossSums, axes: tuple[str, ...]) -> LossSums:
    """Sum of the devices' shares, by one all-reduce."""
    leaves, tree = jax.tree.flatten(sums)
    return jax.tree.unflatten(tree, list(sum_over("loss", jnp.stack(leaves), axes)))


def gather_updated_params(
    params: Leaves, *, mesh: jax.sharding.Mesh, reduction: Reduction, check_vma: bool = True
) -> Leaves:
    """`Reduction.gather_updated_params` of global arrays that the optimizer splits more ways than
    they are split at rest; others pass."""
    places = {k: reduction.places[k] for k in params}
    places = {k: p for k, p in places.items() if p.optimizer != p.params}
    if not places:
        return params
    run = jax.shard_map(
        reduction.gather_updated_params,
        mesh=mesh,
        in_specs=({k: partition_spec(p.optimizer) for k, p in places.items()},),
        out_specs={k: partition_spec(p.params) for k, p in places.items()},
        check_vma=check_vma,
    )
    return params | run({k: params[k] for k in places})


def gspmd_gradients(
    loss: LossFunction,
    *,
    constrain: Callable[[Leaves], Leaves],
    frozen: Set[str] = frozenset(),
) -> Callable[..., Gradients]:
    """`explicit_gradients` under sharding constraints: `constrain` states the optimizer's split of
    gradients. XLA chooses the collectives, whose dtype is that of the operations that they complete
    (`Gspmd.reduce_dtype`). On one device this is plain code, and residuals are added back."""

    def run(
        params: Leaves, model_state: Leaves, batch: Leaves, key: Any, scale: Any, residuals: Any
    ) -> Gradients:
        def reduce_microbatch(grads: Leaves) -> Leaves:
            return constrain({k: g.astype(jnp.float32) for k, g in grads.items()})

        options: Any = dict(reduce_microbatch=reduce_microbatch, types=lambda x: x, frozen=frozen)
        summed = accumulate(loss, params, model_state, batch, key=key, scale=scale, **options)
        unit = scale * jnp.where(summed.sums.count > 0, summed.sums.count, 1.0)
        grads, residuals = pay_back(summed.grads, residuals, unit)
        return summed._replace(grads=grads, residuals=residuals)

    return run


def squared_norm(
    trees: tuple[Leaves, ...], *, splits: Mapping[str, Dims], mesh: jax.sharding.Mesh | None
) -> jax.Array:
    """[len(trees)] squared 2-norms; on a mesh each device sums its part and one psum adds them.

    A leaf that is replicated on some axes is counted once: its local sum is divided by its copies.
    """

    def local(trees: tuple[Leaves, ...], copies: Mapping[str, int]) -> jax.Array:
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

    def on_device(trees: tuple[Leaves, ...]) -> jax.Array:
        return sum_over("gradient norm", vary(local(trees, copies), tuple(sizes)), tuple(sizes))

    specs = {name: partition_spec(splits[name]) for name in trees[0]}
    run = jax.shard_map(
        on_device, mesh=mesh, in_specs=((specs,) * len(trees),), out_specs=partition_spec(())
    )
    return run(trees)
