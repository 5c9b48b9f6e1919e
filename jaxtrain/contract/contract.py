"""The communication contract: a step's predicted collectives against those of its program.

`traffic.py` predicts. The program is read twice. As compiled: how often each collective runs and
the bytes it sends, with loops and branches counted by the program's own constants. As handed to
XLA: the size and dtype of each, before a compiler widens any. Known rewrites of compilers are
undone by name, here; any other difference breaks the contract.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import NamedTuple

import numpy as np

from jaxtrain.planner.assembled import facts_of, why_not_predicted
from jaxtrain.planner.traffic import Sent, step_traffic
from jaxtrain.program.collectives import SENT, Collective
from jaxtrain.program.groups import DeviceGroups
from jaxtrain.step.assembly import Assembly

DTYPES = {
    **{"float32": "f32", "bfloat16": "bf16", "float16": "f16", "float64": "f64"},
    **{"uint8": "u8", "int32": "s32"},
}
"""NumPy's names -> HLO's."""


class Key(NamedTuple):
    """Fields by which collectives are grouped."""

    kind: str
    axes: tuple[str, ...]
    dtype: str


@dataclass(frozen=True)
class Line:
    """One key of the contract: how often in a step, and the bytes each device sends.

    A variadic collective counts once for each of its arrays. unread: some collectives are in a
    branch whose predicate the program does not give; they count as often as they may run. joined:
    the compiler may have joined several into one, with the same total of bytes.
    """

    key: Key
    predicted: int
    predicted_bytes: float
    compiled: int
    compiled_bytes: float
    why: tuple[str, ...]
    unread: bool = False
    joined: bool = False

    @property
    def kept(self) -> bool:
        same = math.isclose(self.predicted_bytes, self.compiled_bytes, rel_tol=1e-12)
        as_often = self.predicted == self.compiled
        fewer = self.joined and 0 < self.compiled < self.predicted
        return same and (as_often or fewer) and not self.unread

    def __str__(self) -> str:
        unread = "at most, in a branch whose predicate cannot be read, " if self.unread else ""
        return (
            f"{_words(self.key)}: predicted {self.predicted} of {self.predicted_bytes:,.0f} bytes, "
            f"compiled {unread}{self.compiled} of {self.compiled_bytes:,.0f}"
        )


@dataclass(frozen=True)
class Handed:
    """Collectives of one key and size as they are handed to XLA.
    lowered: how often they may run. XLA leaves out those whose result is not read, and of some
      sizes all: the compiled program's `Line` tells whether one of them ran.
    """

    key: Key
    buffer_bytes: int
    predicted: int
    lowered: int

    @property
    def kept(self) -> bool:
        return self.predicted <= self.lowered

    def __str__(self) -> str:
        return (
            f"{_words(self.key)} of {self.buffer_bytes:,} bytes: predicted {self.predicted}, "
            f"handed to XLA {self.lowered}"
        )


@dataclass(frozen=True)
class Contract:
    """Every key of either side, compiled and as handed to XLA, and the undone rewrites."""

    lines: tuple[Line, ...]
    handed: tuple[Handed, ...]
    rewrites: tuple[str, ...]

    @property
    def broken(self) -> list[Line | Handed]:
        return [line for line in (*self.lines, *self.handed) if not line.kept]


def contract(
    assembly: Assembly, lowered: Sequence[Collective], compiled: Sequence[Collective]
) -> Contract:
    """Returns the contract of an explicit step.

    lowered, compiled: what `lowered_collectives` and `collectives` read from its program. Raises
      ValueError with `why_not_predicted`'s reason, if any.
    """
    if why := why_not_predicted(assembly):
        raise ValueError(why)
    predicted_sends = step_traffic(facts_of(assembly))
    sent, rewrites = as_compiled(predicted_sends, assembly)
    predicted = _totals(sent, assembly.sizes)
    totals = collective_totals(compiled, assembly.sizes)
    unread = set(
        collective_totals(
            (collective for collective in compiled if collective.in_branch), assembly.sizes
        )
    )
    lines, joins = [], assembly.spec.platform == "gpu"
    for key in sorted({**predicted, **totals}):
        count, size = predicted.get(key, (0, 0.0))
        compiled_count, compiled_size = totals.get(key, (0, 0.0))
        why = tuple(dict.fromkeys(s.why for s in sent if _key(s) == key))
        line = Line(key, count, size, compiled_count, compiled_size, why, unread=key in unread)
        lines.append(replace(line, joined=joins and key.kind == "all-reduce"))
    if any(line.kept and line.compiled < line.predicted for line in lines):
        rewrites += ("XLA:GPU joins all-reduces of one kind: fewer, of as many bytes",)
    return Contract(
        tuple(lines), _handed_collectives(predicted_sends, lowered, assembly.sizes), rewrites
    )


def _handed_collectives(
    sent: Iterable[Sent], lowered: Iterable[Collective], sizes: Mapping[str, int]
) -> tuple[Handed, ...]:
    predicted: Counter[tuple[Key, int]] = Counter()
    lowered_counts: Counter[tuple[Key, int]] = Counter()
    for collective in sent:
        predicted[_key(collective), collective.buffer_bytes] += collective.count
    for operation in lowered:
        if operation.group_size > 1:
            key = Key(operation.kind, axes_of(operation.groups, sizes), operation.dtype)
            lowered_counts[key, operation.buffer_bytes] += operation.count
    keys = sorted({**predicted, **lowered_counts})
    return tuple(
        Handed(*key_size, predicted[key_size], lowered_counts[key_size]) for key_size in keys
    )


def as_compiled(sent: list[Sent], assembly: Assembly) -> tuple[list[Sent], tuple[str, ...]]:
    """Returns `sent` with the platform's known compiler rewrites, and a text for each."""
    wide = [_widen(collective) for collective in sent]
    if assembly.spec.platform != "cpu" or wide == sent:
        return sent, ()
    return wide, ("XLA:CPU sends bf16 as fp32",)


def _widen(sent: Sent) -> Sent:
    if sent.dtype != "bfloat16":
        return sent
    return replace(sent, dtype="float32", buffer_bytes=2 * sent.buffer_bytes)


def _key(sent: Sent) -> Key:
    return Key(sent.kind, sent.axes, DTYPES[sent.dtype])


def _words(key: Key) -> str:
    return f"{key.kind} over {' x '.join(key.axes)} in {key.dtype}"


def _totals(sent: list[Sent], sizes: Mapping[str, int]) -> dict[Key, tuple[int, float]]:
    counts: Counter[Key] = Counter()
    nbytes: dict[Key, float] = {}
    for line in sent:
        key = _key(line)
        devices = math.prod(sizes[axis] for axis in line.axes)
        counts[key] += line.count
        wire_bytes = line.count * line.buffer_bytes * SENT[line.kind](devices)
        nbytes[key] = nbytes.get(key, 0.0) + wire_bytes
    return {key: (counts[key], nbytes[key]) for key in counts}


def collective_totals(
    compiled: Iterable[Collective], sizes: Mapping[str, int]
) -> dict[Key, tuple[int, float]]:
    """Returns counts and bytes of a program's collectives by key. sizes: the program's mesh axes,
    in order."""
    totals: dict[Key, tuple[int, float]] = {}
    for collective in compiled:
        if collective.group_size == 1:
            continue
        key = key_of(collective, sizes)
        count, size = totals.get(key, (0, 0.0))
        arrays = collective.count * collective.arrays
        totals[key] = (count + arrays, size + collective.total_wire_bytes)
    return totals


def key_of(collective: Collective, sizes: Mapping[str, int]) -> Key:
    """Returns the key of a program's collective. sizes: the program's mesh axes, in order."""
    return Key(collective.kind, axes_of(collective.groups, sizes), collective.dtype)


def axes_of(groups: DeviceGroups, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Returns the fewest mesh axes such that the devices of each group differ along these alone.
    Groups need not fill the axes: a permute may connect some devices only."""
    ids = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
    names = tuple(sizes)
    for count in range(len(names) + 1):
        for chosen in combinations(range(len(names)), count):
            remaining = [i for i in range(len(names)) if i not in chosen]
            ways = math.prod(ids.shape[i] for i in chosen)
            row_of = np.empty(ids.size, int)
            row_of[ids.transpose([*remaining, *chosen]).reshape(-1)] = np.arange(ids.size) // ways
            if all(len(set(row_of[list(group)])) == 1 for group in groups):
                return tuple(names[i] for i in chosen)
    raise AssertionError("all axes together hold every group")
