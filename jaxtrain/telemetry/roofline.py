"""How fast a compiled program could be: each kernel at the chip's peak or its memory's pace.

A kernel is what the program starts as one: a fusion, a library's matmul, a copy. It takes the
longer of its matmul FLOPs over the peak and its bytes over the bandwidth (Williams et al. 2009,
"Roofline"). Nothing is hidden behind another, collectives take no time, and kernels that XLA cannot
see into have bytes but no FLOPs: a bound for a program's arithmetic, from above.
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
"""Instructions that start no kernel, or one that runs beside the others."""

WINDOWS = ("dynamic-slice", "slice", "gather")
"""Instructions that read a part of their first operand."""


@dataclass(frozen=True)
class Roofline:
    """Of one run of a program, on one device: kernels started, seconds at the least, and how many
    of these the memory's pace sets."""

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
    """Of a compiled program's text, loops multiplied. peak_flops: FLOP/s, dense, of all matmuls
    alike, but for those of two 8-bit operands where narrow_flops says theirs. Raises ValueError
    where a loop has no static trip count."""
    module, narrow_flops = parse(text), narrow_flops or peak_flops
    inside = {
        name
        for body in module.computations.values()
        for each in body.instructions.values()
        if each.opcode == "fusion"
        for name in each.names("calls")
    }

    def own(body: Computation, each: Instruction) -> Roofline:
        if body.name in inside or each.opcode in FREE or _collective(each):
            return Roofline()
        wide, narrow = _flops(module, body, each)
        compute = wide / peak_flops + narrow / narrow_flops
        memory = _bytes(module, body, each) / (bandwidth_gbytes * 1e9)
        return Roofline(1, max(compute, memory), memory if memory > compute else 0.0)

    def add(parts: list[Roofline]) -> Roofline:
        return sum(parts, Roofline())

    def longest(parts: list[Roofline]) -> Roofline:
        return max(parts, key=lambda part: part.seconds)

    return fold(module, own, add, Roofline.__mul__, longest)


def _collective(each: Instruction) -> bool:
    return each.opcode.removesuffix("-start").removesuffix("-done") in SENT


def _flops(module: Module, body: Computation, each: Instruction) -> tuple[float, float]:
    """Of an instruction and all that is fused into it: those of two 8-bit operands second."""
    if each.opcode != "fusion":
        flops = matmul_flops(body, each)
        narrow = flops > 0 and all(_in_8_bits(shapes) for shapes in body.operand_shapes(each)[:2])
        return (0.0, flops) if narrow else (flops, 0.0)
    inner = (module.computations[name] for group in calls(each) for name in group)
    found = [_flops(module, part, one) for part in inner for one in part.instructions.values()]
    return math.fsum(wide for wide, _ in found), math.fsum(narrow for _, narrow in found)


def _in_8_bits(shapes: Sequence[Shape]) -> bool:
    return all(shape.dtype.startswith("f8") or shape.dtype in ("s8", "u8") for shape in shapes)


def _bytes(module: Module, body: Computation, each: Instruction) -> float:
    """What a kernel reads and writes: of an operand of which it reads a window, the window; of a
    result that is written into an operand, what is written."""
    shapes = body.operand_shapes(each)
    operands = [sum(shape.bytes for shape in leaves) for leaves in shapes]
    result = sum(shape.bytes for shape in each.shapes)
    if each.opcode in WINDOWS:
        return 2.0 * result
    if each.opcode == "dynamic-update-slice":
        return 2.0 * operands[1]
    if each.opcode != "fusion":
        return float(sum(operands) + result)
    (name,) = each.names("calls")
    return _fused_bytes(module, module.computations[name])


def _fused_bytes(module: Module, inner: Computation) -> float:
    read = (
        _read(module, inner, one)
        for one in inner.instructions.values()
        if one.opcode == "parameter"
    )
    root, written = inner.instructions[inner.root], _written(inner)
    ends = (
        [inner.instructions[name] for name in root.operands] if root.opcode == "tuple" else [root]
    )

    def made(end: Instruction) -> float:
        if end.opcode == "parameter" or _collective(end):
            return 0.0
        shapes = inner.operand_shapes(end)[1] if end.name in written else end.shapes
        return float(sum(shape.bytes for shape in shapes))

    return math.fsum(read) + math.fsum(map(made, ends))


def _read(module: Module, inner: Computation, given: Instruction) -> float:
    """Bytes of a parameter that its users in a fusion read. What only passes through to the
    results is not read, nor what a collective sends of which the kernel does a part: a TPU's
    compiler spreads a gather over the matmuls beside it, and each has the whole buffer."""
    whole, found, written = float(sum(shape.bytes for shape in given.shapes)), 0.0, _written(inner)
    for user in inner.instructions.values():
        for at, operand in enumerate(user.operands):
            if operand != given.name:
                continue
            if user.opcode in WINDOWS and at == 0:
                found += sum(shape.bytes for shape in user.shapes)
            elif user.opcode == "fusion":
                called = module.computations[next(iter(user.names("calls")))]
                within = (one for one in called.instructions.values() if one.opcode == "parameter")
                found += _read(module, called, next(p for p in within if p.operands[0] == str(at)))
            elif not (
                _collective(user)
                or (user.opcode == "tuple" and user.name == inner.root)
                or (user.name in written and at == 0)  # written in place
            ):
                return whole
    return min(found, whole)


def _written(inner: Computation) -> set[str]:
    """Results of a fusion that are a parameter with a window written anew."""
    return {
        one.name
        for one in inner.instructions.values()
        if one.opcode == "dynamic-update-slice"
        and inner.instructions[one.operands[0]].opcode == "parameter"
    }
