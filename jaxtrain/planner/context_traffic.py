"""Predicts what attention sends if rows are split over devices: keys that travel, and tokens traded
for heads.

The numbers follow `context/`: the hops of `schemes.py`, the permutes of `ring.py`, the all-to-alls
of `exchange.py`. Keys and values are sent together, and so are sums of their gradients, in fp32.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from jaxtrain.mesh.roles import Roles
from jaxtrain.operations.collectives import Communication, HeadExchange, KeyGather
from jaxtrain.planner.facts import SequenceFacts, StepFacts
from jaxtrain.planner.sent import Sent, collective_traffic, itemsize_of, times, ways


def forward(
    facts: StepFacts, roles: Roles, collectives: Iterable[Communication], why: str = ""
) -> Iterator[Sent]:
    """Yields the collectives of the forward pass."""
    s = facts.sequence
    for collective in collectives if s is not None else ():
        assert s is not None
        if isinstance(collective, KeyGather):
            yield from _keys(facts, s, roles, collective, f"keys{why}")
        elif isinstance(collective, HeadExchange):
            yield from _trade(facts, s, roles, collective, why)


def backward(
    facts: StepFacts, roles: Roles, collectives: Iterable[Communication]
) -> Iterator[Sent]:
    """Yields the collectives of the gradients of what these collectives bring."""
    s = facts.sequence
    for collective in collectives if s is not None else ():
        assert s is not None
        if isinstance(collective, HeadExchange):
            yield from _trade(facts, s, roles, collective, ", backward")
        elif isinstance(collective, KeyGather):
            yield from _keys(facts, s, roles, collective, "keys, for gradients")
            yield from _key_gradients(facts, s, roles, collective)


def _keys(
    facts: StepFacts, s: SequenceFacts, roles: Roles, keys: KeyGather, why: str
) -> Iterator[Sent]:
    """Yields the sends that bring all keys and values to a device once."""
    size = _key_elements(facts, roles, keys)
    if s.gathered:
        gathered_size = size * ways(facts, s.axes)
        yield from collective_traffic(
            facts, why, "all_gather", "lax", s.axes, facts.compute, gathered_size
        )
        return
    hops, chunks = _hops(s, keys)
    if not hops:
        return
    last = _moved(facts, s, why, facts.compute, size, chunks, 1)
    yield from times(last, hops - 1)
    # Beyond half of the line, no first chunk has earlier keys that have not arrived already.
    yield from last[: len(last) - (chunks and hops >= s.groups)]


def _key_gradients(
    facts: StepFacts, s: SequenceFacts, roles: Roles, keys: KeyGather
) -> Iterator[Sent]:
    size, why = _key_elements(facts, roles, keys), "gradients of keys"
    if s.gathered:
        global_size = size * ways(facts, s.axes)
        yield from collective_traffic(
            facts, why, "reduce_scatter", "lax", s.axes, "float32", global_size
        )
        return
    hops, chunks = _hops(s, keys)
    if hops:
        yield from times(_moved(facts, s, why, "float32", size, chunks, 1), hops - 1)
        yield from _moved(facts, s, f"{why}, home", "float32", size, chunks, -hops)


def _trade(
    facts: StepFacts, s: SequenceFacts, roles: Roles, trade: HeadExchange, why: str
) -> Iterator[Sent]:
    """Yields the exchange of tokens for heads: of queries, keys and values before attention, of its
    output after it."""
    if s.group == 1:
        return
    size = facts.tokens * trade.heads // ways(facts, roles.heads) * trade.head_dim
    line = f"heads for tokens{why}" if trade.back else f"tokens for heads{why}"
    if s.groups == 1:
        yield from collective_traffic(facts, line, "all_to_all", "lax", s.axes, facts.compute, size)
        return
    part_size = size // s.group
    yield from times([_permute(facts, s, line, facts.compute, part_size)], s.group - 1)


def _key_elements(facts: StepFacts, roles: Roles, keys: KeyGather) -> int:
    """Elements of a device's keys and values; the same if tokens are traded for heads."""
    return facts.tokens * 2 * keys.heads // ways(facts, roles.kv_heads) * keys.head_dim


def _hops(s: SequenceFacts, keys: KeyGather) -> tuple[int, bool]:
    """Returns how often keys travel, and whether in two chunks (`schemes.Chunks`)."""
    together = s.local * s.group
    window = keys.window if (keys.window or 0) < s.groups * together else None
    if window is None:
        return s.groups - 1, False
    chunks = s.zigzag and keys.causal
    size, most = (together // 2, 2 * s.groups - 1) if chunks else (together, s.groups - 1)
    return min(most, -(-(window - 1) // size)), chunks


def _moved(
    facts: StepFacts, s: SequenceFacts, why: str, dtype: str, size: int, chunks: bool, shift: int
) -> list[Sent]:
    """Returns the permutes that collective the values of all places of a ring by `shift` places
    (`ring.Seats.moved`)."""
    if not chunks:
        return [_permute(facts, s, why, dtype, size)]
    line = 2 * s.groups
    ways_on = set()
    for place in range(line):
        ends = (place, place + shift)
        (source, seat), (target, next_seat) = (_seat(end % line, s.groups) for end in ends)
        if seat != next_seat:
            ways_on.add((source, target))
    return [_permute(facts, s, why, dtype, size // 2) for _ in ways_on]


def _seat(place: int, groups: int) -> tuple[bool, int]:
    """Returns (True if it is the second of its seat, the seat) for a place in the line."""
    return (True, 2 * groups - 1 - place) if place >= groups else (False, place)


def _permute(facts: StepFacts, s: SequenceFacts, why: str, dtype: str, elements: int) -> Sent:
    order = tuple(a for a in facts.sizes if a in s.axes)
    return Sent(why, "collective-permute", order, dtype, elements * itemsize_of(dtype), 1)
