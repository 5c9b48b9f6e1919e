"""Cost of a collective: steps, messages, exact bytes, and alpha-beta time over one kind of link.

All are counted from the steps in `steps.py`; a step takes latency + bytes / bandwidth (Hockney
1994). With latency a, b bytes on n devices, and b/B the time to send b bytes at full bandwidth, the
time over a switch is

- ring_1, all_gather or reduce_scatter: (n-1) a + (n-1)/n b/B; all_reduce: both, 2(n-1) a +
  2(n-1)/n b/B, the fewest bytes that do it (Patarasuk & Yuan 2009; Chan et al. 2007);
- ring_2: the same bytes in n//2 steps instead of n-1;
- recursive, all_gather or reduce_scatter: ceil(log2 n) a + (n-1)/n b/B (Bruck et al. 1997);
  all_reduce: log2(n) (a + b/B), 2 more than floor(log2 n) steps where n is no power of two;
  broadcast, reduce: ceil(log2 n) (a + b/B) (Thakur, Rabenseifner & Gropp 2005); all_to_all, n a
  power of two: log2(n) (a + b/(2B));
- double_tree, all_reduce: (sqrt((2h-1) a) + sqrt(2b/B))^2, h levels (Sanders, Speck & Traff 2009).

In a ring of a torus two ports of all share the bandwidth, one each way, and messages that pass the
same link wait for one another: see `step_us`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jaxtrain.collectives.cost.steps import SCHEDULES, Permute, Step, read_message, schedule
from jaxtrain.mesh.hardware import Link

DOUBLE_TREE = "double_tree"
"""The double binary trees that NCCL (2.4 on) has for all_reduce; no code of this project."""

ALGORITHMS = (*SCHEDULES, DOUBLE_TREE)
"""What `SCHEDULES` names, and the double tree."""


@dataclass(frozen=True)
class Traffic:
    """Messages of a collective. `steps`: one after another; `device_bytes`: of the device that
    sends most; `total_bytes`, `messages`: of all devices together."""

    steps: int
    device_bytes: float
    total_bytes: float
    messages: int


@dataclass(frozen=True)
class Cost:
    """One way to run a collective on n devices over one kind of link."""

    collective: str
    algorithm: str
    n: int
    traffic: Traffic
    time_us: float


def traffic(
    collective: str, algorithm: str, n: int, buffer_bytes: int, dtype: str = "float32"
) -> Traffic:
    """Steps, messages and exact bytes of one of ALGORITHMS.

    `buffer_bytes` is the whole buffer on one device: the operand, or for all_gather and gather the
    result. `dtype` is NumPy's name.
    double_tree's buffer is in one piece: each more is a step more, and all the messages again.
    Raises ValueError with everything that is wrong: unknown names, n < 1, bytes that are negative,
    no whole elements, or do not split over n; double_tree for another collective than all_reduce.
    """
    read_message(collective, algorithm, ALGORITHMS, n, buffer_bytes, dtype)
    if algorithm == DOUBLE_TREE:
        return _tree_traffic(collective, n, buffer_bytes)
    return count(schedule(collective, algorithm, n, buffer_bytes, dtype), n)


def count(steps: Iterable[Step], n: int) -> Traffic:
    """The traffic of steps on n devices."""
    number, messages, total, everyone = 0, 0, 0.0, 0.0
    some: Counter[int] = Counter()
    for step in steps:
        number += step.times
        for permute in step.permutes:
            sent = step.times * permute.nbytes
            messages += step.times * len(permute.senders)
            total += sent * len(permute.senders)
            if len(permute.senders) == n:
                everyone += sent
            else:
                some.update({device % n: sent for device in permute.senders})
    return Traffic(number, everyone + max(some.values(), default=0), total, messages)


def cost(
    collective: str,
    algorithm: str,
    n: int,
    buffer_bytes: int,
    link: Link,
    dtype: str = "float32",
) -> Cost:
    """Traffic and time of one of ALGORITHMS, the n devices on one switch or in one ring of a torus.
    Arguments and errors as for `traffic`; also ValueError for double_tree on a torus."""
    sent = traffic(collective, algorithm, n, buffer_bytes, dtype)
    if algorithm == DOUBLE_TREE:
        return Cost(collective, algorithm, n, sent, _tree_us(sent, link))
    steps = schedule(collective, algorithm, n, buffer_bytes, dtype)
    return Cost(collective, algorithm, n, sent, time_us(steps, n, link))


def best(
    collective: str,
    n: int,
    buffer_bytes: int,
    link: Link,
    dtype: str = "float32",
    candidates: Iterable[str] | None = None,
) -> list[Cost]:
    """Returns the costs of `candidates`, cheapest first; equals stay in the order of `candidates`.
    Default: the ALGORITHMS that can run there. Arguments and errors as for `cost`."""
    if candidates is None:
        trees = collective == "all_reduce" and link.ports == 1
        candidates = ALGORITHMS if trees else SCHEDULES
    costs = [cost(collective, name, n, buffer_bytes, link, dtype) for name in candidates]
    return sorted(costs, key=lambda cost: cost.time_us)


def time_us(steps: Iterable[Step], n: int, link: Link) -> float:
    """Steps one after another: the sum of `step_us`."""
    return sum(step.times * step_us(step, n, link) for step in steps)


def step_us(step: Step, n: int, link: Link) -> float:
    """Microseconds of a step on n devices.

    A switch (one port): latency + bytes of all the step's permutes / bandwidth, since some device
    sends or receives in all of them. A ring of a torus: a message goes the shorter way, h =
    min(d, n - d) hops for distance d, and takes h latencies; the busiest link of a direction passes
    min(senders, ceil(h / gap between senders)) messages, which is h where all send; the slower of
    the two directions counts, each with one port's bandwidth.
    """
    if link.ports == 1:
        return link.latency_us + _us(sum(p.nbytes for p in step.permutes), link.bandwidth_gbytes)
    ways, longest = [0.0, 0.0], 0
    for permute in step.permutes:
        right = permute.distance % n
        hops = min(right, n - right)
        longest = max(longest, hops)
        # An exchange sends as much to the left, and is alone in its step: one way tells its time.
        ways[right > hops] += permute.nbytes * _busiest_link(permute, hops)
    return longest * link.latency_us + _us(max(ways), link.bandwidth_gbytes / link.ports)


def _busiest_link(permute: Permute, hops: int) -> int:
    # Half of an exchange's devices send each way, in runs of `distance` side by side.
    return min(len(permute.senders), -(-hops // abs(permute.senders.step)))


def _us(nbytes: float, bandwidth_gbytes: float) -> float:
    return nbytes / (bandwidth_gbytes * 1e3)


def compressed_all_reduce(
    n: int, scatter_bytes: int, gather_bytes: int, link: Link, algorithm: str = "lax"
) -> Cost:
    """An all-reduce of compressed parts: an all_to_all of `scatter_bytes`, the payload of one
    device's whole buffer, and an all_gather of `gather_bytes`, that of the whole sum; each device
    sends (n-1)/n of both (Tang et al. 2021, 1-bit Adam). Scales and indices are payload. Errors as
    for `cost`: n must divide both."""
    phases = (("all_to_all", scatter_bytes), ("all_gather", gather_bytes))
    steps = [s for name, size in phases for s in schedule(name, algorithm, n, size, "uint8")]
    sent = count(steps, n)
    return Cost("compressed_all_reduce", algorithm, n, sent, time_us(steps, n, link))


@dataclass(frozen=True)
class Level:
    """One level of a hierarchical all-reduce. `device_bytes`: what a device sends over its links
    there; `group_bytes`: what leaves each group of the levels below (a node, a rack) over them."""

    n: int
    link: Link
    device_bytes: float
    group_bytes: float
    time_us: float


def hierarchical(
    levels: Sequence[tuple[int, Link]],
    buffer_bytes: int,
    algorithm: str = "ring_2",
    dtype: str = "float32",
) -> list[Level]:
    """All-reduce over levels (n, link), fast to slow: reduce-scatter over each but the last,
    all-reduce over the last, all-gather back over the others (Cho et al. 2019, BlueConnect).

    Returns the cost of each level; their times add up. For b bytes, and m devices in a group of the
    levels below, a device sends by rings 2(n-1)/n b/m over a level's links. Its group sends m times
    as much, 2(n-1)/n b, which does not depend on m, and each device sends an equal part of that.
    One ring over the devices of all levels sends about as much out of a group, but all of it
    through one device's link; and it waits for the slow link twice for each device, not twice for
    each group. The buffer is padded to split over all levels but the last. Raises ValueError if
    there are no levels or a level has no devices, and as `cost` does.
    """
    if not levels or any(n < 1 for n, _ in levels):
        sizes = [n for n, _ in levels]
        raise ValueError(f"levels of {sizes} devices; give (n, link) of one or more, n >= 1")
    message = read_message("all_reduce", algorithm, ALGORITHMS, 1, buffer_bytes, dtype)
    part = math.prod(n for n, _ in levels[:-1])
    elements, group, result = -(-message.elements // part) * part, 1, []
    phases, kind = ("reduce_scatter", "all_gather"), message.kind
    for depth, (n, link) in enumerate(levels, start=1):
        if depth == len(levels):
            phases = ("all_reduce",)
        costs = [
            cost(phase, algorithm, n, elements * kind.itemsize, link, kind.dtype)
            for phase in phases
        ]
        sent, time_us = sum(c.traffic.device_bytes for c in costs), sum(c.time_us for c in costs)
        result.append(Level(n, link, sent, group * sent, time_us))
        elements, group = elements // n, group * n
    return result


def _tree_traffic(collective: str, n: int, buffer_bytes: int) -> Traffic:
    """Both trees at once, each with half the buffer: up every edge to be summed, then down."""
    if collective != "all_reduce":
        raise ValueError(f"double_tree is an all_reduce only; use recursive for {collective}")
    trees = double_tree(n)
    sent = Counter(device for tree in trees for edge in tree.items() for device in edge)
    half = buffer_bytes / 2
    return Traffic(
        steps=2 * max(_height(tree) for tree in trees),
        device_bytes=half * max(sent.values(), default=0),
        total_bytes=half * sent.total(),
        messages=sent.total(),
    )


def _tree_us(sent: Traffic, link: Link) -> float:
    """Time in us if the buffer is sent in k pieces, one after another: steps + k - 1 rounds, in
    each of which a device sends at most one piece of its bytes. The best k is the root of (steps -
    1) times device_bytes / bandwidth / latency (Sanders, Speck & Traff 2009)."""
    if link.ports > 1:
        raise ValueError(
            f"double_tree needs a switch, and {link.name} is a torus; use ring_2 or recursive"
        )
    unsplit, further = _us(sent.device_bytes, link.bandwidth_gbytes), max(0, sent.steps - 1)
    if not link.latency_us:
        return unsplit  # the limit of ever smaller pieces
    ideal = math.sqrt(further * unsplit / link.latency_us)
    pieces = {max(1, math.floor(ideal)), max(1, math.ceil(ideal))}
    times = [(further + k) * (link.latency_us + unsplit / k) for k in pieces]
    return min(times) if sent.steps else 0.0


def double_tree(n: int) -> tuple[dict[int, int], dict[int, int]]:
    """{child: parent} of the two binary trees over n devices, as NCCL numbers them: in order, so
    that in the first the odd devices have no children, and the second, mirrored or, for odd n,
    shifted by one, has none for the even ones (but for device 0 where n is odd)."""
    first = {}
    for child in range(1, n):
        gap = child & -child
        parent = child + gap if (child + gap) & (2 * gap) else child - gap
        first[child] = parent if parent < n else child - gap

    def renumbered(i: int) -> int:
        return (i + 1) % n if n % 2 else n - 1 - i

    return first, {renumbered(child): renumbered(parent) for child, parent in first.items()}


def _height(parents: dict[int, int]) -> int:
    highest = 0
    for device in parents:
        edges = 0
        while device in parents:
            device, edges = parents[device], edges + 1
        highest = max(highest, edges)
    return highest
