"""Mixture of experts: each token goes through the few feed-forward layers its router chooses.

`router.py` chooses and weighs. Without a `Capacity` nothing is dropped: an expert takes as many
tokens as choose it (Gale et al. 2022, "MegaBlocks"). Pure functions of what one device holds; who
has which tokens and which part of the hidden dim is the communicator's to say.

Rows, a token once for each of its experts, are laid out expert after expert (`rows.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Float32, Int

from jaxtrain.collectives.exchange import ALONE, Exchange
from jaxtrain.collectives.vary import varying_axes
from jaxtrain.mesh.axes import MeshAxes
from jaxtrain.moe.across import Route, Trip, experts_of_rows, pinned
from jaxtrain.moe.adapters import AdapterPairs, Pair, products_with_changes, with_changes
from jaxtrain.moe.grouped import Asked, GroupedMatmul, Owners
from jaxtrain.moe.interleaved import Interleaved
from jaxtrain.moe.kernels import PlatformGroupedMatmul, settled
from jaxtrain.moe.narrow import ExpertMatrices, grouped_matmuls, with_own_scales
from jaxtrain.moe.replay import replayed
from jaxtrain.moe.room import chunk_count, sent_rows
from jaxtrain.moe.router import Balance, Capacity, Router, SoftmaxRouter
from jaxtrain.moe.rows import combine, dispatch, plan_rows, weighed_sum
from jaxtrain.moe.tally import watched_logits
from jaxtrain.quantization.weights import QuantizedWeight

Activation = Callable[[jax.Array], jax.Array]


class ExpertLeaves(NamedTuple):
    """Leaves that a layer reads, on one device.

    router [embed, experts]. weights: gate, up [experts, embed, mlp] and down [experts, mlp, embed],
    or up and down without a gate. bias [experts], tally and replay: of the router, None where it
    has none.
    shared: the same as `weights` of an expert that every token goes through, each without its first
    dim; shared_router [embed, 1]: by whose sigmoid its output is multiplied. () and None without.
    adapters, shared_adapters: of `weights` and of `shared`, in their order; router_adapter: A
    [embed, rank] and B [rank, experts].
    """

    router: jax.Array
    weights: tuple[ExpertMatrices, ...]
    bias: jax.Array | None = None
    tally: jax.Array | None = None
    replay: jax.Array | None = None
    shared: tuple[jax.Array, ...] = ()
    shared_router: jax.Array | None = None
    adapters: AdapterPairs = ()
    router_adapter: Pair | None = None
    shared_adapters: AdapterPairs = ()

    def splits(self, hidden: MeshAxes, experts: MeshAxes = ()) -> ExpertLeaves:
        """Returns the mesh axes of each leaf's dims, for these axes of the hidden dim and of
        experts."""
        into, shared_into = (experts, (), hidden), ((), hidden)
        shared = (*(shared_into for _ in self.shared[1:]), (hidden, ()))
        splits = {
            "router": ((), ()),
            "weights": (*(into for _ in self.weights[1:]), (experts, hidden, ())),
            "bias": ((),),
            "tally": ((),),
            "replay": ((),),
            "shared": shared[: len(self.shared)],
            "shared_router": ((), ()),
        }
        result: dict[str, Any] = {k: v for k, v in splits.items() if getattr(self, k) is not None}
        of_pairs = {
            "adapters": ((experts, (), ()), (experts, (), hidden), (experts, hidden, ())),
            "shared_adapters": (((), ()), ((), hidden), (hidden, ())),
        }
        for name, (unsplit, cut, down) in of_pairs.items():
            pairs = getattr(self, name)
            axes = (*((unsplit, cut) for _ in pairs[1:]), (down, unsplit))[: len(pairs)]
            result[name] = tuple(pair and split for pair, split in zip(pairs, axes, strict=True))
        if self.router_adapter is not None:
            result["router_adapter"] = (((), ()), ((), ()))
        return ExpertLeaves(**result)


class TokenFacts(NamedTuple):
    """Further facts of a device's tokens. weights: in the loss, for the router's statistics; None
    for ones. places: in the batch, if routing is recorded (`moe.replay`). real: False for padding;
    None for none."""

    weights: Float32[Array, " tokens"] | None = None
    places: Int[Array, " tokens"] | None = None
    real: Bool[Array, " tokens"] | None = None


class Routed(NamedTuple):
    """Each token's experts, and their shares in its output. An expert of number `experts` is none:
    the token was dropped there, and the share is zero."""

    shares: Float32[Array, "tokens k"]
    chosen: Int[Array, "tokens k"]


@dataclass(frozen=True)
class ExpertLayer:
    """A mixture of experts: all that is known of it before a program runs.

    per_token: experts that a token goes through. kernel: what multiplies their rows; None is the
    choice for the default backend. capacity, balance: None for none. adapter_scale: of all
    adapters among the leaves.
    """

    per_token: int
    activation: Activation
    router: Router = SoftmaxRouter()  # noqa: RUF009 (frozen)
    capacity: Capacity | None = None
    balance: Balance | None = None
    kernel: GroupedMatmul | PlatformGroupedMatmul | None = None
    adapter_scale: float = 1.0

    def __call__(
        self,
        x: Float[Array, "tokens embed"],
        leaves: ExpertLeaves,
        facts: TokenFacts = TokenFacts(),  # noqa: B008 (never changed)
        exchange: Exchange = ALONE,
    ) -> Float[Array, "tokens embed"]:
        """The outputs of each token's experts, weighted by its router; in the dtype of x.

        Where matrices have a slice of the hidden dim each, the outputs, and the gradients of x and
        router, are parts of sums over the slices.
        """
        routed = self.route(x, leaves, facts, exchange)
        group = None if self.capacity is None else self.capacity.routing_group
        count = chunk_count(len(x), exchange.chunk, group)
        if count == 1:
            return self.together(x, routed, leaves, exchange)
        # Added up over chunks in fp32.
        wide = _cast(leaves, jnp.float32)
        cut = lambda a: a.reshape(count, -1, *a.shape[1:])  # noqa: E731
        x, shares, chosen = map(cut, (x, *routed))
        if _devices(exchange) > 1 and exchange.flops_per_byte is not None:
            chunks = self._interleaved(x.shape[1], wide, exchange, exchange.flops_per_byte)
            routed_by = dict(bias=None, tally=None, replay=None, router_adapter=None)
            return chunks(x, shares, chosen, wide._replace(**routed_by)).reshape(-1, x.shape[-1])
        parts, done = zip(x, shares, chosen, strict=True), []
        run_chunk = jax.checkpoint(partial(self._chunk, exchange=exchange))
        for part, *choice in parts:
            tokens = pinned(part, done[-1] if done else None)
            done.append(run_chunk(tokens, Routed(*choice), wide))
        return jnp.concatenate(done)

    def _chunk(
        self,
        x: Float[Array, "tokens embed"],
        routed: Routed,
        leaves: ExpertLeaves,
        exchange: Exchange,
    ) -> Float[Array, "tokens embed"]:
        """Some of the tokens; of matrices that are as wide as their gradients are to be summed."""
        return self.together(x, routed, _cast(leaves, x.dtype), exchange)

    def together(
        self,
        x: Float[Array, "tokens embed"],
        routed: Routed,
        leaves: ExpertLeaves,
        exchange: Exchange = ALONE,
    ) -> Float[Array, "tokens embed"]:
        """A token's outputs added up by their shares, and what the shared expert gives it."""
        out = weighed_sum(self.of_choices(x, routed, leaves, exchange), routed.shares)
        return out + self.shared(x, leaves) if leaves.shared else out

    def of_choices(
        self,
        x: Float[Array, "tokens embed"],
        routed: Routed,
        leaves: ExpertLeaves,
        exchange: Exchange,
    ) -> Float[Array, "tokens {self.per_token} embed"]:
        """Returns the outputs of each token's experts, on any device."""
        route = self._route(len(x), leaves, exchange)
        if _devices(exchange) == 1:
            return self._through(x, routed.chosen, leaves, route.room)
        weights = tuple(with_own_scales(w, exchange.experts) for w in leaves.weights)
        leaves = leaves._replace(weights=weights)
        trip = route.plan(routed.chosen)
        return route.back(self._received(route.there(x, trip), trip, leaves), trip)

    def _route(self, tokens: int, leaves: ExpertLeaves, exchange: Exchange) -> Route:
        """Returns the route of so many tokens of a device."""
        experts, k = leaves.router.shape[1], self.per_token
        group, limit = (None, None) if self.capacity is None else self.capacity.of_group(experts, k)
        room = sent_rows(tokens, k, experts, _devices(exchange), group, limit)
        return Route(exchange.experts, experts, room, exchange.rows)

    def _received(
        self, rows: Float[Array, "rows embed"], trip: Trip, leaves: ExpertLeaves
    ) -> Float[Array, "rows embed"]:
        """Rows that came from all devices, each through its expert."""
        numbers = experts_of_rows(trip.sizes, len(rows) // len(trip.sizes))
        return self._through(rows, numbers, leaves, len(rows))[:, 0]

    def _interleaved(
        self, tokens: int, leaves: ExpertLeaves, exchange: Exchange, flops_per_byte: float
    ) -> Interleaved:
        """Chunks of so many tokens, of which some travel while others are multiplied."""
        route = self._route(tokens, leaves, exchange)
        multiply = lambda rows, trip, leaves: self._received(rows, trip, _cast(leaves, rows.dtype))  # noqa: E731
        shared = lambda x, leaves: self.shared(x, _cast(leaves, x.dtype))  # noqa: E731
        return Interleaved(route, multiply, shared if leaves.shared else None, flops_per_byte)

    def _through(
        self,
        x: Float[Array, "tokens embed"],
        chosen: Int[Array, "tokens k"],
        leaves: ExpertLeaves,
        most: int,
    ) -> Float[Array, "tokens k embed"]:
        """Each token through experts of this device. most: rows of them together."""
        kernel = self.settled(x, leaves, most)
        plan = plan_rows(chosen, leaves.weights[-1].shape[0], kernel.largest_block, most)
        out = self.multiply(kernel, dispatch(x, plan), leaves, plan.owners)
        return combine(out, plan)

    def route(
        self,
        x: Float[Array, "tokens embed"],
        leaves: ExpertLeaves,
        facts: TokenFacts = TokenFacts(),  # noqa: B008
        exchange: Exchange = ALONE,
    ) -> Routed:
        """Returns each token's experts and shares. Records statistics and routing if there are
        leaves for them."""
        logits, experts = self.logits(x, leaves), leaves.router.shape[1]
        chosen = self.router.choose(logits, leaves.bias, self.per_token)
        if leaves.replay is not None and facts.places is not None:
            compared = self.router.compared(logits, leaves.bias)
            record = (leaves.replay, facts.places, exchange.counted)
            logits, chosen = replayed(logits, chosen, compared, *record)
        fits = None if self.capacity is None else self.capacity.fits(chosen, experts, facts.real)
        if self.balance is not None and leaves.tally is not None:
            lost = 0 * chosen if fits is None else ~fits
            dropped = jnp.sum(lost, axis=1).astype(jnp.float32)
            weights = jnp.ones(len(x), jnp.float32) if facts.weights is None else facts.weights
            logits = watched_logits(
                logits, leaves.tally, chosen, dropped, weights, self.router, self.balance, exchange
            )
        shares = self.router.shares(logits, chosen)
        if fits is None:
            return Routed(shares, chosen)
        return Routed(jnp.where(fits, shares, 0.0), jnp.where(fits, chosen, experts))

    def logits(
        self, x: Float[Array, "tokens embed"], leaves: ExpertLeaves
    ) -> Float32[Array, "tokens experts"]:
        """Returns the router's logits, to which those of its adapter are added if it has one."""
        logits = router_logits(x, leaves.router)
        if leaves.router_adapter is None:
            return logits
        into, out_of = leaves.router_adapter
        return logits + router_logits(router_logits(x, into) * self.adapter_scale, out_of)

    def settled(
        self, x: Float[Array, "tokens embed"], leaves: ExpertLeaves, rows: int
    ) -> GroupedMatmul:
        """The kernel that runs for so many rows."""
        experts, hidden, embed = leaves.weights[-1].shape
        checked = bool(varying_axes(*jax.tree.leaves((x, leaves.weights))))
        return settled(self.kernel, Asked(rows, experts, embed, hidden, x.dtype, checked))

    def multiply(
        self,
        kernel: GroupedMatmul,
        rows: Float[Array, "rows embed"],
        leaves: ExpertLeaves,
        owners: Owners,
    ) -> Float[Array, "rows embed"]:
        """Each expert's rows through its layer."""

        def products(rows: jax.Array, which: slice) -> tuple[jax.Array, ...]:
            outs = grouped_matmuls(kernel, rows, leaves.weights[which], owners)
            pairs = leaves.adapters[which]
            return with_changes(kernel, rows, outs, pairs, self.adapter_scale, owners)

        hidden = products(rows, slice(None, -1))
        return products(self._activated(hidden), slice(-1, None))[0]

    def shared(
        self, x: Float[Array, "tokens embed"], leaves: ExpertLeaves
    ) -> Float[Array, "tokens embed"]:
        """The expert that all tokens go through (DeepSeek-AI 2024, "DeepSeekMoE")."""
        into, down = slice(None, -1), slice(-1, None)
        pairs, scale = leaves.shared_adapters, self.adapter_scale
        hidden = products_with_changes(x, leaves.shared[into], pairs[into], scale)
        h = self._activated(hidden)
        (out,) = products_with_changes(h, leaves.shared[down], pairs[down], scale)
        if leaves.shared_router is None:
            return out
        gate = jax.nn.sigmoid((x @ leaves.shared_router).astype(jnp.float32))
        return (out.astype(jnp.float32) * gate).astype(x.dtype)

    def _activated(self, hidden: Sequence[jax.Array]) -> jax.Array:
        h = self.activation(hidden[0])
        return h * hidden[1] if len(hidden) > 1 else h


def _devices(exchange: Exchange) -> int:
    """Number of devices among which experts are split."""
    return lax.axis_size(exchange.experts) if exchange.experts else 1


def _cast(leaves: ExpertLeaves, dtype: DTypeLike) -> ExpertLeaves:
    """Returns the leaves with matrices in `dtype`, for chunks; the router is read for all tokens at
    once. Refuses products in 8 bits: each chunk's rows would have their own scale."""
    narrow = any(isinstance(w, QuantizedWeight) for w in leaves.weights)
    assert not narrow, "chunks are refused where products are in 8 bits"
    names = ("weights", "adapters", "shared", "shared_adapters", "shared_router")
    matrices = {name: getattr(leaves, name) for name in names}
    return leaves._replace(**jax.tree.map(lambda w: w.astype(dtype), matrices))


def router_logits(
    x: Float[Array, "tokens embed"], router: Float[Array, "embed experts"]
) -> Float32[Array, "tokens experts"]:
    """Returns a router's logits, computed in fp32."""
    wide = (x.astype(jnp.float32), router.astype(jnp.float32))
    return jnp.matmul(*wide, precision=lax.Precision.HIGHEST)
