"""Trip count of a `while` in a compiled program: from XLA's note, or from its counter."""

from __future__ import annotations

import re
from typing import NamedTuple

from jaxtrain.program.text import Computation, Instruction, Module, calls

_TRIP_COUNT = re.compile(r"known_trip_count\W+n\W+(\d+)")
_SAME_VALUE = ("copy", "bitcast", "convert", "reshape")


class _Linear(NamedTuple):
    """An integer of a loop: `element` of its initial state (None: zero) plus a constant."""

    element: int | None
    constant: int


class _Test(NamedTuple):
    """A comparison of two such integers: `direction` is XLA's LT, LE, GT, GE, EQ or NE."""

    direction: str
    left: _Linear
    right: _Linear


_Value = _Linear | _Test | None


def _resolve(
    module: Module, body: Computation, name: str, arguments: list[_Value] | None = None
) -> _Value:
    """Follows `name` back through copies, sums, comparisons and inlined fusions."""
    instruction = body.instructions[name]
    if len(instruction.shapes) != 1 or instruction.shapes[0].dims:
        return None  # counters are scalars; this also keeps the search off the model's arithmetic
    if instruction.opcode == "constant":
        literal = instruction.operands[0] if instruction.operands else ""
        return _Linear(None, int(literal)) if re.fullmatch(r"-?\d+", literal) else None
    if instruction.opcode == "parameter":
        return arguments[int(instruction.operands[0])] if arguments else None
    if instruction.opcode == "get-tuple-element":
        return _element(module, body, instruction, arguments)
    if instruction.opcode not in (*_SAME_VALUE, "add", "subtract", "compare", "fusion", "call"):
        return None
    values = [_resolve(module, body, operand, arguments) for operand in instruction.operands]
    if instruction.opcode in _SAME_VALUE:
        return values[0]
    if instruction.opcode in ("fusion", "call"):
        inner = module.computations[next(calls(instruction))[0]]
        return _resolve(module, inner, inner.root, values)
    left, right = values
    if not isinstance(left, _Linear) or not isinstance(right, _Linear):
        return None
    if instruction.opcode == "compare":
        return _Test(instruction.attributes["direction"], left, right)
    if instruction.opcode == "subtract" and right.element is None:
        return _Linear(left.element, left.constant - right.constant)
    if instruction.opcode == "add" and None in (left.element, right.element):
        element = right.element if left.element is None else left.element
        return _Linear(element, left.constant + right.constant)
    return None


def _element(
    module: Module, body: Computation, instruction: Instruction, arguments: list[_Value] | None
) -> _Value:
    index, source = int(instruction.attributes["index"]), body.instructions[instruction.operands[0]]
    if source.opcode == "tuple":
        return _resolve(module, body, source.operands[index], arguments)
    if source.opcode == "parameter" and arguments is None:
        return _Linear(index, 0)
    if source.opcode == "fusion":
        inner = module.computations[source.names("calls")[0]]
        root = inner.instructions[inner.root]
        if root.opcode == "tuple":
            values = [_resolve(module, body, operand, arguments) for operand in source.operands]
            return _resolve(module, inner, root.operands[index], values)
    return None


def trip_count(module: Module, caller: Computation, loop: Instruction) -> int:
    """Trip count of a `while`: from XLA's note, or from its counter's start, step and bound.

    TPU programs carry no note. Raises `ValueError` for a loop whose count depends on data.
    """
    noted = _TRIP_COUNT.search(loop.attributes.get("backend_config", ""))
    if noted:
        return int(noted[1])
    count = _counted(module, caller, loop)
    if count is None:
        raise ValueError(
            f"loop {loop.name} in {caller.name} has no trip count that the program states; what "
            "is inside it cannot be counted. Use lax.scan or fori_loop with a static length"
        )
    return count


def _origin(module: Module, body: Computation, name: str) -> tuple[Computation, Instruction]:
    """The instruction that defines a value: XLA may move a loop into a computation called once."""
    instruction = body.instructions[name]
    sites = [
        (outer, candidate)
        for outer in (module.computations.values() if instruction.opcode == "parameter" else ())
        for candidate in outer.instructions.values()
        if candidate.opcode == "call" and body.name in candidate.names("to_apply")
    ]
    if len(sites) != 1:
        return body, instruction
    outer, site = sites[0]
    return _origin(module, outer, site.operands[int(instruction.operands[0])])


def _counted(module: Module, caller: Computation, loop: Instruction) -> int | None:
    """Iterations from the counter's start, step and bound; None if one is not constant."""
    condition, body = (module.computations[loop.names(key)[0]] for key in ("condition", "body"))
    outside, start = _origin(module, caller, loop.operands[0])
    body_root = body.instructions[body.root]
    test = _resolve(module, condition, condition.root)
    if not isinstance(test, _Test) or (start.opcode, body_root.opcode) != ("tuple", "tuple"):
        return None

    def entry(value: _Linear) -> int | None:
        if value.element is None:
            return value.constant
        first = _resolve(module, outside, start.operands[value.element])
        if not isinstance(first, _Linear) or first.element is not None:
            return None
        return first.constant + value.constant

    def step(value: _Linear) -> int | None:
        if value.element is None:
            return 0
        then = _resolve(module, body, body_root.operands[value.element])
        if not isinstance(then, _Linear) or then.element != value.element:
            return None
        return then.constant

    first, bound, delta = entry(test.left), entry(test.right), step(test.left)
    if first is None or bound is None or not delta or step(test.right) != 0:
        return None
    rises = {"LT": delta > 0, "LE": delta > 0, "GT": delta < 0, "GE": delta < 0, "NE": True}
    if not rises.get(test.direction, False):
        return None
    distance = bound - first + {"LE": 1, "GE": -1}.get(test.direction, 0)
    return max(0, -(-distance // delta))
