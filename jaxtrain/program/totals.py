"""Totals over a compiled program: every call followed, every loop multiplied by its trip count.

A branch of a `conditional` counts as often as it is taken, if the program itself determines that
(`values.py`): a pipeline's head stands in a branch that a constant table of its loop selects. In
other conditionals, branches under the name scope FALLBACK (for rare inputs) do not count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from jaxtrain.program.loops import trip_count
from jaxtrain.program.text import Computation, Instruction, Module, calls
from jaxtrain.program.values import LoopTurn, Scope

_T = TypeVar("_T")

FALLBACK = "fallback"
"""Name scope of a branch for inputs that are not expected."""


def fold(
    module: Module,
    own: Callable[[Computation, Instruction], _T],
    add: Callable[[list[_T]], _T],
    times: Callable[[_T, int], _T],
    choose: Callable[[list[_T]], _T],
) -> _T:
    """Total of `own` over the entry and all it calls. Loops are multiplied by `times`; branches
    that run an unknown number of times are combined by `choose`."""
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

    def _total(self, scope: Scope, turns: Sequence[LoopTurn]) -> _T:
        """Total of a computation, over these turns of the loop around it."""
        name = scope.body.name
        if self._branches(name):
            parts = [p for op in self._instructions(name) for p in self._parts(scope, op, turns)]
            return self._add(parts)
        if name not in self._once:
            parts = [p for op in self._instructions(name) for p in self._parts(scope, op, [None])]
            self._once[name] = self._add(parts)
        return self._times(self._once[name], len(turns))

    def _instructions(self, name: str) -> list[Instruction]:
        return list(self._module.computations[name].instructions.values())

    def _branches(self, name: str) -> bool:
        """True if a computation, or one that it calls, has a conditional."""
        if name not in self._branching:
            self._branching[name] = any(
                instruction.opcode == "conditional"
                or any(map(self._branches, callees(instruction)))
                for instruction in self._instructions(name)
            )
        return self._branching[name]

    def _parts(self, scope: Scope, instruction: Instruction, turns: Sequence[LoopTurn]) -> list[_T]:
        parts = [self._times(self._own(scope.body, instruction), len(turns))]
        if instruction.opcode == "conditional":
            return [*parts, *self._branch_parts(scope, instruction, turns)]
        if instruction.opcode == "while":
            # If nothing counts in it, a loop needs no trip count: one over data may have none.
            inner = self._turn(scope, instruction, [None])
            if inner:
                count = trip_count(self._module, scope.body, instruction)
                inner = self._times(self._turn(scope, instruction, range(count)), len(turns))
            return [*parts, inner]
        called = [name for group in calls(instruction) for name in group]
        return [*parts, *(self._total(scope.called(instruction, name), turns) for name in called)]

    def _turn(self, scope: Scope, loop: Instruction, turns: Sequence[LoopTurn]) -> _T:
        condition = Scope(self._module, loop.names("condition")[0])
        return self._add([self._total(condition, turns), self._total(scope.looped(loop), turns)])

    def _branch_parts(
        self, scope: Scope, instruction: Instruction, turns: Sequence[LoopTurn]
    ) -> list[_T]:
        """Parts of a conditional's branches."""
        (group,) = calls(instruction)
        branches = [scope.branch(instruction, i, name) for i, name in enumerate(group)]
        chosen = [scope.chosen(instruction, turn) for turn in turns]
        if None in chosen:
            usual = [branch for branch in branches if not _is_fallback(branch.body)]
            some = self._choose([self._total(branch, [None]) for branch in usual or branches])
            return [self._times(some, len(turns))]
        parts = []
        for number, branch in enumerate(branches):
            branch_turns = [turn for turn, i in zip(turns, chosen, strict=True) if i == number]
            parts += [self._total(branch, branch_turns)] if branch_turns else []
        return parts


def _is_fallback(branch: Computation) -> bool:
    return any(FALLBACK in op.op_name.split("/") for op in branch.instructions.values())


def callees(op: Instruction) -> list[str]:
    """Computations that an instruction calls, the body of a loop included."""
    body = op.names("body") + op.names("condition") if op.opcode == "while" else ()
    return [*body, *(name for group in calls(op) for name in group)]
