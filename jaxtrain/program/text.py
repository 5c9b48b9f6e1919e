"""A parser of HLO text (`program_text(compiled)`) as XLA prints it for CPU, GPU and TPU.

It knows the grammar: computations, instructions, and calls. Trip counts of loops are in `loops.py`,
the meaning of instructions in `collectives.py`. Cost: about 7 MB of instructions a second, once.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jax

_HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+) .*\{$")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = ")
_OPCODE = re.compile(r"\s*([\w\-]+)\(")
_SHAPE = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\](?:\{[^{}]*?S\((\d+)\)[^{}]*\})?")
_NESTING = re.compile(r'"(?:[^"\\]|\\.)*"|[()\[\]{},]')
_NAME = re.compile(r"%?([\w.\-]+)$")
_WRAPPED = re.compile(r"\n(?=\"|\}\})")
"""Pallas writes a kernel's metadata over several lines of one instruction."""
_BITS = re.compile(r"[a-z]+(\d+)")


@dataclass(frozen=True)
class Shape:
    """Element type and dims of one array; `token` and `opaque` have no bytes. memory: XLA's number
    of the memory that it is in: 0 is the device's own, 1 of a TPU its vector memory, 5 the host's;
    shapes that differ in it alone are equal."""

    dtype: str
    dims: tuple[int, ...]
    memory: int = field(default=0, compare=False)

    @property
    def elements(self) -> int:
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        """Bytes of the array without the padding of its layout (4-bit elements are packed)."""
        if self.dtype == "pred":
            return self.elements
        bits = _BITS.match(self.dtype)
        return -(-self.elements * int(bits[1]) // 8) if bits else 0


@dataclass(frozen=True)
class Instruction:
    """One line. `shapes` are the leaves of its result, in order; `operands` are names, or the text
    between the parentheses if there are none (literal of a constant, number of a parameter)."""

    name: str
    opcode: str
    shapes: tuple[Shape, ...]
    operands: tuple[str, ...]
    attributes: dict[str, str]

    @property
    def op_name(self) -> str:
        """JAX's name of the source operation; empty if the text has none."""
        match = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.attributes.get("metadata", ""))
        return match[1] if match else ""

    def names(self, attribute: str) -> tuple[str, ...]:
        """The computations named by an attribute: `calls=%a` or `branch_computations={%a, %b}`."""
        text = self.attributes.get(attribute, "").strip("{}")
        return tuple(part.strip().lstrip("%") for part in text.split(",") if part.strip())


@dataclass(frozen=True)
class Computation:
    """A named body. Its lines are read when its instructions are first asked for: a question about
    a program is often one about few of its computations."""

    name: str
    lines: tuple[str, ...]

    @cached_property
    def instructions(self) -> dict[str, Instruction]:
        """Name -> instruction, in printed order (the schedule, where there is one)."""
        found = {}
        for line in self.lines:
            if match := _INSTRUCTION.match(line):
                found[match[2]] = _instruction(line, match.end(), match[2])
        return found

    @cached_property
    def root(self) -> str:
        """Name of the instruction whose result is that of the computation."""
        named = (_INSTRUCTION.match(line) for line in self.lines)
        return next((match[2] for match in named if match and match[1]), "")

    def mentions(self, opcodes: re.Pattern[str]) -> bool:
        """True if the text of an instruction matches; nothing is read for it."""
        return any(map(opcodes.search, self.lines))

    def operand_shapes(self, instruction: Instruction) -> list[tuple[Shape, ...]]:
        """Shapes of each operand, from the instruction that defines it."""
        return [self.instructions[name].shapes for name in instruction.operands]


@dataclass(frozen=True)
class Module:
    """A program. It runs on `replicas` x `partitions` devices."""

    computations: dict[str, Computation]
    entry: str
    replicas: int
    partitions: int


def _split(text: str, start: int) -> tuple[list[str], int]:
    """Splits at commas of this depth, up to the closing bracket or the end."""
    parts, depth, last, end = [], 0, start, len(text)
    for match in _NESTING.finditer(text, start):
        token = match.group()
        if token in "([{":
            depth += 1
        elif token in ")]}":
            if depth == 0:
                end = match.start()
                break
            depth -= 1
        elif token == "," and depth == 0:
            parts.append(text[last : match.start()].strip())
            last = match.end()
    parts.append(text[last:end].strip())
    return [part for part in parts if part], end


def _shapes(text: str) -> tuple[Shape, ...]:
    matches = _SHAPE.findall(text)
    return tuple(
        Shape(
            dtype, tuple(int(dim.lstrip("<=")) for dim in dims.split(",") if dim), int(memory or 0)
        )
        for dtype, dims, memory in matches
    )


def _operand(text: str) -> str:
    # Older printers put the operand's shape before its name; all may put /*index=5*/ there.
    name = _NAME.search(text)
    return name[1] if name else text


def _instruction(line: str, start: int, name: str) -> Instruction:
    grouped = line[start] == "("
    shape_end = _split(line, start + 1)[1] + 1 if grouped else line.index(" ", start)
    opcode = _OPCODE.match(line, shape_end)
    if opcode is None:
        raise ValueError(f"HLO text has an instruction without an opcode: {line.strip()[:200]!r}")
    operands, end = _split(line, opcode.end())
    attributes = {}
    for part in _split(line, end + 1)[0]:
        key, _, value = part.partition("=")
        attributes[key] = value
    shapes = _shapes(line[start:shape_end])
    return Instruction(name, opcode[1], shapes, tuple(map(_operand, operands)), attributes)


def parse(text: str) -> Module:
    """Reads a module. Raises ValueError if `text` is not HLO with an ENTRY computation."""
    computations: dict[str, Computation] = {}
    entry = name = ""
    body: list[str] | None = None
    for line in _WRAPPED.sub("", text).splitlines():
        if body is None:
            header = None if line.startswith("HloModule") else _HEADER.match(line)
            if header:
                name, body = header[2], []
                entry = name if header[1] else entry
        elif line.startswith("}"):
            computations[name] = Computation(name, tuple(body))
            body = None
        else:
            body.append(line)
    if not entry:
        raise ValueError(
            f"no ENTRY computation in {text[:60]!r}...; pass the text of a compiled program, "
            "compiled.as_text()"
        )
    head = text[: text.find("\n\n")]
    counts = [re.search(rf"{key}=(\d+)", head) for key in ("replica_count", "num_partitions")]
    replicas, partitions = (int(count[1]) if count else 1 for count in counts)
    return Module(computations, entry, replicas, partitions)


def program_text(compiled: jax.stages.Compiled) -> str:
    """Text of a compiled program. If it has a `conditional`, all constants are printed, with the
    tables of its loops; `compiled.as_text()` leaves them out."""
    text = compiled.as_text()
    assert text is not None, "XLA's backends print their programs"
    if " conditional(" not in text:
        return text
    program: Any = compiled.runtime_executable()
    modules = program.hlo_modules()
    options = sys.modules[type(modules[0]).__module__].HloPrintOptions()
    options.print_large_constants = True
    return "\n\n".join(module.to_string(options) for module in modules)


def calls(instruction: Instruction) -> Iterator[tuple[str, ...]]:
    """Groups of computations that run when `instruction` does; one group holds alternatives.

    A `while` is left out (see `loops.trip_count`), and so are the scalar functions of reduce,
    sort, map and of the reducing collectives.
    """
    if instruction.opcode in ("fusion", "async-start"):
        yield instruction.names("calls")
    elif instruction.opcode == "call":
        yield instruction.names("to_apply")
    elif instruction.opcode == "conditional":
        branches = instruction.names("branch_computations")
        pair = instruction.names("true_computation") + instruction.names("false_computation")
        yield branches or pair
