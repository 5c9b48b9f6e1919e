"""Collectives of a compiled program that XLA:CPU may run beside each other.

Its runtime holds a collective back until the one before it has started, and a loop or a branch has
started before its collectives are done. So what follows one has to read what it makes, or simulated
devices meet in different collectives (`collectives/order.py` sees to it).
"""

from __future__ import annotations

from collections.abc import Iterator

from jaxtrain.telemetry.hlo.collectives import SENT
from jaxtrain.telemetry.hlo.text import Computation, Instruction, Module, calls, parse


def side_by_side(text: str, *, scheduled: bool = True) -> list[str]:
    """Each collective, or loop or branch with collectives, that stands behind a loop or a branch
    with collectives and does not wait for it. `text`: of a program with a schedule, for CPU.

    scheduled: what the schedule has in front of a loop has ended before it. Otherwise a loop has to
    wait for it too: a program that comes from JAX's compilation cache has lost that order.
    """
    module = parse(text)
    talking: dict[str, bool] = {}
    return [
        f"{_named(each)} does not wait for {_named(before)}: XLA:CPU may run the collectives of "
        f"both at once, and devices then mix them up. Have what is sent second read what the first "
        f"makes (collectives.order.after)"
        for body in module.computations.values()
        for before, each in _unordered(module, body, talking, scheduled)
    ]


def _unordered(
    module: Module, body: Computation, talking: dict[str, bool], scheduled: bool
) -> Iterator[tuple[Instruction, Instruction]]:
    """(the first in the schedule, the one that does not read what it makes)."""
    loops: list[Instruction] = []
    plain: list[Instruction] = []
    waited: dict[str, frozenset[str]] = {}
    for name, each in body.instructions.items():
        before = (waited.get(operand, frozenset()) for operand in each.operands)
        waits = frozenset[str]().union(*before)
        holds = _holds(module, each, talking)
        if holds or each.opcode.removesuffix("-start") in SENT:
            due = [*loops, *plain] if holds and not scheduled else loops
            yield from ((one, each) for one in due if one.name not in waits)
            (loops if holds else plain).append(each)
            waits |= {name}
        waited[name] = waits


def _holds(module: Module, each: Instruction, talking: dict[str, bool]) -> bool:
    """Whether it is a loop, a branch or a call with collectives inside."""
    inside = [*each.names("body"), *(name for group in calls(each) for name in group)]
    return any(_talks(module, name, talking) for name in inside)


def _talks(module: Module, name: str, talking: dict[str, bool]) -> bool:
    if name not in talking:
        instructions = module.computations[name].instructions.values()
        talking[name] = any(
            each.opcode.removesuffix("-start") in SENT or _holds(module, each, talking)
            for each in instructions
        )
    return talking[name]


def _named(each: Instruction) -> str:
    """Its opcode, and where it comes from in the source."""
    return f"{each.opcode} {each.op_name or each.name}"
