"""Remedies of sizes that do not fit together: each is tried before it is named.

A `Clash` is a violation that says which sizes would mend it. `settled` takes the nearest values of
each, changes what is refused by one of them alone, and names those after which neither the clash
nor any other violation of that size is left.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from itertools import islice, product
from typing import Any, NamedTuple, TypeVar

Change = dict[str, int]
"""New values of sizes, by name."""
Subject = TypeVar("Subject")
TRIES, SIZE = 12, 2**31
"""Values tried on each side of a size by each step; beyond any size."""


class Near(NamedTuple):
    """Values of a size that may mend a clash: multiples of `step` near `value`. A step of 0 is of a
    mesh axis: the divisors of its value."""

    name: str
    value: int
    step: int = 1


Way = tuple[Near, ...]
"""Sizes that change together, in most cases one."""


class Clash(str):
    """A violation of sizes, with a remedy that satisfies its own rule.

    rule: the violation without a remedy. sizes: those that the rule is of, by field; None of a
    field that was left out. ways: what may be changed. joint: the same where no way does. also:
    what mends it besides, in words.
    """

    __slots__ = ("also", "joint", "rule", "sizes", "ways")
    rule: str
    sizes: Mapping[str, int | None]
    ways: tuple[Way, ...]
    joint: tuple[Way, ...]
    also: str

    def __new__(
        cls,
        rule: str,
        remedy: str,
        *,
        sizes: Mapping[str, int | None],
        ways: Sequence[Way],
        joint: Sequence[Way] = (),
        also: str = "",
    ) -> Clash:
        clash = super().__new__(cls, f"{rule}; {remedy}")
        clash.also = also
        clash.rule, clash.sizes = rule, dict(sizes)
        clash.ways, clash.joint = tuple(ways), tuple(joint)
        return clash

    @property
    def remedy(self) -> str:
        """The violation without its rule."""
        return self.removeprefix(f"{self.rule}; ")

    def under(self, where: str) -> Clash:
        """The same violation of a part named `where`."""
        return self.changed(rule=where + self.rule)

    def changed(self, **changes: Any) -> Clash:
        """The same with another rule, remedy, sizes or ways."""
        names = ("rule", "remedy", "sizes", "ways", "joint", "also")
        return Clash(**{name: getattr(self, name) for name in names} | changes)


def under(where: str, violations: Iterable[str]) -> list[str]:
    """The violations of a part named `where`; clashes stay clashes."""
    return [v.under(where) if isinstance(v, Clash) else where + v for v in violations]


def multiples_near(value: int, step: int) -> list[int]:
    """The multiples of `step` next to a value, itself where it is one."""
    return sorted({value // step * step or step, -(-value // step) * step})


def smaller_axis(size: int, sizes: Sequence[int]) -> list[int]:
    """The largest size of the last of these mesh axes, smaller than it is, with which they would
    split a dim of `size`; none where the others do not."""
    last, others = sizes[-1], math.prod(sizes[:-1])
    fits = [n for n in range(1, last) if last % n == 0 and size % (others * n) == 0]
    return fits[-1:]


def options(values: Iterable[int]) -> str:
    """`64 or 68`."""
    return " or ".join(map(str, values))


def settled(
    violations: Iterable[str],
    subject: Subject,
    *,
    change: Callable[[Subject, Clash, Change], Subject | None],
    violations_of: Callable[[Subject], Iterable[str]],
    parts: Mapping[str, int] | None = None,
    whole: Callable[[Change], Change] = dict,
) -> list[str]:
    """The violations, each clash with remedies that were tried; what changes no size of the subject
    keeps the remedy that it has.

    change: the subject with new values, None where it has no such size. violations_of: those of a
    changed subject, the cheap ones first. parts: what sizes must be multiples of as well. whole:
    a change with what must change along with it.
    """
    steps = parts or {}

    def mends(clash: Clash, new: Change) -> bool:
        try:
            other = change(subject, clash, new)
            return other is not None and not _remains(clash, new, violations_of(other))
        except Exception:  # a user's own configuration or model may refuse it in any way
            return False

    def has_sizes(clash: Clash, way: Way) -> bool:
        new = {near.name: near.value for near in way}
        try:
            return change(subject, clash, new) is not None
        except Exception:  # as above
            return True

    def first(clash: Clash, changes: Iterable[Change]) -> list[Change]:
        return list(islice((new for new in map(whole, changes) if mends(clash, new)), 1))

    def tried(clash: Clash) -> Clash:
        sizes = [way for way in clash.ways if way[0].step]
        if sizes and not any(has_sizes(clash, way) for way in sizes):
            return clash
        remedies = [
            [new for side in _sides(way[0], steps) for new in first(clash, side)]
            for way in clash.ways
        ]
        texts = [_either(changes) for changes in remedies if changes]
        alone = any(new and way[0].step for new, way in zip(remedies, clash.ways, strict=True))
        if not alone:
            joint = (new for way in clash.joint for new in _joint(way, steps))
            texts = [_words(new) for new in first(clash, joint)] + texts
        also = [clash.also] if clash.also else []
        use = f"use {', or '.join([*texts, *also])}"
        if alone or not sizes:
            return clash.changed(remedy=use)
        names = " or ".join(dict.fromkeys(way[0].name for way in sizes))
        none = f"no near value of {names} alone satisfies every rule"
        return clash.changed(remedy=f"{none}; {use}" if texts or clash.also else none)

    return [tried(v) if isinstance(v, Clash) else v for v in violations]


def resized(node: Any, clash: Clash, new: Change) -> Any:
    """A configuration with new sizes wherever it has those of the clash; None where it does not
    have all that change."""
    touched: set[str] = set()

    def visit(node: Any) -> Any:
        if isinstance(node, tuple) and not hasattr(node, "_fields"):
            return tuple(map(visit, node))
        if not is_dataclass(node) or isinstance(node, type):
            return node
        values = {field.name: getattr(node, field.name) for field in fields(node)}
        shared = clash.sizes.keys() & values.keys()
        changes = {name: visit(value) for name, value in values.items()}
        if shared and all(values[name] == clash.sizes[name] for name in shared):
            own = {name: size for name, size in new.items() if name in values}
            touched.update(own)
            changes |= own
        changes = {k: v for k, v in changes.items() if v is not values[k]}
        return replace(node, **changes) if changes else node

    changed = visit(node)
    return changed if touched == new.keys() else None


def _words(new: Change) -> str:
    return " with ".join(f"{name}={value}" for name, value in new.items())


def _either(changes: Sequence[Change]) -> str:
    """One after another, those of one size without its name but for the first."""
    if any(len(new) > 1 for new in changes):
        return ", or ".join(map(_words, changes))
    ((name, _),) = changes[0].items()
    return f"{name}={options(new[name] for new in changes)}"


def _remains(clash: Clash, new: Change, violations: Iterable[str]) -> bool:
    """Whether the clash, or any other violation of what was changed, is left."""
    named = re.compile("|".join(rf"(?<!\w){name}={value}(?!\d)" for name, value in new.items()))
    rules = (v.rule if isinstance(v, Clash) else v.partition("; ")[0] for v in violations)
    return any(rule == clash.rule or named.search(rule) for rule in rules)


def _sides(near: Near, parts: Mapping[str, int]) -> list[list[Change]]:
    """The values below a size and those above it, the nearest first: multiples of its step, and
    of its step and its parts together, which may lie too far apart to be met one by one."""
    name, value, step = near
    if not step:
        return [[{name: n} for n in range(value - 1, 0, -1) if value % n == 0]]
    steps = {step, math.lcm(step, parts.get(name, 1))}
    below = {n for by in steps for n in islice(range(value // by * by, 0, -by), TRIES)}
    above = {n for by in steps for n in islice(range(-(-value // by) * by, SIZE, by), TRIES)}
    ordered = sorted(below, reverse=True), sorted(above - below)
    return [[{name: n} for n in side if n <= 4 * max(value, *steps)] for side in ordered]


def _nearest(near: Near, parts: Mapping[str, int]) -> list[int]:
    values = [new[near.name] for side in _sides(near, parts) for new in side]
    return sorted(values, key=lambda value: abs(value - near.value))[:TRIES]


def _joint(way: Way, parts: Mapping[str, int]) -> Iterator[Change]:
    """New values of several sizes, those nearest to the old ones first, by ratio."""
    choices = [_nearest(near, parts) for near in way]

    def distance(values: tuple[int, ...]) -> float:
        return sum(abs(math.log(n / near.value)) for n, near in zip(values, way, strict=True))

    for values in sorted(product(*choices), key=distance):
        yield dict(zip((near.name for near in way), values, strict=True))
