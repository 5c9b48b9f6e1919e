"""Collectives of a compiled program that XLA:CPU may run concurrently.

XLA:CPU starts a collective only after the previous one has started, but a loop or a branch counts
as started before its collectives are done. So the next collective must depend on its result, or
simulated devices enter different collectives (`collectives/order.py` adds these dependencies).
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from jaxtrain.program.collectives import SENT
from jaxtrain.program.text import Computation, Instruction, Module, calls, parse

_HOLDERS = re.compile(r" (?:while|conditional|call|fusion|async-start)\(")
_TALKERS = re.compile(rf"{_HOLDERS.pattern}| (?:{'|'.join(SENT)})(?:-start)?\(")


def side_by_side(text: str, *, scheduled: bool = True) -> list[str]:
    """Each collective, or loop or branch with collectives, that follows a loop or a branch with
    collectives and does not wait for it. `text`: a scheduled program for CPU.

    scheduled: everything that the schedule has before a loop ends before it. If False, a loop must
    wait for that too: a program from JAX's compilation cache has lost the order.
    """
    module = parse(text)
    talking: dict[str, bool] = {}
    # Most computations are fusions: they are not read.
    bodies = [body for body in module.computations.values() if body.mentions(_HOLDERS)]
    return [
        f"{_named(later)} does not wait for {_named(earlier)}: XLA:CPU may run the collectives of "
        f"both at once, and devices then mix them up. Have what is sent second read what the first "
        f"makes (collectives.order.after)"
        for body in bodies
        for earlier, later in _unordered(module, body, talking, scheduled)
    ]


def _unordered(
    module: Module, body: Computation, talking: dict[str, bool], scheduled: bool
) -> Iterator[tuple[Instruction, Instruction]]:
    """Yields (earlier, later) where the later instruction does not wait for the earlier."""
    loops: list[Instruction] = []
    plain: list[Instruction] = []
    waited: dict[str, frozenset[str]] = {}
    for name, instruction in body.instructions.items():
        operand_waits = (waited.get(operand, frozenset()) for operand in instruction.operands)
        waits = frozenset[str]().union(*operand_waits)
        holds = _holds(module, instruction, talking)
        if holds or instruction.opcode.removesuffix("-start") in SENT:
            due = [*loops, *plain] if holds and not scheduled else loops
            yield from ((earlier, instruction) for earlier in due if earlier.name not in waits)
            (loops if holds else plain).append(instruction)
            waits |= {name}
        waited[name] = waits


def _holds(module: Module, instruction: Instruction, talking: dict[str, bool]) -> bool:
    """True for a loop, a branch or a call with collectives inside."""
    inside = [*instruction.names("body"), *(name for group in calls(instruction) for name in group)]
    return any(_talks(module, name, talking) for name in inside)


def _talks(module: Module, name: str, talking: dict[str, bool]) -> bool:
    if name not in talking:
        body = module.computations[name]
        talking[name] = body.mentions(_TALKERS) and any(
            instruction.opcode.removesuffix("-start") in SENT
            or _holds(module, instruction, talking)
            for instruction in body.instructions.values()
        )
    return talking[name]


def _named(instruction: Instruction) -> str:
    """Opcode of an instruction, and its place in the source."""
    return f"{instruction.opcode} {instruction.op_name or instruction.name}"
