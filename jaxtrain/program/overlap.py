"""Computation of a compiled program that overlaps with its collectives.

Read from the schedule (`compiled.as_text()`): the instructions between a collective's start and its
done are what the device does meanwhile. This shows the compiler's intent for one device, not
durations.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple, TypeVar

from jaxtrain.program.collectives import Collective, collectives, is_opaque
from jaxtrain.program.loops import trip_count
from jaxtrain.program.matmul import matmul_flops
from jaxtrain.program.text import Computation, Instruction, Module, calls, parse
from jaxtrain.program.totals import callees, fold

_Key = TypeVar("_Key")

InstructionPlace = tuple[str, int]
"""Place of an instruction: its computation, and its index there in schedule order."""


@dataclass(frozen=True)
class MatmulWork:
    """Number and FLOPs of matmuls (dots, convolutions, library gemms) and of kernels with known
    FLOPs, loops multiplied."""

    matmuls: int = 0
    flops: float = 0.0

    def __bool__(self) -> bool:
        return self.matmuls > 0

    def __add__(self, other: MatmulWork) -> MatmulWork:
        return MatmulWork(self.matmuls + other.matmuls, self.flops + other.flops)

    def __mul__(self, times: int) -> MatmulWork:
        return MatmulWork(self.matmuls * times, self.flops * times)


class ScheduledWork(NamedTuple):
    """Work of one instruction, and of all that it calls. called: the computations that run within
    it, each with its number of runs."""

    place: InstructionPlace
    work: MatmulWork
    called: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Overlap:
    """A collective, and the matmuls between its start and its done, each time it runs.

    `parts` are its bytes by dtype. `asynchronous`: it has a start and a done, and the compiler does
    not mark it as synchronous. between: the instructions from start to done, both included; one
    between two collectives' starts and dones is in both.
    """

    parts: tuple[Collective, ...]
    asynchronous: bool
    between: tuple[ScheduledWork, ...] = ()

    @property
    def work(self) -> MatmulWork:
        """Total work between start and done."""
        return sum((scheduled.work for scheduled in self.between), MatmulWork())

    @property
    def kind(self) -> str:
        return self.parts[0].kind

    @property
    def count(self) -> int:
        """Number of runs in one run of the program."""
        return self.parts[0].count

    @property
    def wire_bytes(self) -> float:
        """Bytes one device sends in one run of the program."""
        return sum(part.total_wire_bytes for part in self.parts)

    @property
    def hidden(self) -> bool:
        """True if a matmul runs during the collective."""
        return self.work.matmuls > 0


@dataclass(frozen=True)
class Tally:
    """Number of collectives in one run of the program, and bytes that one device sends in them:
    all, the asynchronous ones, and those hidden behind matmuls."""

    count: int
    asynchronous: int
    hidden: int
    wire_bytes: float
    asynchronous_bytes: float
    hidden_bytes: float

    @property
    def exposed_bytes(self) -> float:
        """Bytes sent while no matmul runs."""
        return self.wire_bytes - self.hidden_bytes


def overlaps(text: str, kernel_flops: float = 0.0) -> list[Overlap]:
    """Every collective of a scheduled program, in printed order.

    kernel_flops: least FLOPs of each kernel that XLA cannot see into (Pallas, cuDNN); with 0, such
    a kernel hides nothing. Raises ValueError for a program without a schedule, and as
    `hlo.collectives` does.
    """
    if "is_scheduled=true" not in text.partition("\n")[0]:
        raise ValueError(
            "this HLO has no schedule (is_scheduled=true), so what stands between two instructions "
            "means nothing; pass compiled.as_text(), not lowered.as_text()"
        )
    windows = _windows(parse(text), kernel_flops)
    named: dict[str, dict[str, Collective]] = defaultdict(dict)
    for collective in collectives(text):
        # An instruction called from two places runs as often as both together.
        same = named[collective.name].get(collective.dtype)
        again = replace(collective, count=collective.count + same.count) if same else collective
        named[collective.name][collective.dtype] = again
    return [
        Overlap(tuple(parts.values()), name in windows, windows.get(name, ()))
        for name, parts in named.items()
    ]


def tally(
    windows: Iterable[Overlap],
    key: Callable[[Overlap], _Key] = lambda overlap: overlap.kind,
    bytes_per_flop: Callable[[Overlap], float] = lambda overlap: math.inf,
) -> dict[_Key, Tally]:
    """Totals by kind, or by another key: `lambda overlap: (overlap.kind, overlap.groups)` separates
    mesh axes.

    bytes_per_flop: bytes that the collective's link sends in the time of one FLOP. The hidden bytes
    of a collective are those that its link sends while matmuls run; by default all of them if
    any matmul does. A matmul hides one collective at a time: first the one that is awaited first.
    """
    rows: dict[_Key, list[Overlap]] = defaultdict(list)
    all_windows = list(windows)
    for overlap in all_windows:
        rows[key(overlap)].append(overlap)
    sent = _sent_behind(all_windows, bytes_per_flop)

    def total(row: list[Overlap]) -> tuple[int, float]:
        return sum(o.count for o in row), sum(o.wire_bytes for o in row)

    tallies = {}
    for name, row in rows.items():
        count, wire = total(row)
        deferred, deferred_bytes = total([o for o in row if o.asynchronous])
        hidden, _ = total([o for o in row if o.hidden])
        hidden_bytes = math.fsum(o.count * sent[id(o)] for o in row)
        tallies[name] = Tally(count, deferred, hidden, wire, deferred_bytes, hidden_bytes)
    return tallies


def _sent_behind(
    windows: list[Overlap], bytes_per_flop: Callable[[Overlap], float]
) -> dict[int, float]:
    """Bytes of one run that each collective's link sends during matmuls, by identity. The FLOPs of
    a matmul go to the collectives under way, first to the one that is awaited first: one within a
    loop before those that the whole loop hides."""
    left = {id(overlap): overlap.wire_bytes / max(overlap.count, 1) for overlap in windows}
    run_bytes = dict(left)
    under_way: dict[ScheduledWork, list[Overlap]] = defaultdict(list)
    depth: Counter[str] = Counter()
    for overlap in windows:
        for scheduled in overlap.between:
            if scheduled.work:
                under_way[scheduled].append(overlap)
                body = scheduled.place[0]
                depth[body] = max(depth[body], len(scheduled.called))
    spent: dict[str, float] = defaultdict(float)  # FLOPs of a computation on its own collectives
    for scheduled in sorted(under_way, key=lambda each: (depth[each.place[0]], each.place)):
        flops = scheduled.work.flops
        flops = max(0.0, flops - math.fsum(runs * spent[body] for body, runs in scheduled.called))
        for overlap in sorted(under_way[scheduled], key=lambda each: each.between[-1].place):
            pace = bytes_per_flop(overlap)
            sent = min(left[id(overlap)], flops * pace)
            left[id(overlap)] -= sent
            used = sent / pace if pace else 0.0
            flops -= used
            spent[scheduled.place[0]] += used
    return {key: run_bytes[key] - left[key] for key in run_bytes}


def _windows(module: Module, kernel_flops: float) -> dict[str, tuple[ScheduledWork, ...]]:
    """Name of every asynchronous collective -> the instructions from start to done.

    If it is awaited elsewhere (in the next turn of a loop), the window ends with the body.
    """
    work = _work_of(module, kernel_flops)
    spans: dict[str, tuple[Computation, range]] = {}
    for body in module.computations.values():
        started: dict[str, tuple[str, int]] = {}
        ended: dict[str, int] = {}
        for index, instruction in enumerate(body.instructions.values()):
            started |= {key: (name, index) for key, name in _starts(module, instruction)}
            ended |= {key: index for key in _ends(module, instruction) if key in started}
        for key, (name, index) in started.items():
            last = ended.get(key, len(body.instructions) - 1)
            spans[name] = body, range(index, last + 1)
    called = _called_of(module, work)

    @cache
    def listed(name: str) -> list[Instruction]:
        return [*module.computations[name].instructions.values()]

    @cache
    def scheduled(name: str, index: int) -> ScheduledWork:
        body, instruction = module.computations[name], listed(name)[index]
        total = work(body, instruction)
        inner = called(body, instruction) if total else Counter()
        return ScheduledWork((name, index), total, tuple(sorted(inner.items())))

    return {
        name: tuple(scheduled(body.name, index) for index in window)
        for name, (body, window) in spans.items()
    }


def _starts(module: Module, instruction: Instruction) -> list[tuple[str, str]]:
    """(key that its end will name, the collective's name) for each collective that it starts."""
    if instruction.opcode == "fusion":
        return _chained(module, instruction, "AsyncCollectiveStart")
    if '"is_sync":true' in instruction.attributes.get("backend_config", ""):
        return []
    if instruction.opcode == "async-start":
        inner = module.computations[instruction.names("calls")[0]]
        return [(instruction.name, name) for name in inner.instructions]
    return (
        [(instruction.name, instruction.name)]
        if instruction.opcode.endswith(("-start", "send"))
        else []
    )


def _ends(module: Module, instruction: Instruction) -> list[str]:
    if instruction.opcode == "fusion":
        return [key for key, _ in _chained(module, instruction, "AsyncCollectiveDone")]
    return [instruction.operands[0]] if instruction.opcode.endswith("-done") else []


def _chained(module: Module, fusion: Instruction, target: str) -> list[tuple[str, str]]:
    """(chain, collective) of TPU's calls to `target` in a fusion. A collective that passes through
    many fusions is repeated in each, with its chain's number."""
    inner = module.computations[fusion.names("calls")[0]].instructions
    return [
        (inner[name].attributes["frontend_attributes"], name)
        for call in inner.values()
        if target in call.attributes.get("custom_call_target", "")
        for name in call.operands
        if "chain_id" in inner[name].attributes.get("frontend_attributes", "")
    ]


def _work_of(
    module: Module, kernel_flops: float
) -> Callable[[Computation, Instruction], MatmulWork]:
    """Returns a function: work of an instruction and all it calls; of branches, the least one."""

    def own(body: Computation, instruction: Instruction) -> MatmulWork:
        flops = kernel_flops if is_opaque(instruction) else matmul_flops(body, instruction)
        return MatmulWork(1, flops) if flops else MatmulWork()

    def add(parts: list[MatmulWork]) -> MatmulWork:
        return sum(parts, MatmulWork())

    def least(parts: list[MatmulWork]) -> MatmulWork:
        return min(parts, key=lambda work: (work.matmuls, work.flops))

    @cache
    def inside(name: str) -> MatmulWork:
        return fold(replace(module, entry=name), own, add, MatmulWork.__mul__, least)

    def work(body: Computation, instruction: Instruction) -> MatmulWork:
        total = own(body, instruction)
        for group in calls(instruction):
            inner = [inside(name) for name in group]
            total += least(inner) if instruction.opcode == "conditional" else add(inner)
        if instruction.opcode == "while":
            turn = add([inside(instruction.names(key)[0]) for key in ("condition", "body")])
            total += turn * trip_count(module, body, instruction) if turn else turn
        return total

    return work


def _called_of(
    module: Module, work: Callable[[Computation, Instruction], MatmulWork]
) -> Callable[[Computation, Instruction], Counter[str]]:
    """Returns a function: how often each computation runs within an instruction. All branches of a
    conditional count as run; loops without work are left out."""

    @cache
    def inside(name: str) -> Counter[str]:
        body = module.computations[name]
        total = Counter({name: 1})
        for instruction in body.instructions.values():
            total.update(called(body, instruction))
        return total

    def called(body: Computation, instruction: Instruction) -> Counter[str]:
        once, runs = Counter[str](), 1
        if instruction.opcode == "while":
            if not work(body, instruction):
                return once
            runs = trip_count(module, body, instruction)
        for name in callees(instruction):
            once.update(inside(name))
        return Counter({name: runs * count for name, count in once.items()})

    return called
