"""Layouts of a run on some of its machines: `elastic` plans as flags of `train`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxtrain.mesh.mesh import MeshSpec
from jaxtrain.mesh.mesh_file import mesh_text


class MachineLayout(NamedTuple):
    """machines: how many take part. flags: for `train`, after those of the command. description:
    the same as text."""

    machines: int
    flags: tuple[str, ...] = ()
    description: str = ""


def read_layouts(
    plans: Mapping[str, Any], spec: MeshSpec, folder: Path
) -> dict[int, MachineLayout]:
    """Returns number of present machines -> layout. plans: `ElasticPlans.as_json` of the mesh
    `spec`. folder: for the mesh files of fewer machines, readable by all machines."""
    folder.mkdir(parents=True, exist_ok=True)
    full, layouts = max(map(int, plans)), dict[int, MachineLayout]()
    for number, plan in plans.items():
        flags: tuple[str, ...] = ()
        if plan["machines"] < full:
            file = folder / f"{spec.name}_{plan['machines']}_of_{full}.toml"
            file.write_text(mesh_text(spec, tuple(plan["axes"].items())), encoding="utf-8")
            flags = ("--mesh", str(file), "--set", f"microbatches={plan['microbatches']}")
        layouts[int(number)] = MachineLayout(plan["machines"], flags, plan["told"])
    return layouts
