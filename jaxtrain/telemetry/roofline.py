"""Least time of a compiled program: each kernel at the chip's peak or at memory bandwidth.

A kernel is what the program starts as one: a fusion, a library's matmul, a copy. It takes the
longer of its matmul FLOPs over the peak and its bytes over the bandwidth (Williams et al. 2009,
"Roofline"). No kernel overlaps another, collectives take no time, and kernels that XLA cannot see
into have bytes but no FLOPs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from jaxtrain.telemetry.hlo.collectives import SENT
from jaxtrain.telemetry.hlo.matmul import matmul_flops
from jaxtrain.telemetry.hlo.text import Computation, Instruction, Module, Shape, calls, parse
from jaxtrain.telemetry.hlo.totals import fold

FREE = frozenset(
    (
        *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "opt-barrier"),
        *("while", "conditional", "call", "after-all", "add-dependency", "domain"),
        *("partition-id", "replica-id", "async-start", "async-update", "async-done"),
        *("copy-start", "copy-done", "send", "recv", "send-done", "recv-done"),
    )
)
"""Instructions that start no kernel, or one that runs concurrently."""

WINDOWS = ("dynamic-slice", "slice", "gather")
"""Instructions that read a part of their first operand."""


@dataclass(frozen=True)
class Roofline:
    """One execution of a program on one device: kernels started, least seconds, and the seconds of
    these that memory bandwidth limits."""

    kernels: int = 0
    seconds: float = 0.0
    memory_bound_s: float = 0.0

    def __add__(self, other: Roofline) -> Roofline:
        return Roofline(
            self.kernels + other.kernels,
            self.seconds + other.seconds,
            self.memory_bound_s + other.memory_bound_s,
        )

    def __mul__(self, times: int) -> Roofline:
        return Roofline(self.kernels * times, self.seconds * times, self.memory_bound_s * times)

    def __bool__(self) -> bool:
        return self.kernels > 0


def roofline(
    text: str, *, peak_flops: float, bandwidth_gbytes: float, narrow_flops: float | None = None
) -> Roofline:
    """Roofline of a compiled program's text, loops multiplied. peak_flops: dense FLOP/s of all
    matmuls; narrow_flops: of those with two 8-bit operands, if different. Raises ValueError if a
    loop has no static trip count."""
    module, narrow_flops = parse(text), narrow_flops or peak_flops
    inside = {
        name
        for body in module.computations.values()
        for instruction in body.instructions.values()
        if instruction.opcode == "fusion"
        for name in instruction.names("calls")
    }

    def own(body: Computation, instruction: Instruction) -> Roofline:
        if body.name in inside or instruction.opcode in FREE or _collective(instruction):
            return Roofline()
        wide, narrow = _flops(module, body, instruction)
        compute = wide / peak_flops + narrow / narrow_flops
        memory = _bytes(module, body, instruction) / (bandwidth_gbytes * 1e9)
        return Roofline(1, max(compute, memory), memory if memory > compute else 0.0)

    def add(parts: list[Roofline]) -> Roofline:
        return sum(parts, Roofline())

    def longest(parts: list[Roofline]) -> Roofline:
        return max(parts, key=lambda part: part.seconds)

    return fold(module, own, add, Roofline.__mul__, longest)


def _collective(instruction: Instruction) -> bool:
    return instruction.opcode.removesuffix("-start").removesuffix("-done") in SENT


def _flops(module: Module, body: Computation, instruction: Instruction) -> tuple[float, float]:
    """(wide, narrow) FLOPs, of fused instructions too; narrow: of two 8-bit operands."""
    if instruction.opcode != "fusion":
        flops = matmul_flops(body, instruction)
        narrow = flops > 0 and all(
            _in_8_bits(shapes) for shapes in body.operand_shapes(instruction)[:2]
        )
        return (0.0, flops) if narrow else (flops, 0.0)
    inner = (module.computations[name] for group in calls(instruction) for name in group)
    counts = [_flops(module, part, op) for part in inner for op in part.instructions.values()]
    return math.fsum(wide for wide, _ in counts), math.fsum(narrow for _, narrow in counts)


def _in_8_bits(shapes: Sequence[Shape]) -> bool:
    return all(shape.dtype.startswith("f8") or shape.dtype in ("s8", "u8") for shape in shapes)


def _bytes(module: Module, body: Computation, instruction: Instruction) -> float:
    """Bytes that a kernel reads and writes: only the window, if it reads a window of an operand, or
    writes its result into an operand."""
    shapes = body.operand_shapes(instruction)
    operands = [sum(shape.bytes for shape in leaves) for leaves in shapes]
    result = sum(shape.bytes for shape in instruction.shapes)
    if instruction.opcode in WINDOWS:
        return 2.0 * result
    if instruction.opcode == "dynamic-update-slice":
        return 2.0 * operands[1]
    if instruction.opcode != "fusion":
        return float(sum(operands) + result)
    (name,) = instruction.names("calls")
    return _fused_bytes(module, module.computations[name])


def _fused_bytes(module: Module, inner: Computation) -> float:
    read = (
        _read(module, inner, instruction)
        for instruction in inner.instructions.values()
        if instruction.opcode == "parameter"
    )
    root, written = inner.instructions[inner.root], _written(inner)
    ends = (
        [inner.instructions[name] for name in root.operands] if root.opcode == "tuple" else [root]
    )

    def written_bytes(end: Instruction) -> float:
        if end.opcode == "parameter" or _collective(end):
            return 0.0
        shapes = inner.operand_shapes(end)[1] if end.name in written else end.shapes
        return float(sum(shape.bytes for shape in shapes))

    return math.fsum(read) + math.fsum(map(written_bytes, ends))


def _read(module: Module, inner: Computation, parameter: Instruction) -> float:
    """Bytes of a parameter that its users in a fusion read. Not counted: what only passes through
    to the results, and what a collective sends of which the kernel does a part (a TPU's compiler
    spreads a gather over matmuls, and each has the full buffer)."""
    full, written = float(sum(shape.bytes for shape in parameter.shapes)), _written(inner)
    total = 0.0
    for user in inner.instructions.values():
        for position, operand in enumerate(user.operands):
            if operand != parameter.name:
                continue
            if user.opcode in WINDOWS and position == 0:
                total += sum(shape.bytes for shape in user.shapes)
            elif user.opcode == "fusion":
                called = module.computations[next(iter(user.names("calls")))]
                within = (op for op in called.instructions.values() if op.opcode == "parameter")
                total += _read(
                    module, called, next(p for p in within if p.operands[0] == str(position))
                )
            elif not (
                _collective(user)
                or (user.opcode == "tuple" and user.name == inner.root)
                or (user.name in written and position == 0)  # written in place
            ):
                return full
    return min(total, full)


def _written(inner: Computation) -> set[str]:
    """Results of a fusion that update a window of a parameter in place."""
    return {
        instruction.name
        for instruction in inner.instructions.values()
        if instruction.opcode == "dynamic-update-slice"
        and inner.instructions[instruction.operands[0]].opcode == "parameter"
    }
