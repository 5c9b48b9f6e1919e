"""Scratch memory of cuDNN's attention, which a compiler without a GPU leaves out.

XLA asks cuDNN how much a kernel needs, and cuDNN answers only where there is a GPU: in a program
for an absent one a kernel has none (a result u8[0]). Measured once: a step with 768 sequences of up
to 4,096 tokens, 32 heads of 64, 8 of keys, took 51,942,458,112 bytes more as compiled on an H200
than as compiled for an absent one; this formula says 51,942,260,736.
"""

from __future__ import annotations

from collections.abc import Mapping

from jaxtrain.program.text import Computation, Instruction, Shape, parse

BACKWARD = "__cudnn$fmhaSoftmaxBackward"
STATISTICS = 3
"""The operand [sequences, heads, seq] of the backward kernel."""


def moved_results(instruction: Instruction) -> list[Shape]:
    """Returns the results without a library's scratch memory, whose bytes need not move."""
    library = instruction.attributes.get("custom_call_target", "").startswith('"__cu')
    return [shape for shape in instruction.shapes if not (library and shape.dtype == "u8")]


def with_scratch(memory: Mapping[str, int | None], text: str) -> dict[str, int | None]:
    """Returns `memory` (of `peak_memory`); if the compiler has not counted what the program's
    largest backward kernel of attention needs beside it, with that in `scratch_bytes` and added to
    `peak_bytes`. A bound: the peak may be elsewhere."""
    scratch, peak = uncounted_scratch(text), memory["peak_bytes"]
    if not scratch:
        return dict(memory)
    more = None if peak is None else peak + scratch
    return {**memory, "scratch_bytes": scratch, "peak_bytes": more}


def uncounted_scratch(text: str) -> int:
    """Returns the bytes of the largest kernel's scratch memory that a program does not state."""
    if BACKWARD not in text:
        return 0
    return max(
        _scratch_of(body, instruction)
        for body in parse(text).computations.values()
        for instruction in body.instructions.values()
    )


def _scratch_of(body: Computation, instruction: Instruction) -> int:
    if instruction.attributes.get("custom_call_target") != f'"{BACKWARD}"':
        return 0
    if any(shape.bytes for shape in instruction.shapes[3:]):
        return 0
    q, keys = (body.operand_shapes(instruction)[i][0].dims for i in (0, 1))
    (statistics,) = body.operand_shapes(instruction)[STATISTICS]
    heads, head_dim = q[2:]
    # dq's sums in fp32, and the sums over head_dim of o times do; where query heads share keys also
    # dk and dv of each, in 16 bits.
    of_keys = 0 if heads == keys[2] else 2 * 2 * head_dim
    return statistics.elements * (4 * head_dim + 4 + of_keys)
