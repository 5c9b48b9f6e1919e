"""`bench collectives`: each algorithm against its `lax` twin, in turn, in the same processes.

On simulated CPU devices also across processes of this machine, connected by gloo. The processes are
started here and measure (`collectives_worker`); this one only waits.
"""

from __future__ import annotations

import os
import re
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jaxtrain.bench.collectives_worker import (
    ALGORITHMS,
    ITEMSIZE,
    MATMULS,
    RINGS,
    Case,
    arguments_of,
)
from jaxtrain.bench.processes import answers
from jaxtrain.bench.step import environment
from jaxtrain.cluster.join import free_port
from jaxtrain.collectives.cost import cost, traffic
from jaxtrain.collectives.cost.steps import COLLECTIVES
from jaxtrain.mesh.mesh import DEVICE_COUNT_FLAG, MeshSpec, mesh_from_axes
from jaxtrain.violations import did_you_mean, raise_violations

MEASURED = (*COLLECTIVES, *MATMULS)
OURS = tuple(name for name in ALGORITHMS if name != "lax")
SIZES = (4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20)
PROCESSES = (1, 2, 4)
"""Numbers of processes; those that divide the devices are measured."""

UNROOTED = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", *MATMULS)
"""Collectives of a training step; the default across processes."""

LARGE = 16 << 20
"""Bytes beyond which only unrolled rings are measured by default: the others double the time."""

SILENT_S = 300.0
"""Seconds without a result after which processes are ended: the slowest result takes tens."""

UNITS = {"": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}
_TWIN = {"gather_matmul": "all_gather", "matmul_scatter": "reduce_scatter"}
"""Collective matmul -> the collective that sends the same."""


@dataclass(frozen=True)
class AlgorithmRow:
    """One algorithm of a collective, compared with `lax`.

    bytes: of the whole buffer on one device. seconds, lax_seconds: median of the calls, each the
    time of the slowest process, dispatch included. sent_bytes: by the device that sends most.
    predicted_ratio: `cost`'s for the mesh file's outermost link; None without a link, across
    processes (gloo is no link of the file), and for matmuls, which also multiply.
    """

    collective: str
    algorithm: str
    processes: int
    bytes: int
    seconds: float
    lax_seconds: float
    sent_bytes: float
    predicted_ratio: float | None

    @property
    def ratio(self) -> float:
        """Seconds over lax's: below 1 is faster than lax."""
        return self.seconds / self.lax_seconds


@dataclass(frozen=True)
class CollectivesReport:
    mesh: str
    devices: int
    rows: tuple[AlgorithmRow, ...]

    def as_json(self) -> dict[str, Any]:
        rows = [{**asdict(row), "ratio": row.ratio} for row in self.rows]
        return {"mesh": self.mesh, "devices": self.devices, "dtype": "float32", "rows": rows}

    def table(self) -> str:
        """Returns `HEAD`, a line for each collective, size and number of processes, and
        `summary`."""
        groups: dict[tuple[int, str, int], list[AlgorithmRow]] = {}
        for row in self.rows:
            groups.setdefault((row.processes, row.collective, row.bytes), []).append(row)
        return "\n".join([HEAD, *map(line, groups.values()), self.summary()])

    def summary(self) -> str:
        """Returns, for each number of processes, how often each algorithm was faster than lax."""
        lines = []
        for processes in dict.fromkeys(row.processes for row in self.rows):
            rows = [row for row in self.rows if row.processes == processes]
            wins = Counter(row.algorithm for row in rows if row.ratio < 1)
            shares = ", ".join(
                f"{name} {wins[name]} of {total}"
                for name, total in Counter(row.algorithm for row in rows).items()
            )
            lines.append(f"{_in_processes(processes)}, faster than lax: {shares}")
        return "\n".join(lines)


HEAD = (
    f"{'processes':>9} {'collective':<14} {'size':>7} {'lax ms':>9}  "
    + " ".join(f"{name:>15}" for name in OURS)
    + "   seconds over lax's (as predicted)"
)


def line(rows: Sequence[AlgorithmRow]) -> str:
    """Returns the rows of one collective, size and number of processes as a line under `HEAD`."""
    first, by_name = rows[0], {row.algorithm: row for row in rows}
    cells = " ".join(f"{_cell(by_name.get(name)):>15}" for name in OURS)
    return (
        f"{first.processes:>9} {first.collective:<14} {_size(first.bytes):>7} "
        f"{first.lax_seconds * 1e3:>9.2f}  {cells}"
    ).rstrip()


def _cell(row: AlgorithmRow | None) -> str:
    if row is None:
        return "-"
    predicted = "" if row.predicted_ratio is None else f" ({row.predicted_ratio:.2f})"
    return f"{row.ratio:.2f}{predicted}"


def _size(nbytes: int) -> str:
    for unit, scale in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes % scale == 0:
            return f"{nbytes // scale}{unit}"
    return f"{nbytes}B"


def _in_processes(processes: int) -> str:
    return "in one process" if processes == 1 else f"across {processes} processes"


def read_size(text: str) -> int:
    """Returns the bytes of `65536`, `64KiB` or `1MiB`; raises ValueError for other texts."""
    match = re.fullmatch(r"(\d+) *([a-z]*)", text.strip().lower())
    if not match or match[2] not in UNITS:
        raise ValueError(f"size {text!r} is no number of bytes; write 65536, 64KiB or 1MiB")
    return int(match[1]) * UNITS[match[2]]


def read_count(text: str) -> int:
    """Returns a number of processes; raises ValueError for a text that is no whole number."""
    if not text.strip().isdecimal():
        raise ValueError(f"processes {text!r} is no whole number; write 1,2,4")
    return int(text)


def bench_collectives(
    spec: MeshSpec,
    *,
    collectives: Sequence[str] | None = None,
    algorithms: Sequence[str] | None = None,
    sizes: Sequence[int] | None = None,
    processes: Sequence[int] | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> CollectivesReport:
    """Times every algorithm of the package over all devices of a mesh, in float32.

    collectives: of `MEASURED`; None: all, across processes the `UNROOTED`. algorithms: of `OURS`;
    None: all, across processes no looped rings, and beyond `LARGE` unrolled rings alone. sizes:
    bytes of the whole buffer on one device, as `cost` counts; for `gather_matmul` of the gathered
    x, for `matmul_scatter` of the product that is scattered; None: `SIZES`, or the next that split
    over the devices. processes: numbers of processes that share the devices, in turn; None:
    `PROCESSES` that divide the devices if these are simulated, else one. progress: called with
    `HEAD`, and each line as it is measured.

    Every result is compared with lax's, to the bit, before it is timed. Raises ValueError with all
    violations; RuntimeError, with its last output, when a process fails (also for a wrong result)
    or gives no result for `SILENT_S`.
    """
    if processes is None:
        processes = [p for p in PROCESSES if spec.simulated and spec.devices % p == 0] or [1]
    if sizes is None:
        sizes = [_splits(size, spec.devices) for size in SIZES]
    raise_violations(_violations(spec, collectives, algorithms, sizes, processes), spec.where)
    progress(HEAD)
    rows = []
    for number in processes:
        cases = cases_of(number, collectives, algorithms, sizes)
        env, port = worker_environment(spec, number, os.environ), free_port()
        commands = [
            (arguments_of(spec, cases, processes=number, index=index, port=port), env)
            for index in range(number)
        ]
        for answer in answers(commands, silent_s=SILENT_S):
            measured = _rows(spec, number, answer)
            progress(line(measured))
            rows += measured
    return CollectivesReport(Path(spec.where).stem, spec.devices, tuple(rows))


def cases_of(
    processes: int,
    collectives: Sequence[str] | None,
    algorithms: Sequence[str] | None,
    sizes: Sequence[int],
) -> list[Case]:
    """Returns the cases to measure, with the defaults of `bench_collectives`. Recursive doubling
    has no collective matmul; a case without algorithms is left out."""
    names = collectives or (MEASURED if processes == 1 else UNROOTED)
    unrolled = tuple(name for name in OURS if not name.endswith("_looped"))
    cases = []
    for name in names:
        for nbytes in sizes:
            chosen = algorithms or (OURS if processes == 1 else unrolled)
            if algorithms is None and nbytes > LARGE:
                chosen = [a for a in unrolled if a in RINGS]
            if supported := tuple(a for a in chosen if a in RINGS or name not in MATMULS):
                cases.append((name, nbytes, supported))
    return cases


def _violations(
    spec: MeshSpec,
    collectives: Sequence[str] | None,
    algorithms: Sequence[str] | None,
    sizes: Sequence[int],
    processes: Sequence[int],
) -> list[str]:
    n = spec.devices
    named = {"collectives": (collectives, MEASURED), "algorithms": (algorithms, OURS)}
    options = {"collectives": collectives, "algorithms": algorithms}
    options |= {"sizes": sizes, "processes": processes}
    problems = [
        f"no {name} are given; give at least one"
        for name, values in options.items()
        if values is not None and not values
    ]
    if n == 1:
        problems.append("a collective needs 2 devices or more, and this mesh has one")
    problems += [
        f"{option}: {word!r} is not known{did_you_mean(word, allowed)}"
        for option, (words, allowed) in named.items()
        for word in words or ()
        if word not in allowed
    ]
    if collectives and algorithms and not cases_of(1, collectives, algorithms, SIZES):
        problems.append("there is no collective matmul by recursive; add a ring to algorithms")
    problems += [
        f"size {size} is no float32 elements that split over {n} devices; "
        f"use {_splits(max(1, size), n)}"
        for size in sizes
        if size < 1 or size != _splits(size, n)
    ]
    for number in processes:
        if number < 1 or n % number:
            fits = [str(p) for p in range(1, n + 1) if n % p == 0]
            problems.append(
                f"{n} devices do not split over processes={number}; use {', '.join(fits)}"
            )
        elif number > 1 and not spec.simulated:
            problems.append(
                f"processes={number} share simulated devices; use processes=1, or --simulate"
            )
    return problems


def _splits(size: int, n: int) -> int:
    """Returns the bytes, `size` or the next larger, of elements that split over n devices."""
    return -(-size // (ITEMSIZE * n)) * ITEMSIZE * n


def worker_environment(
    spec: MeshSpec, processes: int, environ: Mapping[str, str]
) -> dict[str, str]:
    """Returns a process's environment: that of `bench step`, with its share of the simulated
    devices; the device count in the user's own XLA_FLAGS is replaced."""
    if not spec.simulated:
        return environment(spec, environ)
    flags = re.sub(rf"{DEVICE_COUNT_FLAG}=\d+", "", environ.get("XLA_FLAGS", "")).strip()
    share = mesh_from_axes(data=spec.devices // processes)
    return environment(share, {**environ, "XLA_FLAGS": flags})


def _rows(
    spec: MeshSpec, processes: int, timings: Sequence[Mapping[str, Any]]
) -> list[AlgorithmRow]:
    """Returns the rows of one answer of all processes."""
    name, nbytes = timings[0]["collective"], timings[0]["bytes"]
    seconds = {
        algorithm: statistics.median(
            map(max, zip(*(t["seconds"][algorithm] for t in timings), strict=True))
        )
        for algorithm in timings[0]["seconds"]
    }
    twin = _TWIN.get(name, name)
    return [
        AlgorithmRow(
            collective=name,
            algorithm=algorithm,
            processes=processes,
            bytes=nbytes,
            seconds=seconds[algorithm],
            lax_seconds=seconds["lax"],
            sent_bytes=traffic(twin, algorithm, spec.devices, nbytes).device_bytes,
            predicted_ratio=_predict(spec, name, algorithm, nbytes) if processes == 1 else None,
        )
        for algorithm in seconds
        if algorithm != "lax"
    ]


def _predict(spec: MeshSpec, name: str, algorithm: str, nbytes: int) -> float | None:
    if not spec.links or name in MATMULS:
        return None
    link = spec.links[-1][1]  # outermost: traffic between all devices passes it
    ours, lax = (cost(name, entry, spec.devices, nbytes, link) for entry in (algorithm, "lax"))
    return ours.time_us / lax.time_us
