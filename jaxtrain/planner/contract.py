"""The communication contract: what a step was predicted to send against what its program sends.

The predicted side is `traffic.py`'s; the other is read from the program alone, twice. As compiled:
how often each collective runs and the bytes it sends, loops and branches counted by the program's
own constants. As handed to XLA: the size and dtype of each, before a compiler widens any. What
compilers are known to rewrite is undone by name, here; any other difference breaks the contract.
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
from jaxtrain.step.assembly import Assembly
from jaxtrain.telemetry.hlo.collectives import SENT, Collective
from jaxtrain.telemetry.hlo.groups import Groups

DTYPES = {
    **{"float32": "f32", "bfloat16": "bf16", "float16": "f16", "float64": "f64"},
    **{"uint8": "u8", "int32": "s32"},
}
"""NumPy's names -> HLO's."""


class Key(NamedTuple):
    """What collectives are told apart by."""

    kind: str
    axes: tuple[str, ...]
    dtype: str


@dataclass(frozen=True)
class Line:
    """One key of the contract: how often in a step, and the bytes each device sends. A variadic
    collective counts once for each of its arrays. unread: some stand in a branch of which the
    program does not say how often it is taken, and count as often as they may run. joined: several
    may have been made one, of as many bytes."""

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
    """Collectives of one key and size as they are handed to XLA. lowered: how often they may run;
    XLA leaves out those whose result nobody reads."""

    key: Key
    buffer_bytes: int
    predicted: int
    lowered: int

    @property
    def kept(self) -> bool:
        return 0 < self.predicted <= self.lowered

    def __str__(self) -> str:
        return (
            f"{_words(self.key)} of {self.buffer_bytes:,} bytes: predicted {self.predicted}, "
            f"handed to XLA {self.lowered}"
        )


@dataclass(frozen=True)
class Contract:
    """Every key that either side has, compiled and as handed to XLA, and in words the rewrites that
    were undone."""

    lines: tuple[Line, ...]
    handed: tuple[Handed, ...]
    rewrites: tuple[str, ...]

    @property
    def broken(self) -> list[Line | Handed]:
        return [line for line in (*self.lines, *self.handed) if not line.kept]


def contract(
    assembly: Assembly, lowered: Sequence[Collective], compiled: Sequence[Collective]
) -> Contract:
    """The contract of an explicit step. Raises ValueError with `why_not_predicted`, where there is
    a reason.

    lowered, compiled: what `lowered_collectives` and `collectives` read of its program.
    """
    if why := why_not_predicted(assembly):
        raise ValueError(why)
    stated = step_traffic(facts_of(assembly))
    sent, rewrites = as_compiled(stated, assembly)
    predicted = _totals(sent, assembly.sizes)
    found = collective_totals(compiled, assembly.sizes)
    unread = set(collective_totals((each for each in compiled if each.in_branch), assembly.sizes))
    lines, joins = [], assembly.spec.platform == "gpu"
    for key in sorted({**predicted, **found}):
        count, size = predicted.get(key, (0, 0.0))
        compiled_count, compiled_size = found.get(key, (0, 0.0))
        why = tuple(dict.fromkeys(s.why for s in sent if _key(s) == key))
        line = Line(key, count, size, compiled_count, compiled_size, why, unread=key in unread)
        lines.append(replace(line, joined=joins and key.kind == "all-reduce"))
    if any(line.kept and line.compiled < line.predicted for line in lines):
        rewrites += ("XLA:GPU joins all-reduces of one kind: fewer, of as many bytes",)
    return Contract(tuple(lines), _handed_collectives(stated, lowered, assembly.sizes), rewrites)


def _handed_collectives(
    stated: Iterable[Sent], lowered: Iterable[Collective], sizes: Mapping[str, int]
) -> tuple[Handed, ...]:
    predicted: Counter[tuple[Key, int]] = Counter()
    found: Counter[tuple[Key, int]] = Counter()
    for each in stated:
        predicted[_key(each), each.buffer_bytes] += each.count
    for each in lowered:
        if each.group_size > 1:
            key = Key(each.kind, axes_of(each.groups, sizes), each.dtype)
            found[key, each.buffer_bytes] += each.count
    both = sorted({**predicted, **found})
    return tuple(Handed(*which, predicted[which], found[which]) for which in both)


def as_compiled(sent: list[Sent], assembly: Assembly) -> tuple[list[Sent], tuple[str, ...]]:
    """`sent` as the platform's compiler is known to change it, and those changes in words."""
    wide = [_widen(each) for each in sent]
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
    for each in sent:
        key = _key(each)
        n = math.prod(sizes[a] for a in each.axes)
        counts[key] += each.count
        nbytes[key] = nbytes.get(key, 0.0) + each.count * each.buffer_bytes * SENT[each.kind](n)
    return {key: (counts[key], nbytes[key]) for key in counts}


def collective_totals(
    compiled: Iterable[Collective], sizes: Mapping[str, int]
) -> dict[Key, tuple[int, float]]:
    """Counts and bytes of a program's collectives by key; `sizes` are its mesh axes, in order."""
    found: dict[Key, tuple[int, float]] = {}
    for each in compiled:
        if each.group_size == 1:
            continue
        key = key_of(each, sizes)
        count, size = found.get(key, (0, 0.0))
        arrays = each.count * each.arrays
        found[key] = (count + arrays, size + each.total_wire_bytes)
    return found


def key_of(each: Collective, sizes: Mapping[str, int]) -> Key:
    """What a program's collective is told apart by; `sizes` are its mesh axes, in order."""
    return Key(each.kind, axes_of(each.groups, sizes), each.dtype)


def axes_of(groups: Groups, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The fewest mesh axes along which the groups lie: a permute may connect some devices only."""
    ids = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
    names = tuple(sizes)
    for count in range(len(names) + 1):
        for chosen in combinations(range(len(names)), count):
            rest = [i for i in range(len(names)) if i not in chosen]
            ways = math.prod(ids.shape[i] for i in chosen)
            row_of = np.empty(ids.size, int)
            row_of[ids.transpose([*rest, *chosen]).reshape(-1)] = np.arange(ids.size) // ways
            if all(len(set(row_of[list(group)])) == 1 for group in groups):
                return tuple(names[i] for i in chosen)
    raise AssertionError("all axes together hold every group")
