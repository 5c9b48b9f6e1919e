"""The communication contract: what a step was predicted to send against what its program sends.

The predicted side is `traffic.py`'s; the compiled side is read from the program's own text. What
compilers are known to rewrite is undone by name, here; any other difference breaks the contract.

A program does not say how often a branch is taken. Those of a pipeline are taken by constants of
its schedule's tables, so what stands in them is counted by the tables (`as_run`).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import NamedTuple

import numpy as np

from jaxtrain.planner.assembled import facts_of, followed, unpredicted
from jaxtrain.planner.traffic import Sent, step_traffic
from jaxtrain.telemetry.hlo import SENT, Collective
from jaxtrain.telemetry.hlo_groups import Groups
from jaxtrain.train.assembly import Assembly, platform_of

DTYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "float64": "f64", "uint8": "u8"}
"""NumPy's names -> HLO's."""


class Key(NamedTuple):
    """What collectives are told apart by."""

    kind: str
    axes: tuple[str, ...]
    dtype: str


@dataclass(frozen=True)
class Line:
    """One key of the contract: how often in a step, and the bytes each device sends. A variadic
    collective counts once for each of its arrays."""

    key: Key
    predicted: int
    predicted_bytes: float
    compiled: int
    compiled_bytes: float
    why: tuple[str, ...]

    @property
    def kept(self) -> bool:
        same = math.isclose(self.predicted_bytes, self.compiled_bytes, rel_tol=1e-12)
        return same and self.predicted == self.compiled


@dataclass(frozen=True)
class Contract:
    """Every key that either side has, and in words the rewrites that were undone and what was
    counted by more than the program's text."""

    lines: tuple[Line, ...]
    rewrites: tuple[str, ...]

    @property
    def broken(self) -> list[Line]:
        return [line for line in self.lines if not line.kept]


def contract(assembly: Assembly, compiled: Sequence[Collective]) -> Contract:
    """The contract of an explicit step. Raises ValueError where it is `unpredicted`."""
    if why := unpredicted(assembly):
        raise ValueError(why)
    sent, rewrites = rewritten(step_traffic(facts_of(assembly)), assembly)
    predicted = _totals(sent, assembly.sizes)
    ran = as_run(compiled, assembly)
    if ran != list(compiled):
        rewrites = (*rewrites, BY_THE_TABLES)
    found = seen(ran, assembly.sizes)
    lines = []
    for key in sorted({**predicted, **found}):
        count, size = predicted.get(key, (0, 0.0))
        compiled_count, compiled_size = found.get(key, (0, 0.0))
        why = tuple(dict.fromkeys(s.why for s in sent if _key(s) == key))
        lines.append(Line(key, count, size, compiled_count, compiled_size, why))
    return Contract(tuple(lines), rewrites)


BY_THE_TABLES = (
    "collectives in the branches for embedding, head and their gradients count as often as the "
    "pipeline's tables run them; the program's text says only in how many ticks it may"
)
_BRANCH = re.compile(r"\bticks(\d+)/(?:.*/)?(enter|leave|exit)/")
"""The executor's names of a loop of ticks and of what it does in some of them only."""


def as_run(compiled: Iterable[Collective], assembly: Assembly) -> list[Collective]:
    """`compiled` with those in the branches of a pipeline counted as often as its tables run them.

    The text counts them in every tick of their loop. The loop and the branch are in the name of the
    operation; the tables say in how many of the loop's ticks the branch is taken. What is in a
    branch of another name keeps its count, which is the most that may be.
    """
    if assembly.pipeline is None:
        return list(compiled)
    rows, loops = followed(assembly)

    def counted(each: Collective) -> Collective:
        name = _BRANCH.search(each.op_name) if each.in_branch else None
        if name is None or int(name[1]) >= len(loops):
            return each
        loop = loops[int(name[1])]
        taken = int((getattr(rows, name[2])[loop.start : loop.stop] >= 0).sum())
        count, rest = divmod(each.count * taken, loop.stop - loop.start)
        return each if rest else replace(each, count=count, in_branch=False)

    return [counted(each) for each in compiled]


def rewritten(sent: list[Sent], assembly: Assembly) -> tuple[list[Sent], tuple[str, ...]]:
    """`sent` as the platform's compiler is known to change it, and those changes in words."""
    wide = [_widened(each) for each in sent]
    if platform_of(assembly.spec) != "cpu" or wide == sent:
        return sent, ()
    return wide, ("XLA:CPU sends bf16 as fp32",)


def _widened(sent: Sent) -> Sent:
    if sent.dtype != "bfloat16":
        return sent
    return replace(sent, dtype="float32", buffer_bytes=2 * sent.buffer_bytes)


def _key(sent: Sent) -> Key:
    return Key(sent.kind, sent.axes, DTYPES[sent.dtype])


def _totals(sent: list[Sent], sizes: Mapping[str, int]) -> dict[Key, tuple[int, float]]:
    counts: Counter[Key] = Counter()
    nbytes: dict[Key, float] = {}
    for each in sent:
        key = _key(each)
        n = math.prod(sizes[a] for a in each.axes)
        counts[key] += each.count
        nbytes[key] = nbytes.get(key, 0.0) + each.count * each.buffer_bytes * SENT[each.kind](n)
    return {key: (counts[key], nbytes[key]) for key in counts}


def seen(compiled: Iterable[Collective], sizes: Mapping[str, int]) -> dict[Key, tuple[int, float]]:
    """Counts and bytes of a program's collectives by key; `sizes` are its mesh axes, in order."""
    found: dict[Key, tuple[int, float]] = {}
    for each in compiled:
        if each.group_size == 1:
            continue
        key = Key(each.kind, axes_of(each.groups, sizes), each.dtype)
        count, size = found.get(key, (0, 0.0))
        arrays = each.count * each.arrays
        found[key] = (count + arrays, size + each.total_wire_bytes)
    return found


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
