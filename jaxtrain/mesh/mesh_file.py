"""Text of a mesh file, for more or fewer devices."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping

from jaxtrain.files.stores import local_path
from jaxtrain.mesh import library
from jaxtrain.mesh.mesh import AxisSizes, MeshSpec


def mesh_text(spec: MeshSpec, axes: AxisSizes) -> str:
    """Returns the mesh file of `spec` with other axes and their number of devices."""
    path = local_path("mesh", library.file_of(spec.path))
    document = tomllib.loads(path.read_text(encoding="utf-8"))
    document |= {"devices": math.prod(size for _, size in axes), "axes": dict(axes)}
    if document.get("devices_per_host", 0) > document["devices"]:
        document["devices_per_host"] = document["devices"]
    return "".join(f"{key} = {_toml(value)}\n" for key, value in document.items())


def _toml(value: object) -> str:
    """Returns a TOML value; JSON writes strings, numbers and booleans as TOML does."""
    if isinstance(value, Mapping):
        parts = ", ".join(f"{json.dumps(key)} = {_toml(item)}" for key, item in value.items())
        return f"{{ {parts} }}"
    return json.dumps(value)
