"""Reads what a compiled program computes and sends from its text (`compiled.as_text()`).

XLA's `cost_analysis` counts the body of a loop once; these readers multiply by trip counts. All
numbers are per device: a sharded program's text is the program that each device runs.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax

from jaxtrain.program.groups import DeviceGroups, connected, replica_groups
from jaxtrain.program.matmul import is_gemm, matmul_flops
from jaxtrain.program.text import Computation, Instruction, Module, Shape, parse
from jaxtrain.program.totals import fold


def dot_flops(text: str) -> float:
    """Matmul FLOPs of one run: 2*M*N*K of every dot, convolution and library gemm, x trip counts.

    If a program does not say how often a conditional's branches run, the most expensive one counts,
    and the result is an upper bound. Kernels that are opaque to XLA are left out: `opaque_kernels`
    lists them.

    Raises `ValueError` when a matmul stands in a loop without a static trip count.
    """
    return fold(parse(text), matmul_flops, add=math.fsum, times=lambda x, n: x * n, choose=max)


_FREE_TARGETS = re.compile(
    r"AllocateBuffer|AsyncCollective|annotate|Sharding|MoveTo|TopK|Pin|Sort|Bitcast"
)


def opaque_kernels(text: str) -> dict[str, int]:
    """Number of runs of kernels whose arithmetic XLA cannot see: Pallas, cuDNN, ragged dots.

    Empty means that `dot_flops` counts everything. Runs in different branches are added.
    """

    def own(body: Computation, instruction: Instruction) -> Counter[str]:
        if instruction.opcode in ("ragged-dot", "scaled-dot"):
            return Counter([instruction.opcode])
        return Counter([_target(instruction)] if is_opaque(instruction) else [])

    def add(counts: list[Counter[str]]) -> Counter[str]:
        return sum(counts, Counter())

    def times(counts: Counter[str], n: int) -> Counter[str]:
        return Counter({name: count * n for name, count in counts.items()})

    return dict(fold(parse(text), own, add, times, choose=add))


def is_opaque(instruction: Instruction) -> bool:
    """True if an instruction calls a kernel whose arithmetic XLA cannot see."""
    called = instruction.opcode == "custom-call" and not is_gemm(instruction)
    return called and not _FREE_TARGETS.search(_target(instruction))


def _target(instruction: Instruction) -> str:
    return instruction.attributes.get("custom_call_target", "").strip('"')


@dataclass(frozen=True)
class Collective:
    """One collective instruction (one per dtype, where a variadic one mixes them).

    `buffer_bytes` is the full logical buffer on one device: the operand, or for all-gather the
    result. `wire_bytes` is what one device sends each time, by a bandwidth-optimal algorithm
    (Patarasuk & Yuan 2009): 2(n-1)/n of the buffer for all-reduce, (n-1)/n for all-gather,
    reduce-scatter and all-to-all (an upper bound for the ragged one), all of it for
    collective-permute, whose groups are the devices that its pairs connect. `groups` are positions
    in the flattened mesh. `count` is the number of runs in one run of the program (`in_branch`: at
    most, since the program does not say how often a branch runs); `arrays`: buffers of that dtype
    that a combiner merged into it.
    """

    name: str
    kind: str
    dtype: str
    buffer_bytes: int
    wire_bytes: float
    group_size: int
    groups: DeviceGroups
    count: int
    arrays: int
    is_async: bool
    in_branch: bool
    op_name: str

    @property
    def total_wire_bytes(self) -> float:
        """Bytes one device sends in one run of the program."""
        return self.wire_bytes * self.count


def collectives(text: str) -> list[Collective]:
    """Every collective of a program in printed order; a start and its done are one.

    Raises `ValueError` when one stands in a loop without a static trip count, or names its groups
    in an unknown form.
    """
    module = parse(text)

    def own(body: Computation, instruction: Instruction) -> list[Collective]:
        return _own_collectives(module, body, instruction)

    def add(parts: list[list[Collective]]) -> list[Collective]:
        return [collective for part in parts for collective in part]

    def times(part: list[Collective], n: int) -> list[Collective]:
        return [replace(item, count=item.count * n) for item in part]

    def choose(parts: list[list[Collective]]) -> list[Collective]:
        return [replace(item, in_branch=True) for item in add(parts)]

    return fold(module, own, add, times, choose)


SENT = {
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-gather": lambda n: (n - 1) / n,
    "reduce-scatter": lambda n: (n - 1) / n,
    "all-to-all": lambda n: (n - 1) / n,
    "ragged-all-to-all": lambda n: (n - 1) / n,
    "collective-broadcast": lambda n: (n - 1) / n,
    "collective-permute": lambda n: float(n > 1),
}
"""Share of the full buffer that a device sends, from the group size n."""


def _own_collectives(
    module: Module, body: Computation, instruction: Instruction
) -> list[Collective]:
    kind = instruction.opcode.removesuffix("-start")
    attributes = instruction.attributes
    if kind == "send" and "_source_target_pairs" in attributes.get("frontend_attributes", ""):
        kind = "collective-permute"  # as GPU pipelining rewrites it
    if kind not in SENT:
        return []
    if kind == "all-reduce" and body.name.startswith("all-reduce-scatter"):
        kind = "reduce-scatter"  # TPU's custom fusion: an all-reduce of which a slice is kept
    # TPU repeats an asynchronous collective in every fusion it passes through, same chain_id.
    chained = "chain_id" in attributes.get("frontend_attributes", "")
    if chained and not any(_starts_chain(other) for other in body.instructions.values()):
        return []
    in_place = '"is_sync":true' in attributes.get("backend_config", "")
    deferred = chained or (instruction.opcode != kind and not in_place)
    groups = _groups(module, kind, attributes)
    size = max(map(len, groups), default=1)
    buffers: Counter[str] = Counter()
    arrays: Counter[str] = Counter()
    operands = [leaf for leaves in body.operand_shapes(instruction) for leaf in leaves]
    if kind == "ragged-all-to-all":
        operands = [ragged_buffer(operands)]
    if kind in ("all-reduce", "reduce-scatter") and len(instruction.shapes) == len(operands):
        # TPU takes bf16 and gives fp32: what travels are partial sums, in the result's type.
        pairs = zip(operands, instruction.shapes, strict=True)
        operands = [Shape(result.dtype, operand.dims) for operand, result in pairs]
    for shape in operands:
        buffers[shape.dtype] += shape.bytes * (size if kind == "all-gather" else 1)
        arrays[shape.dtype] += 1
    # Without a split dim, an all-to-all takes one operand for each device.
    tiles = size if kind == "all-to-all" and "dimensions" not in attributes else 1
    return [
        Collective(
            name=instruction.name,
            kind=kind,
            dtype=dtype,
            buffer_bytes=buffer_bytes,
            wire_bytes=buffer_bytes * SENT[kind](size),
            group_size=size,
            groups=groups,
            count=1,
            arrays=arrays[dtype] // tiles,
            is_async=deferred,
            in_branch=False,
            op_name=instruction.op_name,
        )
        for dtype, buffer_bytes in buffers.items()
        if dtype != "token"
    ]


def ragged_buffer(operands: Sequence[Shape]) -> Shape:
    """The operand of a ragged all-to-all that bounds what it moves: the smaller of its first two,
    the array it reads and the one it writes to."""
    return min(operands[:2], key=lambda shape: shape.bytes)


def _starts_chain(instruction: Instruction) -> bool:
    return "AsyncCollectiveStart" in instruction.attributes.get("custom_call_target", "")


def _groups(module: Module, kind: str, attributes: dict[str, str]) -> DeviceGroups:
    if kind == "collective-permute":
        stated = attributes.get("source_target_pairs") or attributes["frontend_attributes"]
        pairs = re.findall(r"\{(\d+),(\d+)\}", stated)
        return connected([(int(source), int(target)) for source, target in pairs])
    text = attributes.get("replica_groups", "{}")
    if "device_ids" in attributes:
        text = f"{text}, device_ids={attributes['device_ids']}"
    across = "channel_id" in attributes
    everyone = module.replicas * (module.partitions if across else 1)
    groups = replica_groups(text) or (tuple(range(everyone)),)
    reduces = kind in ("all-reduce", "all-gather", "reduce-scatter")
    if reduces and across and attributes.get("use_global_device_ids") != "true":
        # Then groups list replicas, and a replica means all its partitions.
        partitions = range(module.partitions)
        groups = tuple(
            tuple(r * len(partitions) + p for r in group for p in partitions) for group in groups
        )
    return groups


def peak_memory(compiled: jax.stages.Compiled) -> dict[str, int | None]:
    """Bytes per device of a compiled program: argument, output, alias, temp, host_temp, peak.

    `peak_bytes` is the compiler's own peak. CPU reports one without temporaries, so there it is
    the bound argument + output - alias + temp. A backend without an analysis gives None for each.
    """
    stats = compiled.memory_analysis()
    names = ("argument", "output", "alias", "temp")
    sizes: dict[str, int | None] = {
        f"{name}_bytes": getattr(stats, f"{name}_size_in_bytes", None)
        for name in (*names, "host_temp")
    }
    argument, output, alias, temp = (sizes[f"{name}_bytes"] for name in names)
    if argument is None or output is None or alias is None or temp is None:
        return {**sizes, "peak_bytes": None}
    reported = getattr(stats, "peak_memory_in_bytes", 0)
    bound = argument + output - alias + temp
    return {**sizes, "peak_bytes": reported if reported and not _on_cpu(compiled) else bound}


def _on_cpu(compiled: jax.stages.Compiled) -> bool:
    # The program may be compiled for another machine: ask it, not the process.
    shardings = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    return any(device.platform == "cpu" for item in shardings[:1] for device in item.device_set)
