"""How a run is started on some of its machines: what `elastic` has found, as flags of `train`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxtrain.mesh.mesh import MeshSpec
from jaxtrain.mesh.mesh_file import mesh_text


class Layout(NamedTuple):
    """machines: how many take part. flags: of `train`, after those of the command. told: the same
    in words."""

    machines: int
    flags: tuple[str, ...] = ()
    told: str = ""


def read_layouts(found: Mapping[str, Any], spec: MeshSpec, folder: Path) -> dict[int, Layout]:
    """Number of machines that are there -> layout. found: `Standings.as_json`, of the mesh `spec`.
    folder: where the mesh files of fewer machines are written, which all machines read."""
    folder.mkdir(parents=True, exist_ok=True)
    wanted, layouts = max(map(int, found)), dict[int, Layout]()
    for number, told in found.items():
        flags: tuple[str, ...] = ()
        if told["machines"] < wanted:
            file = folder / f"{spec.name}_{told['machines']}_of_{wanted}.toml"
            file.write_text(mesh_text(spec, tuple(told["axes"].items())), encoding="utf-8")
            flags = ("--mesh", str(file), "--set", f"microbatches={told['microbatches']}")
        layouts[int(number)] = Layout(told["machines"], flags, told["told"])
    return layouts
