"""Least time of a compiled program: each kernel at the chip's peak or at memory bandwidth.

A kernel is what the program starts as one: a fusion, a library's matmul, a copy. It takes the
longer of its matmul FLOPs over the peak and its bytes over the bandwidth (Williams et al. 2009,
"Roofline"). Bytes are those in the device's own memory: what is in a TPU's vector memory costs
nothing here. No kernel overlaps another; collectives and what runs beside kernels (copies and
slices that are started and awaited) take no time; and kernels that XLA cannot see into have bytes
but no FLOPs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import astuple, dataclass

from jaxtrain.program.collectives import SENT
from jaxtrain.program.matmul import matmul_flops
from jaxtrain.program.scratch import moved_results
from jaxtrain.program.text import Computation, Instruction, Module, Shape, calls, parse
from jaxtrain.program.totals import fold

FREE = frozenset(
    (
        *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "opt-barrier"),
        *("while", "conditional", "call", "after-all", "add-dependency", "domain"),
        *("partition-id", "replica-id", "send", "recv"),
    )
)
"""Instructions that start no kernel."""

CONCURRENT = ("-start", "-update", "-done")
"""Ends of opcodes of what runs beside kernels: `slice-start`, `copy-done`, `call-update`."""

WINDOWS = ("dynamic-slice", "slice", "gather")
"""Instructions that read a part of their first operand."""


@dataclass(frozen=True)
class Roofline:
    """One execution of a program on one device: kernels started, least seconds, and the seconds of
    these that memory bandwidth limits.

    cycles: of all kernels for which the compiler states an estimate, as a TPU's does for its own
    (not for Pallas' kernels). cycles_s: the least seconds of these kernels.
    """

    kernels: int = 0
    seconds: float = 0.0
    memory_bound_s: float = 0.0
    cycles: int = 0
    cycles_s: float = 0.0

    def __add__(self, other: Roofline) -> Roofline:
        return Roofline(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __mul__(self, times: int) -> Roofline:
        return Roofline(*(a * times for a in astuple(self)))

    def __bool__(self) -> bool:
        return self.kernels > 0

    def summary(self, mfu_bound: float | None, clock_ghz: float | None) -> str:
        """Returns a sentence. mfu_bound: the MFU that these seconds allow. clock_ghz: of the chip,
        None leaves out the compiler's estimate."""
        text = f"{self.kernels:,} kernels, {self.seconds:.3g} s at the chip's peaks"
        text += f", {self.memory_bound_s:.3g} s of it at its memory's"
        text += "" if mfu_bound is None else f": at most {mfu_bound:.0%} causal MFU"
        if not self.cycles or clock_ghz is None:
            return text
        estimate = self.cycles / clock_ghz / 1e9
        return (
            f"{text}; kernels that take {self.cycles_s:.3g} s of it are {estimate:.3g} s by the "
            "compiler's estimate"
        )


@dataclass(frozen=True)
class Peaks:
    """Rates of a chip. flops: dense FLOP/s of matmuls; narrow_flops: of those with two 8-bit
    operands; bandwidth: bytes/s of its memory."""

    flops: float
    narrow_flops: float
    bandwidth: float


def roofline(
    text: str, *, peak_flops: float, bandwidth_gbytes: float, narrow_flops: float | None = None
) -> Roofline:
    """Roofline of a compiled program's text, loops multiplied. peak_flops: dense FLOP/s of all
    matmuls; narrow_flops: of those with two 8-bit operands, if different. Raises ValueError if a
    loop has no static trip count."""
    module = parse(text)
    peaks = Peaks(peak_flops, narrow_flops or peak_flops, bandwidth_gbytes * 1e9)
    fused = fused_computations(module)

    def own(body: Computation, instruction: Instruction) -> Roofline:
        if body.name in fused or not is_kernel(instruction):
            return Roofline()
        return kernel_roofline(module, body, instruction, peaks)

    def add(parts: list[Roofline]) -> Roofline:
        return sum(parts, Roofline())

    def longest(parts: list[Roofline]) -> Roofline:
        return max(parts, key=lambda part: part.seconds)

    return fold(module, own, add, Roofline.__mul__, longest)


def fused_computations(module: Module) -> set[str]:
    """Returns the names of computations that are parts of a kernel."""
    return {
        name
        for body in module.computations.values()
        for instruction in body.instructions.values()
        if instruction.opcode == "fusion"
        for name in instruction.names("calls")
    }


def is_kernel(instruction: Instruction) -> bool:
    """Returns True if an instruction starts a kernel that others wait for."""
    opcode = instruction.opcode
    free = opcode in FREE or opcode.endswith(CONCURRENT) or _allocates(instruction)
    return not free and not _collective(instruction)


def kernel_roofline(
    module: Module, body: Computation, instruction: Instruction, peaks: Peaks
) -> Roofline:
    """Returns the roofline of one run of a kernel."""
    wide, narrow = _flops(module, body, instruction)
    compute = wide / peaks.flops + narrow / peaks.narrow_flops
    memory = _bytes(module, body, instruction) / peaks.bandwidth
    cycles, least = _estimated_cycles(instruction), max(compute, memory)
    bound_by_memory = memory if memory > compute else 0.0
    return Roofline(1, least, bound_by_memory, cycles, least if cycles else 0.0)


def _estimated_cycles(instruction: Instruction) -> int:
    """The compiler's estimate; 0 if it states none."""
    config = instruction.attributes.get("backend_config", "")
    match = re.search(r'"estimated_cycles":"(\d+)"', config)
    return int(match[1]) if match else 0


def _allocates(instruction: Instruction) -> bool:
    return instruction.attributes.get("custom_call_target") == '"AllocateBuffer"'


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
    if instruction.opcode in WINDOWS:
        return _in_memory(instruction.shapes) + _window(instruction.shapes, shapes[0])
    if instruction.opcode == "dynamic-update-slice":
        return _in_memory(shapes[1]) + _window(shapes[1], instruction.shapes)
    if instruction.opcode != "fusion":
        return math.fsum(map(_in_memory, shapes)) + _in_memory(moved_results(instruction))
    (name,) = instruction.names("calls")
    return _fused_bytes(module, module.computations[name])


def _in_memory(shapes: Sequence[Shape]) -> float:
    """Bytes of arrays in the device's own memory."""
    return math.fsum(shape.bytes for shape in shapes if shape.memory == 0)


def _window(part: Sequence[Shape], whole: Sequence[Shape]) -> float:
    """Bytes of a part of an array in the device's own memory, wherever the part is itself."""
    return math.fsum(s.bytes for s in part) if all(s.memory == 0 for s in whole) else 0.0


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
        if end.name in written:
            return _window(inner.operand_shapes(end)[1], end.shapes)
        return _in_memory(end.shapes)

    return math.fsum(read) + math.fsum(map(written_bytes, ends))


def _read(module: Module, inner: Computation, parameter: Instruction) -> float:
    """Bytes of a parameter that its users in a fusion read. Not counted: what only passes through
    to the results, and what a collective sends of which the kernel does a part (a TPU's compiler
    spreads a gather over matmuls, and each has the full buffer)."""
    full, written, total = _in_memory(parameter.shapes), _written(inner), 0.0
    for user in inner.instructions.values():
        for position, operand in enumerate(user.operands):
            if operand != parameter.name:
                continue
            if user.opcode in WINDOWS and position == 0:
                total += _window(user.shapes, parameter.shapes)
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
    """Results of a fusion that update a window of a parameter in place, or of an empty buffer."""

    def is_buffer(instruction: Instruction) -> bool:
        return instruction.opcode == "parameter" or _allocates(instruction)

    return {
        instruction.name
        for instruction in inner.instructions.values()
        if instruction.opcode == "dynamic-update-slice"
        and is_buffer(inner.instructions[instruction.operands[0]])
    }
