"""Evaluates a compiled program's own integers: counters, and constants that they index.

XLA runs a loop's `conditional` by a constant table: the branch of each turn is arithmetic on the
program's own text, done here turn by turn. A value that depends on the program's input data is
None.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxtrain.program.loops import trip_count
from jaxtrain.program.text import Instruction, Module, Shape, calls

LoopTurn = int | None
"""Turn of the innermost loop around a computation; None: any turn, for values equal in all."""
Value = Any
"""An integer or boolean array; for a tuple, a function from index to value; None: unknown."""
LARGEST = 1 << 20
"""Most elements of an array that is evaluated."""

_UNARY = {
    "convert": np.asarray,
    "copy": np.asarray,
    "negate": operator.neg,
    "not": np.invert,
    "abs": np.abs,
}
_BINARY = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
}
_COMPARISONS = {
    "LT": operator.lt,
    "LE": operator.le,
    "GT": operator.gt,
    "GE": operator.ge,
    "EQ": operator.eq,
    "NE": operator.ne,
}
_MOVED = ("select", "clamp", "bitcast", "reshape", "dynamic-slice", "slice", "broadcast")
_DONE = frozenset({*_UNARY, *_BINARY, "compare", *_MOVED})
_INTEGER = re.compile(r"[su](8|16|32)")


class Scope:
    """A computation at a call site. arguments: (number of a parameter, turn) -> its value."""

    def __init__(
        self,
        module: Module,
        name: str,
        arguments: Callable[[int, LoopTurn], Value] = lambda *_: None,
    ) -> None:
        self.module, self.body, self._arguments = module, module.computations[name], arguments
        self._values: dict[tuple[str, LoopTurn], Value] = {}

    def called(self, site: Instruction, name: str) -> Scope:
        """The computation `name`, as the call or fusion `site` runs it."""
        return Scope(
            self.module, name, lambda number, turn: self.value(site.operands[number], turn)
        )

    def branch(self, site: Instruction, number: int, name: str) -> Scope:
        """Branch `number` of the conditional `site`; it has one parameter."""
        return Scope(self.module, name, lambda _, turn: self.value(site.operands[1 + number], turn))

    def looped(self, site: Instruction) -> Scope:
        """The body of the `while` `site`; its turns then count."""
        return _WhileLoop(self, site).scope

    def chosen(self, site: Instruction, turn: LoopTurn) -> int | None:
        """Index of the branch that a conditional takes in `turn`; None if unknown."""
        value = self.value(site.operands[0], turn)
        if value is None:
            return None
        branches = len(next(calls(site)))
        if "true_computation" in site.attributes:
            return 0 if value.item() else 1
        index = int(value.item())
        return index if 0 <= index < branches else branches - 1

    def value(self, name: str, turn: LoopTurn) -> Value:
        """Value of an instruction of this computation."""
        if (name, turn) not in self._values:
            self._values[name, turn] = self._evaluate(self.body.instructions[name], turn)
        return self._values[name, turn]

    def _evaluate(self, instruction: Instruction, turn: LoopTurn) -> Value:
        if instruction.opcode == "tuple":
            return lambda i: self.value(instruction.operands[i], turn)
        if instruction.opcode == "parameter":
            return self._arguments(int(instruction.operands[0]), turn)
        if instruction.opcode == "get-tuple-element":
            return _element(
                self.value(instruction.operands[0], turn), int(instruction.attributes["index"])
            )
        if instruction.opcode == "while":
            return _WhileLoop(self, instruction).after(turn)
        if instruction.opcode in ("copy-start", "copy-done"):
            value = self.value(instruction.operands[0], turn)
            return (lambda i: value) if instruction.opcode == "copy-start" else _element(value, 0)
        if instruction.opcode in ("fusion", "call"):
            inner = self.called(instruction, next(calls(instruction))[0])
            return inner.value(inner.body.root, turn)
        if len(instruction.shapes) != 1 or not _small(instruction):
            return None
        if instruction.opcode == "constant":
            return _literal(instruction)
        if instruction.opcode not in _DONE:
            return None
        operands = [self.value(operand, turn) for operand in instruction.operands]
        if any(value is None or callable(value) for value in operands):
            return None
        return _in_range(_computed(instruction, operands), instruction.shapes[0])


class _WhileLoop:
    """A `while` in its caller's scope, with its state in each turn."""

    def __init__(self, caller: Scope, site: Instruction) -> None:
        self._caller, self._site = caller, site
        self._states: dict[int, list[Value]] = {}
        self.scope = Scope(caller.module, site.names("body")[0], lambda _, turn: self._state(turn))

    def _state(self, turn: LoopTurn) -> Value:
        return lambda i: self._entry(i, None) if self._stays(i) else self._at(i, turn)

    def after(self, outer: LoopTurn) -> Value:
        """The state after the loop, in turn `outer` of a loop around it."""

        def element(i: int) -> Value:
            if self._stays(i):
                return self._entry(i, outer)
            try:
                return self._at(i, trip_count(self._caller.module, self._caller.body, self._site))
            except ValueError:
                return None

        return element

    def _entry(self, i: int, outer: LoopTurn) -> Value:
        return _element(self._caller.value(self._site.operands[0], outer), i)

    def _stays(self, i: int) -> bool:
        """True if every turn passes on that element unchanged."""
        body = self.scope.body
        if body.instructions[body.root].opcode != "tuple":
            return False
        source = body.instructions[body.instructions[body.root].operands[i]]
        while source.opcode == "copy":
            source = body.instructions[source.operands[0]]
        passed_on = source.opcode == "get-tuple-element" and int(source.attributes["index"]) == i
        return passed_on and body.instructions[source.operands[0]].opcode == "parameter"

    def _at(self, i: int, turn: LoopTurn) -> Value:
        """Element `i` in `turn`, evaluated turn by turn; earlier turns are cached. Of an outer loop
        only values that are equal in all its turns are known."""
        if turn is None:
            return None
        states = self._states.setdefault(i, [self._entry(i, None)])
        while len(states) <= turn:
            states.append(_element(self.scope.value(self.scope.body.root, len(states) - 1), i))
        return states[turn]


def _element(value: Value, i: int) -> Value:
    return value(i) if callable(value) else None


def _small(instruction: Instruction) -> bool:
    (shape,) = instruction.shapes
    is_integer = shape.dtype == "pred" or _INTEGER.fullmatch(shape.dtype) is not None
    return is_integer and shape.elements <= LARGEST


def _literal(instruction: Instruction) -> Value:
    """Value of a constant; None if the text leaves its elements out (`{...}`)."""
    (shape,) = instruction.shapes
    words = re.findall(r"-?\d+|true|false|\.\.\.", ",".join(instruction.operands))
    if "..." in words or len(words) != shape.elements:
        return None
    numbers = [int(word) if word not in ("true", "false") else word == "true" for word in words]
    return np.array(numbers, bool if shape.dtype == "pred" else np.int64).reshape(shape.dims)


def _in_range(value: Value, shape: Shape) -> Value:
    """The value in the type of `shape`; None if it overflows, since the program's wraps."""
    if value is None or shape.dtype == "pred":
        return None if value is None else np.asarray(value, bool)
    bits, value = int(shape.dtype[1:]), np.asarray(value, np.int64)
    least, most = (-(2 ** (bits - 1)), 2 ** (bits - 1)) if shape.dtype[0] == "s" else (0, 2**bits)
    return value if ((value >= least) & (value < most)).all() else None


def _computed(instruction: Instruction, operands: list[Any]) -> Value:
    """Result of one of the operations in `_DONE`."""
    (shape,) = instruction.shapes
    if instruction.opcode in _UNARY:
        return _UNARY[instruction.opcode](*operands)
    if instruction.opcode in _BINARY:
        return _BINARY[instruction.opcode](*operands)
    if instruction.opcode == "compare":
        return _COMPARISONS[instruction.attributes["direction"]](*operands)
    if instruction.opcode == "select":
        return np.where(*operands)
    if instruction.opcode == "clamp":
        low, x, high = operands
        return np.clip(x, low, high)
    if instruction.opcode == "broadcast":
        return None if operands[0].shape else np.broadcast_to(operands[0], shape.dims)
    if instruction.opcode == "slice":
        parts = re.findall(r"\[(\d+):(\d+)(?::(\d+))?\]", instruction.attributes["slice"])
        return operands[0][tuple(slice(int(a), int(b), int(c or 1)) for a, b, c in parts)]
    if instruction.opcode == "dynamic-slice":
        table, *starts = operands
        room = zip(starts, table.shape, shape.dims, strict=True)
        first = [min(max(int(start), 0), dim - size) for start, dim, size in room]
        return table[tuple(slice(a, a + size) for a, size in zip(first, shape.dims, strict=True))]
    # A bitcast keeps the order in memory, which for a vector does not depend on the layout.
    vector = operands[0].size in (1, *operands[0].shape) and shape.elements in (1, *shape.dims)
    return operands[0].reshape(shape.dims) if vector or instruction.opcode == "reshape" else None
