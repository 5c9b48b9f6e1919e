"""Integers that a compiled program settles by itself: its counters, and constants they index.

XLA runs a loop's `conditional` by a table that it has as a constant: which branch is taken in which
turn is arithmetic on the program's own text, done here turn by turn. What depends on the data that
a program is given is None.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxtrain.telemetry.hlo.loops import trip_count
from jaxtrain.telemetry.hlo.text import Instruction, Module, Shape, calls

Turn = int | None
"""Of the innermost loop around a computation; None: of any of its turns, what is alike in all."""
Value = Any
"""An integer or boolean array; of a tuple a function from positions to values; None: unknown."""
LARGEST = 1 << 20
"""Elements of an array beyond which nothing is worked out."""

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
    """A computation where it is called. given: (number of a parameter, turn) -> its value."""

    def __init__(
        self, module: Module, name: str, given: Callable[[int, Turn], Value] = lambda *_: None
    ) -> None:
        self.module, self.body, self._given = module, module.computations[name], given
        self._known: dict[tuple[str, Turn], Value] = {}

    def called(self, site: Instruction, name: str) -> Scope:
        """The computation `name` as a call or a fusion here runs it."""
        return Scope(
            self.module, name, lambda number, turn: self.value(site.operands[number], turn)
        )

    def branch(self, site: Instruction, number: int, name: str) -> Scope:
        """Branch `number` of a conditional here; it has one parameter."""
        return Scope(self.module, name, lambda _, turn: self.value(site.operands[1 + number], turn))

    def looped(self, site: Instruction) -> Scope:
        """The body of a `while` here, whose turns then count."""
        return _Loop(self, site).scope

    def chosen(self, site: Instruction, turn: Turn) -> int | None:
        """Which branch a conditional here takes in that turn."""
        value = self.value(site.operands[0], turn)
        if value is None:
            return None
        branches = len(next(calls(site)))
        if "true_computation" in site.attributes:
            return 0 if value.item() else 1
        index = int(value.item())
        return index if 0 <= index < branches else branches - 1

    def value(self, name: str, turn: Turn) -> Value:
        """Of an instruction of this computation."""
        if (name, turn) not in self._known:
            self._known[name, turn] = self._worked_out(self.body.instructions[name], turn)
        return self._known[name, turn]

    def _worked_out(self, made: Instruction, turn: Turn) -> Value:
        if made.opcode == "tuple":
            return lambda i: self.value(made.operands[i], turn)
        if made.opcode == "parameter":
            return self._given(int(made.operands[0]), turn)
        if made.opcode == "get-tuple-element":
            return _element(self.value(made.operands[0], turn), int(made.attributes["index"]))
        if made.opcode == "while":
            return _Loop(self, made).after(turn)
        if made.opcode in ("copy-start", "copy-done"):
            value = self.value(made.operands[0], turn)
            return (lambda i: value) if made.opcode == "copy-start" else _element(value, 0)
        if made.opcode in ("fusion", "call"):
            inner = self.called(made, next(calls(made))[0])
            return inner.value(inner.body.root, turn)
        if len(made.shapes) != 1 or not _small(made):
            return None
        if made.opcode == "constant":
            return _literal(made)
        if made.opcode not in _DONE:
            return None
        operands = [self.value(operand, turn) for operand in made.operands]
        if any(each is None or callable(each) for each in operands):
            return None
        return _held(_computed(made, operands), made.shapes[0])


class _Loop:
    """A `while` in its caller's scope: its state, turn by turn."""

    def __init__(self, caller: Scope, site: Instruction) -> None:
        self._caller, self._site = caller, site
        self._states: dict[int, list[Value]] = {}
        self.scope = Scope(caller.module, site.names("body")[0], lambda _, turn: self._state(turn))

    def _state(self, turn: Turn) -> Value:
        return lambda i: self._entry(i, None) if self._stays(i) else self._at(i, turn)

    def after(self, outer: Turn) -> Value:
        """The state that the loop ends with, in that turn of a loop around it."""

        def element(i: int) -> Value:
            if self._stays(i):
                return self._entry(i, outer)
            try:
                return self._at(i, trip_count(self._caller.module, self._caller.body, self._site))
            except ValueError:
                return None

        return element

    def _entry(self, i: int, outer: Turn) -> Value:
        return _element(self._caller.value(self._site.operands[0], outer), i)

    def _stays(self, i: int) -> bool:
        """Whether every turn hands that element on as it was."""
        body = self.scope.body
        if body.instructions[body.root].opcode != "tuple":
            return False
        made = body.instructions[body.instructions[body.root].operands[i]]
        while made.opcode == "copy":
            made = body.instructions[made.operands[0]]
        given = made.opcode == "get-tuple-element" and int(made.attributes["index"]) == i
        return given and body.instructions[made.operands[0]].opcode == "parameter"

    def _at(self, i: int, turn: Turn) -> Value:
        """From turn to turn: what one needs of the turn before is worked out already. Of a loop
        around this one only what is alike in all of its turns is known."""
        if turn is None:
            return None
        states = self._states.setdefault(i, [self._entry(i, None)])
        while len(states) <= turn:
            states.append(_element(self.scope.value(self.scope.body.root, len(states) - 1), i))
        return states[turn]


def _element(value: Value, i: int) -> Value:
    return value(i) if callable(value) else None


def _small(made: Instruction) -> bool:
    (shape,) = made.shapes
    known = shape.dtype == "pred" or _INTEGER.fullmatch(shape.dtype) is not None
    return known and shape.elements <= LARGEST


def _literal(made: Instruction) -> Value:
    """Of a constant; None where the text leaves its elements out (`{...}`)."""
    (shape,) = made.shapes
    words = re.findall(r"-?\d+|true|false|\.\.\.", ",".join(made.operands))
    if "..." in words or len(words) != shape.elements:
        return None
    numbers = [int(word) if word not in ("true", "false") else word == "true" for word in words]
    return np.array(numbers, bool if shape.dtype == "pred" else np.int64).reshape(shape.dims)


def _held(value: Value, shape: Shape) -> Value:
    """As the type has it; None where the number would not be the program's, for it wraps around."""
    if value is None or shape.dtype == "pred":
        return None if value is None else np.asarray(value, bool)
    bits, value = int(shape.dtype[1:]), np.asarray(value, np.int64)
    least, most = (-(2 ** (bits - 1)), 2 ** (bits - 1)) if shape.dtype[0] == "s" else (0, 2**bits)
    return value if ((value >= least) & (value < most)).all() else None


def _computed(made: Instruction, operands: list[Any]) -> Value:
    """One of the operations in `_DONE`."""
    (shape,) = made.shapes
    if made.opcode in _UNARY:
        return _UNARY[made.opcode](*operands)
    if made.opcode in _BINARY:
        return _BINARY[made.opcode](*operands)
    if made.opcode == "compare":
        return _COMPARISONS[made.attributes["direction"]](*operands)
    if made.opcode == "select":
        return np.where(*operands)
    if made.opcode == "clamp":
        low, x, high = operands
        return np.clip(x, low, high)
    if made.opcode == "broadcast":
        return None if operands[0].shape else np.broadcast_to(operands[0], shape.dims)
    if made.opcode == "slice":
        parts = re.findall(r"\[(\d+):(\d+)(?::(\d+))?\]", made.attributes["slice"])
        return operands[0][tuple(slice(int(a), int(b), int(c or 1)) for a, b, c in parts)]
    if made.opcode == "dynamic-slice":
        table, *starts = operands
        room = zip(starts, table.shape, shape.dims, strict=True)
        first = [min(max(int(at), 0), dim - size) for at, dim, size in room]
        return table[tuple(slice(a, a + size) for a, size in zip(first, shape.dims, strict=True))]
    # A bitcast keeps the order in memory, which that of a vector is whatever its layout.
    vector = operands[0].size in (1, *operands[0].shape) and shape.elements in (1, *shape.dims)
    return operands[0].reshape(shape.dims) if vector or made.opcode == "reshape" else None
