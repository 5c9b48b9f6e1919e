"""What a compiled program computes while its collectives are on their way.

Read from the schedule itself (`compiled.as_text()`): between the start of a collective and its done
stands what the device does meanwhile. Evidence of the compiler's intent, for one device; how long
each takes is not in it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from typing import TypeVar

from jaxtrain.telemetry.hlo.collectives import Collective, collectives, is_opaque
from jaxtrain.telemetry.hlo.loops import trip_count
from jaxtrain.telemetry.hlo.matmul import matmul_flops
from jaxtrain.telemetry.hlo.text import Computation, Instruction, Module, calls, parse
from jaxtrain.telemetry.hlo.totals import fold

_Key = TypeVar("_Key")

Place = tuple[str, int]
"""Of an instruction: its computation, and its number there in the order of the schedule."""


@dataclass(frozen=True)
class Work:
    """Matmuls (dots, convolutions, library gemms) and kernels of which FLOPs are known, loops
    multiplied, and their FLOPs."""

    matmuls: int = 0
    flops: float = 0.0

    def __bool__(self) -> bool:
        return self.matmuls > 0

    def __add__(self, other: Work) -> Work:
        return Work(self.matmuls + other.matmuls, self.flops + other.flops)

    def __mul__(self, times: int) -> Work:
        return Work(self.matmuls * times, self.flops * times)


@dataclass(frozen=True)
class Overlap:
    """A collective, and the matmuls between its start and its done, each time it runs.

    `parts` are its bytes by dtype. `asynchronous`: it has a start and a done, and they are not one
    behind the other by the compiler's own word. between: the work of each instruction between, by
    its place (computation, number); what two collectives share is in both.
    """

    parts: tuple[Collective, ...]
    asynchronous: bool
    between: tuple[tuple[Place, Work], ...] = ()

    @property
    def work(self) -> Work:
        """Of all between."""
        return sum((work for _, work in self.between), Work())

    @property
    def kind(self) -> str:
        return self.parts[0].kind

    @property
    def count(self) -> int:
        """Runs in one run of the program."""
        return self.parts[0].count

    @property
    def wire_bytes(self) -> float:
        """Bytes one device sends in one run of the program."""
        return sum(part.total_wire_bytes for part in self.parts)

    @property
    def hidden(self) -> bool:
        """Whether a matmul runs while it is on its way."""
        return self.work.matmuls > 0


@dataclass(frozen=True)
class Tally:
    """How many collectives run in one run of the program, and the bytes one device sends in them;
    of all, of those that are asynchronous, of those hidden behind matmuls."""

    count: int
    asynchronous: int
    hidden: int
    wire_bytes: float
    asynchronous_bytes: float
    hidden_bytes: float

    @property
    def exposed_bytes(self) -> float:
        """What is sent and not hidden."""
        return self.wire_bytes - self.hidden_bytes


def overlaps(text: str, kernel_flops: float = 0.0) -> list[Overlap]:
    """Every collective of a scheduled program, in printed order.

    kernel_flops: what each kernel that XLA cannot see into (Pallas, cuDNN) has at the least; of 0
    FLOPs it hides nothing. Raises ValueError for a program without a schedule, and as
    `hlo.collectives` does.
    """
    if "is_scheduled=true" not in text.partition("\n")[0]:
        raise ValueError(
            "this HLO has no schedule (is_scheduled=true), so what stands between two instructions "
            "means nothing; pass compiled.as_text(), not lowered.as_text()"
        )
    windows = _windows(parse(text), kernel_flops)
    named: dict[str, dict[str, Collective]] = defaultdict(dict)
    for each in collectives(text):
        # Called from two places it is still one instruction, and runs as often as both say.
        same = named[each.name].get(each.dtype)
        again = replace(each, count=each.count + same.count) if same else each
        named[each.name][each.dtype] = again
    return [
        Overlap(tuple(parts.values()), name in windows, windows.get(name, ()))
        for name, parts in named.items()
    ]


def tally(
    found: Iterable[Overlap],
    key: Callable[[Overlap], _Key] = lambda each: each.kind,
    bytes_per_flop: Callable[[Overlap], float] = lambda each: math.inf,
) -> dict[_Key, Tally]:
    """Totals by kind, or by another key: `lambda each: (each.kind, each.groups)` tells mesh axes
    apart.

    bytes_per_flop: what its link sends in the time of one FLOP. Of a collective that is on its way
    while matmuls run as many bytes are hidden as the link sends in their time; without it all. A
    matmul hides one collective at a time: of several first the one that is awaited first.
    """
    rows: dict[_Key, list[Overlap]] = defaultdict(list)
    every = list(found)
    for each in every:
        rows[key(each)].append(each)
    sent = _sent_behind(every, bytes_per_flop)

    def total(row: list[Overlap]) -> tuple[int, float]:
        return sum(each.count for each in row), sum(each.wire_bytes for each in row)

    tallies = {}
    for name, row in rows.items():
        count, wire = total(row)
        deferred, deferred_bytes = total([each for each in row if each.asynchronous])
        hidden, _ = total([each for each in row if each.hidden])
        hidden_bytes = math.fsum(each.count * sent[id(each)] for each in row)
        tallies[name] = Tally(count, deferred, hidden, wire, deferred_bytes, hidden_bytes)
    return tallies


def _sent_behind(
    found: list[Overlap], bytes_per_flop: Callable[[Overlap], float]
) -> dict[int, float]:
    """By identity, of each collective the bytes of one run that its link sends while matmuls do:
    the FLOPs of each matmul dealt to those on their way, the one that is awaited first first."""
    left = {id(each): each.wire_bytes / max(each.count, 1) for each in found}
    whole = dict(left)
    under_way: dict[Place, list[Overlap]] = defaultdict(list)
    work: dict[Place, Work] = {}
    for each in found:
        for place, of in each.between:
            if of:
                under_way[place].append(each)
                work[place] = of
    for place in sorted(work):
        flops = work[place].flops
        for each in sorted(under_way[place], key=lambda each: each.between[-1][0]):
            pace = bytes_per_flop(each)
            sent = min(left[id(each)], flops * pace)
            left[id(each)] -= sent
            flops -= sent / pace if pace else 0.0
    return {key: whole[key] - left[key] for key in whole}


def _windows(module: Module, kernel_flops: float) -> dict[str, tuple[tuple[Place, Work], ...]]:
    """Name of every collective that is started and awaited -> the instructions between, both
    included, with their work.

    Where a program awaits it elsewhere (in the next turn of a loop), the window ends with the body.
    """
    work = _work_of(module, kernel_flops)
    found = {}
    for body in module.computations.values():
        started: dict[str, tuple[str, int]] = {}
        ended: dict[str, int] = {}
        for at, each in enumerate(body.instructions.values()):
            started |= {key: (name, at) for key, name in _starts(module, each)}
            ended |= {key: at for key in _ends(module, each) if key in started}
        if not started:
            continue
        done = [work(body, each) for each in body.instructions.values()]
        for key, (name, at) in started.items():
            window = range(at, ended.get(key, len(done) - 1) + 1)
            found[name] = tuple(((body.name, i), done[i]) for i in window)
    return found


def _starts(module: Module, each: Instruction) -> list[tuple[str, str]]:
    """(what its end will name, the collective) for each collective that `each` starts."""
    if each.opcode == "fusion":
        return _chained(module, each, "AsyncCollectiveStart")
    if '"is_sync":true' in each.attributes.get("backend_config", ""):
        return []
    if each.opcode == "async-start":
        inner = module.computations[each.names("calls")[0]]
        return [(each.name, name) for name in inner.instructions]
    return [(each.name, each.name)] if each.opcode.endswith(("-start", "send")) else []


def _ends(module: Module, each: Instruction) -> list[str]:
    if each.opcode == "fusion":
        return [key for key, _ in _chained(module, each, "AsyncCollectiveDone")]
    return [each.operands[0]] if each.opcode.endswith("-done") else []


def _chained(module: Module, fusion: Instruction, target: str) -> list[tuple[str, str]]:
    """(chain, collective) of TPU's calls to `target` in a fusion. A collective that passes through
    many fusions is written in each, always with its chain's number."""
    inner = module.computations[fusion.names("calls")[0]].instructions
    return [
        (inner[name].attributes["frontend_attributes"], name)
        for each in inner.values()
        if target in each.attributes.get("custom_call_target", "")
        for name in each.operands
        if "chain_id" in inner[name].attributes.get("frontend_attributes", "")
    ]


def _work_of(module: Module, kernel_flops: float) -> Callable[[Computation, Instruction], Work]:
    """The matmuls of an instruction and of all it calls; of branches, those of the least."""

    def own(body: Computation, each: Instruction) -> Work:
        flops = kernel_flops if is_opaque(each) else matmul_flops(body, each)
        return Work(1, flops) if flops else Work()

    def add(parts: list[Work]) -> Work:
        return sum(parts, Work())

    def least(parts: list[Work]) -> Work:
        return min(parts, key=lambda work: (work.matmuls, work.flops))

    @cache
    def inside(name: str) -> Work:
        return fold(replace(module, entry=name), own, add, Work.__mul__, least)

    def work(body: Computation, each: Instruction) -> Work:
        total = own(body, each)
        for group in calls(each):
            inner = [inside(name) for name in group]
            total += least(inner) if each.opcode == "conditional" else add(inner)
        if each.opcode == "while":
            turn = add([inside(each.names(key)[0]) for key in ("condition", "body")])
            total += turn * trip_count(module, body, each) if turn else turn
        return total

    return work
