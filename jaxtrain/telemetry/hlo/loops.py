"""How often a `while` of a compiled program runs: by XLA's own note, or by its counter."""

from __future__ import annotations

import re
from typing import NamedTuple

from jaxtrain.telemetry.hlo.text import Computation, Instruction, Module, calls

_TRIP_COUNT = re.compile(r"known_trip_count\W+n\W+(\d+)")
_SAME_VALUE = ("copy", "bitcast", "convert", "reshape")


class _Linear(NamedTuple):
    """An integer of a loop: its state's `element` on entry (None: nothing) plus a constant."""

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
    """Follow `name` back through copies, sums, comparisons and inlined fusions."""
    made = body.instructions[name]
    if len(made.shapes) != 1 or made.shapes[0].dims:
        return None  # counters are scalars; this also keeps the search off the model's arithmetic
    if made.opcode == "constant":
        literal = made.operands[0] if made.operands else ""
        return _Linear(None, int(literal)) if re.fullmatch(r"-?\d+", literal) else None
    if made.opcode == "parameter":
        return arguments[int(made.operands[0])] if arguments else None
    if made.opcode == "get-tuple-element":
        return _element(module, body, made, arguments)
    if made.opcode not in (*_SAME_VALUE, "add", "subtract", "compare", "fusion", "call"):
        return None
    values = [_resolve(module, body, operand, arguments) for operand in made.operands]
    if made.opcode in _SAME_VALUE:
        return values[0]
    if made.opcode in ("fusion", "call"):
        inner = module.computations[next(calls(made))[0]]
        return _resolve(module, inner, inner.root, values)
    left, right = values
    if not isinstance(left, _Linear) or not isinstance(right, _Linear):
        return None
    if made.opcode == "compare":
        return _Test(made.attributes["direction"], left, right)
    if made.opcode == "subtract" and right.element is None:
        return _Linear(left.element, left.constant - right.constant)
    if made.opcode == "add" and None in (left.element, right.element):
        element = right.element if left.element is None else left.element
        return _Linear(element, left.constant + right.constant)
    return None


def _element(
    module: Module, body: Computation, made: Instruction, arguments: list[_Value] | None
) -> _Value:
    index, source = int(made.attributes["index"]), body.instructions[made.operands[0]]
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
    """How often the body of a `while` runs: XLA's own note, or its counter's start, step, bound.

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
    """Where a value is made: XLA may have moved a loop into a computation that is called once."""
    made = body.instructions[name]
    sites = [
        (outer, each)
        for outer in (module.computations.values() if made.opcode == "parameter" else ())
        for each in outer.instructions.values()
        if each.opcode == "call" and body.name in each.names("to_apply")
    ]
    if len(sites) != 1:
        return body, made
    outer, site = sites[0]
    return _origin(module, outer, site.operands[int(made.operands[0])])


def _counted(module: Module, caller: Computation, loop: Instruction) -> int | None:
    """Iterations from the counter's start, step and bound; None where one is not a constant."""
    condition, body = (module.computations[loop.names(key)[0]] for key in ("condition", "body"))
    outside, start = _origin(module, caller, loop.operands[0])
    after = body.instructions[body.root]
    test = _resolve(module, condition, condition.root)
    if not isinstance(test, _Test) or (start.opcode, after.opcode) != ("tuple", "tuple"):
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
        then = _resolve(module, body, after.operands[value.element])
        if not isinstance(then, _Linear) or then.element != value.element:
            return None
        return then.constant

    first, bound, by = entry(test.left), entry(test.right), step(test.left)
    if first is None or bound is None or not by or step(test.right) != 0:
        return None
    rises = {"LT": by > 0, "LE": by > 0, "GT": by < 0, "GE": by < 0, "NE": True}
    if not rises.get(test.direction, False):
        return None
    distance = bound - first + {"LE": 1, "GE": -1}.get(test.direction, 0)
    return max(0, -(-distance // by))
