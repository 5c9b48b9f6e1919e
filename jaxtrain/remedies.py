"""Remedies for sizes that do not fit together: each is tried before it is named.

A `Clash` is a violation with the sizes that could resolve it. `settled` tries the nearest values of
each size, and names those that leave neither the clash nor any other violation of that size.
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
"""Values tried on each side of a size with each step; a number above all sizes."""


class Near(NamedTuple):
    """Candidate values of a size: multiples of `step` near `value`. A step of 0 means a mesh axis:
    the divisors of its value."""

    name: str
    value: int
    step: int = 1


NearSizes = tuple[Near, ...]
"""Sizes that change together, in most cases one."""


class Clash(str):
    """A violation of sizes, with a remedy that satisfies its own rule.

    rule: the violation without a remedy. sizes: the sizes in the rule, by field; None for a field
    that was left out. ways: sizes that may be changed. joint: the same if no way resolves it. also:
    another remedy, in words.
    """

    __slots__ = ("also", "joint", "rule", "sizes", "ways")
    rule: str
    sizes: Mapping[str, int | None]
    ways: tuple[NearSizes, ...]
    joint: tuple[NearSizes, ...]
    also: str

    def __new__(
        cls,
        rule: str,
        remedy: str,
        *,
        sizes: Mapping[str, int | None],
        ways: Sequence[NearSizes],
        joint: Sequence[NearSizes] = (),
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

    def under(self, prefix: str) -> Clash:
        """Returns the same violation of a part named `prefix`."""
        return self.changed(rule=prefix + self.rule)

    def changed(self, **changes: Any) -> Clash:
        """Returns the same clash with another rule, remedy, sizes or ways."""
        names = ("rule", "remedy", "sizes", "ways", "joint", "also")
        return Clash(**{name: getattr(self, name) for name in names} | changes)


def under(where: str, violations: Iterable[str]) -> list[str]:
    """Returns the violations of a part named `prefix`; clashes stay clashes."""
    return [v.under(where) if isinstance(v, Clash) else where + v for v in violations]


def multiples_near(value: int, step: int) -> list[int]:
    """Returns the multiples of `step` next to a value, or the value itself if it is one."""
    return sorted({value // step * step or step, -(-value // step) * step})


def smaller_axis(size: int, sizes: Sequence[int]) -> list[int]:
    """Returns the largest smaller size of the last of these mesh axes with which all of them split
    a dim of `size`; [] where the others do not."""
    last, other_ways = sizes[-1], math.prod(sizes[:-1])
    fits = [n for n in range(1, last) if last % n == 0 and size % (other_ways * n) == 0]
    return fits[-1:]


def options(values: Iterable[int]) -> str:
    """Returns the values as `64 or 68`."""
    return " or ".join(map(str, values))


def settled(
    violations: Iterable[str],
    subject: Subject,
    *,
    change: Callable[[Subject, Clash, Change], Subject | None],
    violations_of: Callable[[Subject], Iterable[str]],
    parts: Mapping[str, int] | None = None,
    complete: Callable[[Change], Change] = dict,
) -> list[str]:
    """Returns the violations, each clash with remedies that were tried; a clash without sizes of
    the subject keeps its remedy.

    change: returns the subject with new values, None where it has no such size. violations_of:
    returns those of a changed subject, the cheap ones first. parts: numbers of which sizes must be
    multiples as well. complete: adds the sizes that must change too.
    """
    steps = parts or {}

    def mends(clash: Clash, new: Change) -> bool:
        try:
            other = change(subject, clash, new)
            return other is not None and not _remains(clash, new, violations_of(other))
        except Exception:  # a user's own configuration or model may refuse it in any way
            return False

    def has_sizes(clash: Clash, way: NearSizes) -> bool:
        new = {near.name: near.value for near in way}
        try:
            return change(subject, clash, new) is not None
        except Exception:  # as above
            return True

    def first_remedy(clash: Clash, changes: Iterable[Change]) -> list[Change]:
        return list(islice((new for new in map(complete, changes) if mends(clash, new)), 1))

    def with_remedies(clash: Clash) -> Clash:
        sizes = [way for way in clash.ways if way[0].step]
        if sizes and not any(has_sizes(clash, way) for way in sizes):
            return clash
        remedies = [
            [new for side in _sides(way[0], steps) for new in first_remedy(clash, side)]
            for way in clash.ways
        ]
        texts = [_either(changes) for changes in remedies if changes]
        alone_suffices = any(
            new and way[0].step for new, way in zip(remedies, clash.ways, strict=True)
        )
        if not alone_suffices:
            joint = (new for way in clash.joint for new in _joint(way, steps))
            texts = [_words(new) for new in first_remedy(clash, joint)] + texts
        also = [clash.also] if clash.also else []
        use = f"use {', or '.join([*texts, *also])}"
        if alone_suffices or not sizes:
            return clash.changed(remedy=use)
        names = " or ".join(dict.fromkeys(way[0].name for way in sizes))
        failure = f"no near value of {names} alone satisfies every rule"
        return clash.changed(remedy=f"{failure}; {use}" if texts or clash.also else failure)

    return [with_remedies(v) if isinstance(v, Clash) else v for v in violations]


def resized(node: Any, clash: Clash, new: Change) -> Any:
    """Returns a configuration with new sizes wherever it has those of the clash; None where it
    lacks some of the changed sizes."""
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
            new_sizes = {name: size for name, size in new.items() if name in values}
            touched.update(new_sizes)
            changes |= new_sizes
        changes = {k: v for k, v in changes.items() if v is not values[k]}
        return replace(node, **changes) if changes else node

    changed = visit(node)
    return changed if touched == new.keys() else None


def _words(new: Change) -> str:
    return " with ".join(f"{name}={value}" for name, value in new.items())


def _either(changes: Sequence[Change]) -> str:
    """Text of alternative changes: `a=1 with b=2, or ...`; `a=1 or 2` if all change `a` alone."""
    if any(len(new) > 1 for new in changes):
        return ", or ".join(map(_words, changes))
    ((name, _),) = changes[0].items()
    return f"{name}={options(new[name] for new in changes)}"


def _remains(clash: Clash, new: Change, violations: Iterable[str]) -> bool:
    """True if the clash, or any other violation of the changed sizes, remains."""
    named = re.compile("|".join(rf"(?<!\w){name}={value}(?!\d)" for name, value in new.items()))
    rules = (v.rule if isinstance(v, Clash) else v.partition("; ")[0] for v in violations)
    return any(rule == clash.rule or named.search(rule) for rule in rules)


def _sides(near: Near, parts: Mapping[str, int]) -> list[list[Change]]:
    """Returns the values below a size and those above it, the nearest first: multiples of its step,
    and multiples of both its step and its parts, which may be too rare among the former."""
    name, value, step = near
    if not step:
        return [[{name: n} for n in range(value - 1, 0, -1) if value % n == 0]]
    steps = {step, math.lcm(step, parts.get(name, 1))}
    below = {
        n for stride in steps for n in islice(range(value // stride * stride, 0, -stride), TRIES)
    }
    above = {
        n
        for stride in steps
        for n in islice(range(-(-value // stride) * stride, SIZE, stride), TRIES)
    }
    ordered = sorted(below, reverse=True), sorted(above - below)
    return [[{name: n} for n in side if n <= 4 * max(value, *steps)] for side in ordered]


def _nearest(near: Near, parts: Mapping[str, int]) -> list[int]:
    values = [new[near.name] for side in _sides(near, parts) for new in side]
    return sorted(values, key=lambda value: abs(value - near.value))[:TRIES]


def _joint(way: NearSizes, parts: Mapping[str, int]) -> Iterator[Change]:
    """Yields new values of several sizes, the nearest to the old ones first, by ratio."""
    choices = [_nearest(near, parts) for near in way]

    def distance(values: tuple[int, ...]) -> float:
        return sum(abs(math.log(n / near.value)) for n, near in zip(values, way, strict=True))

    for values in sorted(product(*choices), key=distance):
        yield dict(zip((near.name for near in way), values, strict=True))
