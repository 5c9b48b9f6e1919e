"""`bench gpu`: every part in a process of its own, with a time limit; its results are stored at
once.

A part that crashes, hangs or runs out of memory affects only itself, and frees its memory. Parts
with results are not measured again: the same command goes on where it was stopped.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jaxtrain.bench.processes import answers
from jaxtrain.bench_gpu.parts import PARTS, groups_of, within
from jaxtrain.bench_gpu.results import (
    DONE,
    FAILED,
    LINES,
    SKIPPED,
    TABLES,
    PartResult,
    add_result,
    devices,
    over_torch,
    read_results,
    tables,
)
from jaxtrain.bench_gpu.worker import environment
from jaxtrain.files.stores import local_path
from jaxtrain.violations import did_you_mean, raise_violations

LIMIT_S = 300.0
"""Of a part: one that hangs is ended then."""

CommandOf = Callable[[str], Sequence[str]]
"""part -> what its process is started with, after `python`."""


@dataclass(frozen=True)
class GpuReport:
    """results: of every known part, in the order of their names in `PARTS`. out: their folder."""

    results: Mapping[str, PartResult]
    out: Path

    def table(self) -> str:
        return f"{tables(self.results.values())}\n\n{self.out / LINES}, {self.out / TABLES}"

    def as_json(self) -> dict[str, Any]:
        """over_torch: tokens a second over torch's, of the turns; None until both have had one."""
        parts = [asdict(result) for result in self.results.values()]
        return {"over_torch": over_torch(self.results), "parts": parts}


def bench_gpu(
    out: str | Path,
    *,
    parts: Sequence[str] | None = None,
    mesh: str | None = None,
    dry_run: bool = False,
    limit_s: float = LIMIT_S,
    command: CommandOf | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> GpuReport:
    """Measures the parts that `out` lacks, and failed ones; or `parts` (names or groups), again if
    it has them.

    mesh: a mesh file of one device, for one that is not in the table of chips. dry_run: all parts
    at sizes that mean nothing, on a CPU. limit_s: seconds a part may take. command: arguments of a
    part's process.

    Raises ValueError for unknown parts, results of another device, and where there is no known
    accelerator.
    """
    out = local_path("out", out)
    requested, earlier = chosen(parts), read_results(out)
    if any(result.dry != dry_run for result in earlier.values()):
        had, have = ("measured", "a dry run's") if dry_run else ("a dry run's", "measured")
        raise ValueError(
            f"{out / LINES} has results that are {had}, not {have}; give another --out"
        )
    out.mkdir(parents=True, exist_ok=True)
    ended = {part for part, result in earlier.items() if result.state != FAILED}
    waiting = requested if parts is not None else [part for part in requested if part not in ended]
    run = command or _command(out, mesh, dry_run)
    for number, part in enumerate(waiting, 1):
        progress(f"{number} of {len(waiting)}: {part}")
        env = environment(part, dry=dry_run, out=out, environ=dict(os.environ))
        result = _one(part, (run(part), env), dry=dry_run, limit_s=limit_s)
        other_devices = devices(read_results(out)) - {result.device}
        if result.device is not None and other_devices:
            raise ValueError(
                f"{out / LINES} was measured on {', '.join(sorted(other_devices))}, and this is "
                f"{result.device}; give another --out"
            )
        add_result(out, result)
        reason = f": {result.reason}" if result.why else ""
        progress(f"  {result.state} in {result.seconds:.0f} s{reason}")
    results = read_results(out)
    return GpuReport({part: results[part] for part in PARTS if part in results}, out)


def chosen(selection: Sequence[str] | None) -> list[str]:
    """Returns the parts with these names or groups, in the order of `PARTS`; None: all."""
    if selection is None:
        return list(PARTS)
    groups = dict.fromkeys(group for part in PARTS for group in groups_of(part))
    names = [*PARTS, *groups]
    raise_violations(
        [
            f"there is no part {name!r}{did_you_mean(name, names)}; parts are those of "
            f"{', '.join(groups)}"
            for name in selection
            if name not in names
        ],
        "bench gpu",
    )
    return [part for part in PARTS if any(within(part, name) for name in selection)]


def _command(out: Path, mesh: str | None, dry_run: bool) -> CommandOf:
    options = [*(["--mesh", str(mesh)] if mesh else []), *(["--dry-run"] if dry_run else [])]
    return lambda part: ["-m", "jaxtrain.bench_gpu.worker", part, str(out.absolute()), *options]


def _one(
    part: str, command: tuple[Sequence[str], Mapping[str, str]], *, dry: bool, limit_s: float
) -> PartResult:
    """Returns the result of a part's process, which runs until its end or the limit. Raises
    ValueError with the process's refusal."""
    began, lines = time.monotonic(), list[dict[str, Any]]()
    error_text = None
    try:
        for (line,) in answers([command], silent_s=math.inf, limit_s=limit_s):
            lines.append(line)
    except RuntimeError as error:
        error_text = str(error)
    facts: dict[str, Any] = {}
    for line in lines:
        facts |= line
    skipped = facts.get("skipped")
    return PartResult(
        part=part,
        state=FAILED if error_text is not None else SKIPPED if skipped is not None else DONE,
        device=facts.get("device"),
        dry=dry,
        seconds=time.monotonic() - began,
        rows=[line["row"] for line in lines if "row" in line],
        why=facts.get("failed") or error_text or skipped,
    )
