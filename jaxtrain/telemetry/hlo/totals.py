"""Totals over a compiled program: every call followed, every loop multiplied by its trip count.

Of a `conditional` each branch counts as often as it is taken, where the program itself settles that
(`values.py`): a pipeline's head stands in a branch that a constant table of its loop opens. Of
others, those traced under the name scope FALLBACK, for inputs that hardly occur, do not count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from jaxtrain.telemetry.hlo.loops import trip_count
from jaxtrain.telemetry.hlo.text import Computation, Instruction, Module, calls
from jaxtrain.telemetry.hlo.values import Scope, Turn

_T = TypeVar("_T")

FALLBACK = "fallback"
"""Name scope of what a program holds for inputs that are not expected, in a branch of its own."""


def fold(
    module: Module,
    own: Callable[[Computation, Instruction], _T],
    add: Callable[[list[_T]], _T],
    times: Callable[[_T, int], _T],
    choose: Callable[[list[_T]], _T],
) -> _T:
    """Total of `own` over the entry and all it calls: loops by `times`, branches of which the
    program does not say how often they are taken by `choose`."""
    return _Fold(module, own, add, times, choose).entry()


class _Fold(Generic[_T]):
    def __init__(
        self,
        module: Module,
        own: Callable[[Computation, Instruction], _T],
        add: Callable[[list[_T]], _T],
        times: Callable[[_T, int], _T],
        choose: Callable[[list[_T]], _T],
    ) -> None:
        self._module, self._own, self._add = module, own, add
        self._times, self._choose = times, choose
        self._branching: dict[str, bool] = {}
        self._once: dict[str, _T] = {}

    def entry(self) -> _T:
        return self._total(Scope(self._module, self._module.entry), [None])

    def _total(self, scope: Scope, turns: Sequence[Turn]) -> _T:
        """Of a computation in all these turns of the loop around it."""
        name = scope.body.name
        if self._branches(name):
            parts = [part for each in self._each(name) for part in self._of(scope, each, turns)]
            return self._add(parts)
        if name not in self._once:
            parts = [part for each in self._each(name) for part in self._of(scope, each, [None])]
            self._once[name] = self._add(parts)
        return self._times(self._once[name], len(turns))

    def _each(self, name: str) -> list[Instruction]:
        return list(self._module.computations[name].instructions.values())

    def _branches(self, name: str) -> bool:
        """Whether a conditional stands in a computation, or in any that it calls."""
        if name not in self._branching:
            self._branching[name] = any(
                each.opcode == "conditional" or any(map(self._branches, _below(each)))
                for each in self._each(name)
            )
        return self._branching[name]

    def _of(self, scope: Scope, each: Instruction, turns: Sequence[Turn]) -> list[_T]:
        parts = [self._times(self._own(scope.body, each), len(turns))]
        if each.opcode == "conditional":
            return [*parts, *self._taken(scope, each, turns)]
        if each.opcode == "while":
            # An empty loop needs no trip count, and a loop over data may be empty of our subject.
            inner = self._turn(scope, each, [None])
            if inner:
                count = trip_count(self._module, scope.body, each)
                inner = self._times(self._turn(scope, each, range(count)), len(turns))
            return [*parts, inner]
        called = [name for group in calls(each) for name in group]
        return [*parts, *(self._total(scope.called(each, name), turns) for name in called)]

    def _turn(self, scope: Scope, loop: Instruction, turns: Sequence[Turn]) -> _T:
        condition = Scope(self._module, loop.names("condition")[0])
        return self._add([self._total(condition, turns), self._total(scope.looped(loop), turns)])

    def _taken(self, scope: Scope, each: Instruction, turns: Sequence[Turn]) -> list[_T]:
        """Of a conditional's branches."""
        (group,) = calls(each)
        branches = [scope.branch(each, i, name) for i, name in enumerate(group)]
        chosen = [scope.chosen(each, turn) for turn in turns]
        if None in chosen:
            usual = [branch for branch in branches if not _is_fallback(branch.body)]
            some = self._choose([self._total(branch, [None]) for branch in usual or branches])
            return [self._times(some, len(turns))]
        parts = []
        for number, branch in enumerate(branches):
            taken = [turn for turn, i in zip(turns, chosen, strict=True) if i == number]
            parts += [self._total(branch, taken)] if taken else []
        return parts


def _is_fallback(branch: Computation) -> bool:
    return any(FALLBACK in each.op_name.split("/") for each in branch.instructions.values())


def _below(each: Instruction) -> list[str]:
    """What an instruction calls, the body of a loop too."""
    body = each.names("body") + each.names("condition") if each.opcode == "while" else ()
    return [*body, *(name for group in calls(each) for name in group)]
