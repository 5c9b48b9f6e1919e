"""The methods by which attention sees a whole row of which each device has a part.

A method is a value, called inside a shard_map with a `SelfAttention`, q, k and v of this device's
tokens, the document starts of whole rows, and the mesh axes that cut the sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain.attention.kernels import Attend, SelfAttention
from jaxtrain.attention.online_softmax import AttentionMask
from jaxtrain.context.exchange import of_traded_heads, to_heads, to_tokens
from jaxtrain.context.kernel import Around, KeyTokens, RowStarts, Tokens, attend_around
from jaxtrain.context.order import Order
from jaxtrain.context.ring import Gathered, Seats, Transport, Travelling
from jaxtrain.context.schemes import Chunks, scheme
from jaxtrain.mesh.axes import MeshAxes
from jaxtrain.remedies import Clash, Near, multiples_near, options
from jaxtrain.violations import count, flag, raise_violations


@runtime_checkable
class ContextMethod(Protocol):
    """Computes attention where a row's tokens are divided over devices. ways: their number."""

    def order(self, ways: int) -> Order:
        """Returns the order of a row's tokens on devices."""
        ...

    def trading(self, ways: int) -> int:
        """Returns the size of the groups of adjacent devices that exchange tokens for heads by an
        all-to-all, 1 if none do. Keys are sent from group to group."""
        ...

    def violations(self, ways: int, *, seq: int | None, heads: int, kv_heads: int) -> list[str]:
        """Returns the reasons why it cannot compute this, each with what would mend it. heads,
        kv_heads: of a device before the method exchanges any. seq: of whole rows, None where it is
        not known."""
        ...

    def __call__(
        self,
        kernel: Attend,
        q: Tokens,
        k: KeyTokens,
        v: KeyTokens,
        starts: RowStarts | None,
        axes: MeshAxes,
    ) -> Tokens: ...


@dataclass(frozen=True)
class RingAttention:
    """Keys and values travel from device to device, behind the arithmetic (Liu et al. 2023): memory
    is linear in a device's own tokens, and only key heads travel. A window needs few hops.

    zigzag: each device has an early and a late part of a row, so that causal work is even, 2n+1 of
    4n tiles of a device without a mask; else, in contiguous order, the last of n devices has all
    its 2n, and others wait for it. unroll: every hop is in the program; False makes a loop of them.
    """

    zigzag: bool = True
    unroll: bool = True

    def __post_init__(self) -> None:
        raise_violations(flag("zigzag", self.zigzag) + flag("unroll", self.unroll))

    def order(self, ways: int) -> Order:
        return Order(ways, self.zigzag)

    def trading(self, ways: int) -> int:
        return 1

    def violations(self, ways: int, *, seq: int | None, heads: int, kv_heads: int) -> list[str]:
        return _uncut(self.order(ways), ways, seq)

    def __call__(
        self,
        kernel: Attend,
        q: Tokens,
        k: KeyTokens,
        v: KeyTokens,
        starts: RowStarts | None,
        axes: MeshAxes,
    ) -> Tokens:
        order = self.order(lax.axis_size(axes))
        return _around(kernel, q, k, v, starts, axes, order, Travelling, unroll=self.unroll)


@dataclass(frozen=True)
class GatheredKeys:
    """Keys and values of all devices are gathered before a device's queries meet them (Llama 3,
    Dubey et al. 2024, section 3.3.2): one collective a pass, in sight of the compiler, and the
    memory of whole rows of keys. zigzag: as of `RingAttention`."""

    zigzag: bool = True

    def __post_init__(self) -> None:
        raise_violations(flag("zigzag", self.zigzag))

    def order(self, ways: int) -> Order:
        return Order(ways, self.zigzag)

    def trading(self, ways: int) -> int:
        return 1

    def violations(self, ways: int, *, seq: int | None, heads: int, kv_heads: int) -> list[str]:
        return _uncut(self.order(ways), ways, seq)

    def __call__(
        self,
        kernel: Attend,
        q: Tokens,
        k: KeyTokens,
        v: KeyTokens,
        starts: RowStarts | None,
        axes: MeshAxes,
    ) -> Tokens:
        order = self.order(lax.axis_size(axes))
        return _around(kernel, q, k, v, starts, axes, order, Gathered)


@dataclass(frozen=True)
class Ulysses:
    """Tokens are traded for heads by an all-to-all before attention, and back after it (Jacobs et
    al. 2023): each device attends to whole rows with some of the heads, by any kernel. Queries and
    outputs travel too, and nothing hides it; it sends less than a ring where there are many devices
    and few queries to a key head."""

    def order(self, ways: int) -> Order:
        return Order(ways, zigzag=False)

    def trading(self, ways: int) -> int:
        return ways

    def violations(self, ways: int, *, seq: int | None, heads: int, kv_heads: int) -> list[str]:
        untraded = _untraded(self, ways, seq, heads, kv_heads)
        return untraded + _uncut(self.order(ways), ways, seq)

    def __call__(
        self,
        kernel: Attend,
        q: Tokens,
        k: KeyTokens,
        v: KeyTokens,
        starts: RowStarts | None,
        axes: MeshAxes,
    ) -> Tokens:
        ways = lax.axis_size(axes)
        starts = of_traded_heads(starts, axes, ways)
        o = kernel(*to_heads((q, k, v), axes, ways), starts)
        return to_tokens(o, axes, ways)


@dataclass(frozen=True)
class TwoLevel:
    """Tokens traded for heads within groups of neighbouring devices, such as those of a host, and a
    ring across the groups: `Ulysses` inside, `RingAttention` outside (Fang and Zhao 2024, "USP").

    group: devices that trade. zigzag, unroll: as of `RingAttention`, of the groups.
    """

    group: int
    zigzag: bool = True
    unroll: bool = True

    def __post_init__(self) -> None:
        flags = flag("zigzag", self.zigzag) + flag("unroll", self.unroll)
        raise_violations(count("group", self.group, 2) + flags)

    def order(self, ways: int) -> Order:
        return Order(max(ways // self.group, 1), self.zigzag)

    def trading(self, ways: int) -> int:
        return self.group

    def violations(self, ways: int, *, seq: int | None, heads: int, kv_heads: int) -> list[str]:
        if ways % self.group:
            also = _instead(self, ways, seq, heads, kv_heads)
            uncut = _uncut(Order(ways, zigzag=False), ways, seq)
            return [f"{self} cuts context={ways} into no whole groups; use {also}", *uncut]
        untraded = _untraded(self, ways, seq, heads, kv_heads)
        return untraded + _uncut(self.order(ways), ways, seq)

    def __call__(
        self,
        kernel: Attend,
        q: Tokens,
        k: KeyTokens,
        v: KeyTokens,
        starts: RowStarts | None,
        axes: MeshAxes,
    ) -> Tokens:
        order, group = self.order(lax.axis_size(axes)), self.group
        traded, starts = to_heads((q, k, v), axes, group), of_traded_heads(starts, axes, group)
        if order.groups == 1:
            return to_tokens(kernel(*traded, starts), axes, group)
        q, k, v = traded
        options: dict[str, Any] = dict(group=group, unroll=self.unroll)
        o = _around(kernel, q, k, v, starts, axes, order, Travelling, **options)
        return to_tokens(o, axes, group)


def _around(
    kernel: Attend,
    q: Tokens,
    k: KeyTokens,
    v: KeyTokens,
    starts: RowStarts | None,
    axes: MeshAxes,
    order: Order,
    transport: Callable[[Seats], Transport],
    *,
    group: int = 1,
    unroll: bool = True,
) -> Tokens:
    """Attention of tokens that lie in this order on groups of devices."""
    if not isinstance(kernel, SelfAttention):
        raise ValueError(
            f"comm.attend was given {kernel!r}; where the sequence is cut a method must know the "
            f"mask: give it a SelfAttention of jaxtrain.attention, or use Execution(context="
            f"Ulysses()), which attends to whole rows by any function"
        )
    kernel.check(q, k, v)
    kernel.check_located(starts)
    scoring = kernel.scoring(q.shape[3])
    way = scheme(scoring.mask, order, q.shape[1])
    seats = Seats(axes, order.groups, group, isinstance(way, Chunks))
    call = Around(way, transport(seats), kernel.settled_kernel, scoring, unroll)
    return attend_around(call, q, k, v, starts)


def tiles_of(
    method: ContextMethod, ways: int, local: int, mask: AttentionMask
) -> list[tuple[float, int, AttentionMask]]:
    """Returns the tiles (how many, tokens of each side, mask) that a device computes, as if it had
    all heads. In contiguous order they are the last device's. local: tokens of a row on a device.
    """
    group = method.trading(ways)
    together = local * group
    if group == ways:
        return [(1 / group, together, mask)]
    way = scheme(mask, method.order(ways), together)
    row = jax.ShapeDtypeStruct((1, together), jnp.int32)
    parts = [(way.alone, way.own)]
    parts += [
        (lambda x, hop=hop: way.queries(x, hop, 0), way.mask(hop)) for hop in range(1, way.hops + 1)
    ]
    shapes = [(jax.eval_shape(part, row).shape, part_mask) for part, part_mask in parts]
    return [(count / group, size, part_mask) for (count, size), part_mask in shapes]


def _uncut(order: Order, ways: int, seq: int | None) -> list[str]:
    """Returns the violation of a row that does not divide into equal parts."""
    parts = _parts(order, ways)
    if seq is None or seq % parts == 0:
        return []
    use = f"use seq={options(multiples_near(seq, parts))}"
    also = "zigzag=False" if order.zigzag and seq % ways == 0 else ""
    how = " in zig-zag order" if order.zigzag else ""
    remedy = f"{use}, or {also}" if also else use
    return [
        Clash(
            f"seq={seq} is no multiple of {parts}, by which context={ways} divides rows{how}",
            remedy,
            sizes={"seq": seq},
            ways=[(Near("seq", seq, parts),)],
            also=also,
        )
    ]


def _parts(order: Order, ways: int) -> int:
    """Returns what divides a row of whole tokens on each device. In zig-zag order the two chunks of
    a group divide over its devices."""
    return math.lcm(2 * order.groups, ways) if order.zigzag else ways


def _instead(
    method: Ulysses | TwoLevel, ways: int, seq: int | None, heads: int, kv_heads: int
) -> str:
    """Returns the groups for which `TwoLevel` fits, and the ring that does."""
    zigzag = seq is not None and seq % _parts(Order(ways, True), ways) == 0
    also = f"RingAttention({'' if zigzag else 'zigzag=False'}), which splits no heads"
    if not isinstance(method, TwoLevel):
        return also
    both = math.gcd(heads, kv_heads)
    orders = {n: Order(ways // n, method.zigzag) for n in range(2, ways + 1) if ways % n == 0}
    fits = [
        n
        for n, order in orders.items()
        if both % n == 0 and (seq is None or seq % _parts(order, ways) == 0)
    ]
    return f"group={options(fits)}, or {also}" if fits else also


def _untraded(
    method: Ulysses | TwoLevel, ways: int, seq: int | None, heads: int, kv_heads: int
) -> list[str]:
    """Returns the violations of heads that do not split over the devices that trade them. ways:
    devices over which a row is split."""
    trading, also = method.trading(ways), _instead(method, ways, seq, heads, kv_heads)
    return [
        Clash(
            f"{method} trades over {trading} devices of context={ways}, which do not divide a "
            f"device's {name}={number}",
            f"use {also}",
            sizes={"context": ways},
            ways=[] if isinstance(method, TwoLevel) else [(Near("context", ways, 0),)],
            also=also,
        )
        for number, name in {kv_heads: "kv_heads", heads: "heads"}.items()
        if number % trading
    ]
