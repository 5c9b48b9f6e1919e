"""Layouts of a run on some of its machines: `elastic` plans as flags of `train`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxtrain.mesh.mesh import MeshSpec
from jaxtrain.mesh.mesh_file import mesh_text


class MachineLayout(NamedTuple):
    """machines: how many take part. flags: for `train`, after those of the command. description:
    the same as text. files: those that the flags name, and their text."""

    machines: int
    flags: tuple[str, ...] = ()
    description: str = ""
    files: tuple[tuple[Path, str], ...] = ()

    def write(self) -> None:
        """Writes the files, before each start: they may have been removed."""
        for path, text in self.files:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")


def read_layouts(
    plans: Mapping[str, Any], spec: MeshSpec, folder: Path
) -> dict[int, MachineLayout]:
    """Returns number of present machines -> layout. plans: `ElasticPlans.as_json` of the mesh
    `spec`. folder: for the mesh files of fewer machines, readable by all machines; they are not
    written yet."""
    full, layouts = max(map(int, plans)), dict[int, MachineLayout]()
    for number, plan in plans.items():
        flags, files = (), ()
        if plan["machines"] < full:
            file = folder / f"{spec.name}_{plan['machines']}_of_{full}.toml"
            files = ((file, mesh_text(spec, tuple(plan["axes"].items()))),)
            flags = ("--mesh", str(file), "--set", f"microbatches={plan['microbatches']}")
        layouts[int(number)] = MachineLayout(plan["machines"], flags, plan["told"], files)
    return layouts
