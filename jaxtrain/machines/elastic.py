"""Plans for fewer machines than a mesh has: a smaller mesh, and more microbatches.

The global batch stays the same, and so does the training result: microbatches are summed before the
update. A device has at most as many rows per microbatch as on the full mesh, so activations take no
more memory. Its share of the state may grow, and is checked against the chip's memory.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from jaxtrain.experiment import Experiment, load_experiment
from jaxtrain.mesh.axes import BATCH_AXES, ROWS
from jaxtrain.mesh.mesh import AxisSizes, MeshSpec, format_axes, load_mesh
from jaxtrain.session.check import check
from jaxtrain.violations import raise_violations

KEPT = sorted(ROWS, key=lambda axis: ROWS[axis].kept)
"""Mesh axes, first those that keep their size longest."""


class ElasticPlan(NamedTuple):
    """Mesh and microbatches on `machines` machines. axes: of the mesh."""

    machines: int
    axes: AxisSizes
    microbatches: int

    def __str__(self) -> str:
        return f"{format_axes(self.axes)}, microbatches={self.microbatches}"


@dataclass(frozen=True)
class ElasticPlans:
    """plans: number of present machines -> the plan, for all or some of them. Numbers without a
    plan are left out."""

    plans: Mapping[int, ElasticPlan]

    def __str__(self) -> str:
        lines = [f"{'machines':>8} {'used':>5}  mesh"]
        lines += [f"{n:>8} {plan.machines:>5}  {plan}" for n, plan in sorted(self.plans.items())]
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        """JSON for scripts; its keys are stable."""
        return {
            str(n): {**plan._asdict(), "axes": dict(plan.axes), "told": str(plan)}
            for n, plan in self.plans.items()
        }


def elastic(
    experiment: Experiment | str | Path, mesh: MeshSpec | str | Path, machines: int
) -> ElasticPlans:
    """Returns a plan for each number of machines up to `machines`, the number for the full mesh.
    Needs no device. Raises ValueError if the mesh cannot be divided among the machines, and what
    `check` raises for the experiment on the full mesh."""
    if not isinstance(experiment, Experiment):
        experiment = load_experiment(experiment)
    spec = load_mesh(mesh)
    raise_violations(_not_shared(spec, machines), spec.where)
    batch = check(experiment, spec, data_here=False).assembly.largest_batch
    full = ElasticPlan(machines, spec.axes, experiment.microbatches)
    plans: dict[int, ElasticPlan] = {}
    for number in range(1, machines):
        candidates = _candidates(full, batch, spec, number)
        best = next((c for c in candidates if _fits(experiment, spec, machines, c)), None)
        if best or number - 1 in plans:
            plans[number] = best or plans[number - 1]
    return ElasticPlans({**plans, machines: full})


def _not_shared(spec: MeshSpec, machines: int) -> list[str]:
    if machines < 1 or spec.devices % machines:
        return [
            f"{spec.devices} devices, of which {machines} machines cannot have as many each; use a "
            f"number of machines that divides {spec.devices}"
        ]
    if spec.topology is not None and machines > 1:
        chips = math.prod(map(int, spec.topology.split("x"))) * spec.chip.devices_per_chip
        if spec.devices // machines % chips:
            return [
                f"a TPU slice of topology {spec.topology} is {chips} devices, which come and go "
                f"together; use a machine for each slice ({spec.devices // chips}), or leave out "
                "--elastic"
            ]
    return []


def _candidates(
    original: ElasticPlan, batch: int, spec: MeshSpec, number: int
) -> Iterator[ElasticPlan]:
    """Meshes of all devices of `number` machines, the best first: no axis is longer than on the
    original mesh, and the last of KEPT is reduced first."""
    devices, sizes = spec.devices // original.machines * number, dict(spec.axes)
    ranges = [[n for n in range(1, size + 1) if devices % n == 0] for size in sizes.values()]
    cuts = [dict(zip(sizes, cut, strict=True)) for cut in itertools.product(*ranges)]
    complete = [cut for cut in cuts if math.prod(cut.values()) == devices]
    for cut in sorted(complete, key=lambda cut: [-cut.get(axis, 1) for axis in KEPT]):
        if micro := _microbatches(batch, original.microbatches, _ways(sizes), _ways(cut)):
            yield ElasticPlan(number, tuple(cut.items()), micro)


def _ways(sizes: Mapping[str, int]) -> int:
    """Number of parts into which the batch axes split a microbatch."""
    return math.prod(sizes.get(axis, 1) for axis in BATCH_AXES)


def _microbatches(batch: int, old: int, old_ways: int, ways: int) -> int | None:
    """Least multiple of `old` microbatches with no more rows per device and microbatch than before;
    None if the batch is not divisible. old_ways, ways: parts of a microbatch on the old and the new
    mesh."""
    rows = batch // (old * old_ways)
    for times in range(1, batch // old + 1):
        left, odd = divmod(batch, old * times * ways)
        if not odd and left <= rows:
            return old * times
    return None


def _fits(experiment: Experiment, spec: MeshSpec, machines: int, plan: ElasticPlan) -> bool:
    devices = spec.devices // machines * plan.machines
    try:
        per_host = min(spec.devices_per_host, devices)
        cut = replace(spec, axes=plan.axes, devices=devices, devices_per_host=per_host)
        check(replace(experiment, microbatches=plan.microbatches), cut, data_here=False)
    except ValueError:
        return False
    return True
