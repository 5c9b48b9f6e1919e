"""The algorithms of this package written out as data: which device sends how many bytes how far.

An algorithm is a list of steps one after another, a step a few permutes side by side: those of
`ring.py` and `recursive.py`, one for one (a test compares them with the traced programs). From
these `cost` counts bytes and time. Nothing here imports JAX: algorithms have names, and what is
sent is bytes of a dtype.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from jaxtrain.violations import did_you_mean, raise_violations

COLLECTIVES = (
    *("all_gather", "reduce_scatter", "all_reduce", "all_to_all"),
    *("broadcast", "reduce", "gather", "scatter"),
)
"""The functions of `algorithm.py`."""

PADDED = ("all_reduce", "broadcast", "reduce")
"""Collectives of any number of elements; of the others n must divide the buffer."""


@dataclass(frozen=True)
class Permute:
    """Each of `senders` sends `nbytes` of `dtype` to the device `distance` further on, modulo n.
    `exchange`: instead, the devices whose numbers differ in just the bit `distance` send to each
    other. Devices are numbered from the root."""

    nbytes: float
    dtype: str
    senders: range
    distance: int
    exchange: bool = False


@dataclass(frozen=True)
class Step:
    """Permutes that run side by side, `times` times in a row."""

    permutes: tuple[Permute, ...]
    times: int = 1


@dataclass(frozen=True)
class Kind:
    """NumPy's name of a dtype, and the bytes of an element."""

    dtype: str
    itemsize: int

    def of(self, elements: float) -> Callable[..., Permute]:
        """The permutes that send so many."""
        return partial(Permute, elements * self.itemsize, self.dtype)


@dataclass(frozen=True)
class Message:
    """A collective on n devices of `elements` in the whole buffer, each of `kind`."""

    collective: str
    n: int
    elements: int
    kind: Kind


def schedule(
    collective: str, algorithm: str, n: int, buffer_bytes: int, dtype: str = "float32"
) -> list[Step]:
    """The steps of `algorithm`, one of SCHEDULES, on n devices.

    `buffer_bytes` is the whole buffer on one device: the operand, or for all_gather and gather the
    result. `dtype` is NumPy's name. Raises ValueError as `read_message` does.
    """
    message = read_message(collective, algorithm, tuple(SCHEDULES), n, buffer_bytes, dtype)
    return SCHEDULES[algorithm](message) if n > 1 else []


def read_message(
    collective: str,
    algorithm: str,
    algorithms: tuple[str, ...],
    n: int,
    buffer_bytes: int,
    dtype: str,
) -> Message:
    """Returns the message of a collective. Raises ValueError with all violations: unknown names,
    n < 1, and bytes that are negative, no whole elements or do not split over n."""
    problems = []
    for field, value, allowed in (
        ("collective", collective, COLLECTIVES),
        ("algorithm", algorithm, algorithms),
    ):
        if value not in allowed:
            names = ", ".join(allowed)
            near = did_you_mean(value, allowed).removesuffix(f"; use one of {names}")
            problems.append(f"{field} {value!r} is none of {names}{near}")
    if n < 1:
        problems.append(f"n={n} devices; a collective has at least 1")
    if buffer_bytes < 0:
        problems.append(f"buffer_bytes={buffer_bytes} is negative; give the bytes of the buffer")
    itemsize = itemsize_of(dtype)
    if not itemsize:
        problems.append(f"dtype {dtype!r} has no known size; use a name like float32 or int8")
    part = itemsize * (1 if collective in PADDED else n)
    if not problems and buffer_bytes % part:
        over = "" if part == itemsize else f" that split over n={n} devices"
        problems.append(
            f"buffer_bytes={buffer_bytes} are no {dtype} elements{over}; "
            f"pad to {-(-buffer_bytes // part) * part}"
        )
    raise_violations(problems, f"{algorithm} {collective}")
    return Message(collective, n, buffer_bytes // itemsize, Kind(dtype, itemsize))


def itemsize_of(dtype: str) -> int:
    """Bytes of one element; 0 where the name says none."""
    named = re.fullmatch(r"(bfloat|float|uint|int|complex)(8|16|32|64|128)(_[a-z0-9]+)?", dtype)
    return int(named[2]) // 8 if named else 0


def _ring(message: Message, directions: int, unroll: bool = True) -> list[Step]:
    """`ring.Ring(directions, unroll)`: tiles of ceil(elements / n)."""
    return _neighbours(message, -(-message.elements // message.n), directions, unroll)


def _neighbours(message: Message, size: float, directions: int, unroll: bool) -> list[Step]:
    """Each step sends a tile of `size` elements to the right neighbour, with two directions to the
    left one too, until the n - 1 others are reached. all_to_all sends its tiles straight to their
    owners, a step each though none waits for another; looped, it sends in each step as much as in
    the first."""
    n, everyone = message.n, range(message.n)
    several = message.kind.of
    tile = several(size)
    right = n - 1 if directions == 1 else n // 2
    left = n - 1 - right

    def chains(to_right: Permute, to_left: Permute) -> list[Step]:
        both, single = Step((to_right, to_left), left), Step((to_right,), right - left)
        return [step for step in (both, single) if step.times]

    round_all = chains(tile(everyone, 1), tile(everyone, -1))
    scatter = chains(tile(range(right), 1), tile(range(0, -left, -1), -1))
    gather = chains(tile(range(-right, 0), 1), tile(range(1, left + 1), -1))
    exchange = chains(several(right * size)(everyone, 1), several(left * size)(everyone, -1))
    if unroll:
        direct = [(h,) if h > left else (h, -h) for h in range(1, right + 1)]
        exchange = [Step(tuple(tile(everyone, d) for d in step)) for step in direct]
    return {
        "all_gather": round_all,
        "reduce_scatter": round_all,
        "all_reduce": round_all + round_all,
        "all_to_all": exchange,
        "broadcast": scatter + round_all,
        "reduce": round_all + gather,
        "gather": gather,
        "scatter": scatter,
    }[message.collective]


def _recursive(message: Message) -> list[Step]:
    """`recursive.Recursive()`: ceil(log2 n) steps, in each a partner at distance 1, 2, 4, ..."""
    n, everyone = message.n, range(message.n)
    buffer = message.kind.of(message.elements)
    tile = message.elements // n

    def tiles(count: int) -> Callable[..., Permute]:
        return message.kind.of(count * tile)

    up = [1 << k for k in range((n - 1).bit_length())]
    inner = 1 << (n.bit_length() - 1)
    doubling = [buffer(range(inner), d, exchange=True) for d in up if d < inner]
    if inner < n:  # devices beyond a power of two send theirs first, and get the sum at the end
        doubling = [
            buffer(range(inner, n), -inner),
            *doubling,
            buffer(range(n - inner), inner),
        ]
    if n == inner:
        gather = [tiles(d)(everyone, d, exchange=True) for d in up]
    else:
        gather = [tiles(min(d, n - d))(everyone, -d) for d in up]
    permutes = {
        "all_gather": gather,
        "reduce_scatter": [replace(step, distance=abs(step.distance)) for step in gather[::-1]],
        "all_reduce": doubling,
        "all_to_all": [tiles(sum(i & d > 0 for i in everyone))(everyone, d) for d in up],
        "broadcast": [buffer(range(min(d, n - d)), d) for d in up],
        "reduce": [buffer(range(d, min(2 * d, n)), -d) for d in up[::-1]],
        "gather": [tiles(d)(range(d, n, 2 * d), -d) for d in up],
        "scatter": [tiles(d)(range(0, n - d, 2 * d), d) for d in up[::-1]],
    }
    return [Step((permute,)) for permute in permutes[message.collective]]


_UNROOTED = {
    "broadcast": "all_reduce",
    "reduce": "all_reduce",
    "gather": "all_gather",
    "scatter": "reduce_scatter",
}


def _lax(message: Message) -> list[Step]:
    """`lax_form.Lax()`, whose rooted collectives are masked ones of all devices. How the compiler
    moves bytes is its own affair; counted are the fewest, as unpadded rings in two
    directions send them."""
    name = _UNROOTED.get(message.collective, message.collective)
    plain = replace(message, collective=name)
    return _neighbours(plain, message.elements / message.n, directions=2, unroll=True)


SCHEDULES: dict[str, Callable[[Message], list[Step]]] = {
    "lax": _lax,
    "ring_1": lambda message: _ring(message, 1),
    "ring_2": lambda message: _ring(message, 2),
    "ring_1_looped": lambda message: _ring(message, 1, unroll=False),
    "ring_2_looped": lambda message: _ring(message, 2, unroll=False),
    "recursive": _recursive,
}
"""`Lax()`, `Ring(1)`, `Ring(2)`, the same with unroll=False, `Recursive()`. `lax` is counted as
unpadded rings in two directions, its rooted collectives as the ones of
all devices that they are."""
