"""How a run stands on fewer machines than its mesh has: a mesh, and as many more microbatches.

The global batch stays, and so does what is learned: microbatches are summed before the update. A
device has no more rows of a microbatch than on the whole mesh, so activations take no more memory;
what it holds of the state may grow, and is held against what its chip has room for.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from jaxtrain.experiment import Experiment
from jaxtrain.mesh.axes import BATCH_AXES
from jaxtrain.mesh.mesh import AxisSizes, MeshSpec, format_axes
from jaxtrain.run.check import check
from jaxtrain.violations import raise_violations

KEPT = ("tensor", "context", "stage", "expert", "fsdp", "replica")
"""Mesh axes, those first that keep their size longest. What is left of the devices is `data`."""


class Standing(NamedTuple):
    """machines: how many take part. axes: of the mesh. microbatches: of the experiment."""

    machines: int
    axes: AxisSizes
    microbatches: int

    def __str__(self) -> str:
        return f"{format_axes(self.axes)}, microbatches={self.microbatches}"


@dataclass(frozen=True)
class Standings:
    """Number of machines that are there -> how the run stands on them, or on some of them; numbers
    on which it does not are left out."""

    of: Mapping[int, Standing]

    def __str__(self) -> str:
        lines = [f"{'machines':>8} {'used':>5}  mesh"]
        lines += [f"{n:>8} {each.machines:>5}  {each}" for n, each in sorted(self.of.items())]
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        """What scripts may rely on."""
        return {
            str(n): {**each._asdict(), "axes": dict(each.axes), "told": str(each)}
            for n, each in self.of.items()
        }


def standings(experiment: Experiment, spec: MeshSpec, machines: int) -> Standings:
    """For each number of machines up to `machines`, which is that of the whole mesh. No device is
    needed. Raises ValueError where the mesh cannot be shared out among them, and what `check`
    raises of the experiment on the whole mesh."""
    raise_violations(_not_shared(spec, machines), spec.where)
    batch = check(experiment, spec, data_here=False).assembly.largest_batch
    whole = Standing(machines, spec.axes, experiment.microbatches)
    found: dict[int, Standing] = {}
    for number in range(1, machines):
        fits = (each for each in _candidates(whole, batch, spec, number))
        best = next((each for each in fits if _fits(experiment, spec, machines, each)), None)
        if best or number - 1 in found:
            found[number] = best or found[number - 1]
    return Standings({**found, machines: whole})


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


def _candidates(whole: Standing, batch: int, spec: MeshSpec, number: int) -> Iterator[Standing]:
    """Meshes of all devices of `number` machines, the best first: no axis is longer than it was,
    and `data` is cut first."""
    devices, sizes = spec.devices // whole.machines * number, dict(spec.axes)
    ranges = [[n for n in range(1, size + 1) if devices % n == 0] for size in sizes.values()]
    cuts = [dict(zip(sizes, cut, strict=True)) for cut in itertools.product(*ranges)]
    full = [cut for cut in cuts if math.prod(cut.values()) == devices]
    for cut in sorted(full, key=lambda cut: [-cut.get(axis, 1) for axis in KEPT]):
        if micro := _microbatches(batch, whole.microbatches, _ways(sizes), _ways(cut)):
            yield Standing(number, tuple(cut.items()), micro)


def _ways(sizes: Mapping[str, int]) -> int:
    """Parts into which a microbatch is split."""
    return math.prod(sizes.get(axis, 1) for axis in BATCH_AXES)


def _microbatches(batch: int, old: int, before: int, ways: int) -> int | None:
    """The fewest with which a device has no more rows of one than before, each of the `old` ones
    being some whole ones now; None where the batch does not divide so. before, ways: parts of a
    microbatch then and now."""
    rows = batch // (old * before)
    for times in range(1, batch // old + 1):
        left, odd = divmod(batch, old * times * ways)
        if not odd and left <= rows:
            return old * times
    return None


def _fits(experiment: Experiment, spec: MeshSpec, machines: int, standing: Standing) -> bool:
    devices = spec.devices // machines * standing.machines
    try:
        whole = min(spec.devices_per_host, devices)
        cut = replace(spec, axes=standing.axes, devices=devices, devices_per_host=whole)
        check(replace(experiment, microbatches=standing.microbatches), cut, data_here=False)
    except ValueError:
        return False
    return True
