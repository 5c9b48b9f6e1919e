"""Mesh files and the meshes made of them.

A mesh file is TOML: `chip`, `devices`, optionally `devices_per_host` and `topology`, then the
tables `[axes]` (mesh axis = size, slowest link first, one may be -1), `[links]` (scope = link),
`[facts]` and `[compiler_options]`. A chip or a link is a name from `hardware.py` or a table with
its fields. Only `make_mesh` needs JAX: the rest must work before JAX starts, because a simulated
device count can be set only then.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxtrain.files.stores import local_path
from jaxtrain.mesh import hardware, library
from jaxtrain.mesh.axes import MESH_AXES, order_violations
from jaxtrain.mesh.hardware import CHIPS, LINKS, Chip, Facts, Link
from jaxtrain.violations import did_you_mean, raise_violations

if TYPE_CHECKING:
    from jax.sharding import Mesh

AxisSizes = tuple[tuple[str, int], ...]
"""(mesh axis, devices along it), slowest link first."""

SCOPES = ("host", "slice", "cluster", "wan")
"""Reach of a link: between devices of a host, of a slice (a TPU torus or a multi-host NVLink
domain), between hosts or slices of one site, between sites."""

DEVICE_COUNT_FLAG = "--xla_force_host_platform_device_count"


@dataclass(frozen=True, kw_only=True)
class MeshSpec:
    """A machine and its mesh axes: the content of a mesh file.

    `axes` keeps the file's order, slowest link first; its sizes multiply to `devices`. `links` has
    (scope, link), innermost first. `topology` is the torus of one TPU slice, in chips. `simulated`:
    the mesh is made of CPU devices, whatever the chip. Raises ValueError with every violation.

    name: of the file, without suffix. path: of the file, as the user wrote it. devices_per_host:
    consecutive devices that share a host. facts: price, power, failures, storage. compiler_options:
    (name, value) pairs that XLA is given with every step. chip: one device's facts.
    """

    name: str
    path: str
    chip: Chip
    axes: AxisSizes
    devices: int
    devices_per_host: int
    topology: str | None = None
    links: tuple[tuple[str, Link], ...] = ()
    facts: Facts = field(default_factory=Facts)
    compiler_options: tuple[tuple[str, bool | int | float | str], ...] = ()
    simulated: bool = False

    def __post_init__(self) -> None:
        problems = _axis_problems(self.axes, self.devices)
        problems += order_violations(self.axes, dict(self.links))
        problems += _layout_problems(self.chip, self.devices, self.devices_per_host, self.topology)
        raise_violations(problems, self.where)

    @property
    def where(self) -> str:
        """The beginning of errors: the mesh file, or the name of a mesh without one."""
        return self.path or self.name

    @property
    def platform(self) -> str:
        """JAX's name of the platform the mesh runs on."""
        return "cpu" if self.simulated else self.chip.platform

    @property
    def shape(self) -> dict[str, int]:
        """Sizes of all mesh axes: those of the file in its order, then the others with size 1."""
        return dict(self.axes) | {a: 1 for a in MESH_AXES if a not in dict(self.axes)}

    @property
    def usable_bytes(self) -> int:
        """Bytes of one device that a program and its arrays may use."""
        stated = self.facts.usable_gbytes or self.chip.usable_gbytes
        return round((stated or self.chip.hbm_gbytes) * 1e9)

    def size(self, axis: str) -> int:
        """Size of one mesh axis, 1 where the file does not name it."""
        if axis not in MESH_AXES:
            raise ValueError(f"{axis!r} is not a mesh axis{did_you_mean(axis, MESH_AXES)}")
        return self.shape[axis]

    def link(self, scope: str) -> Link:
        """The link of `scope`; ValueError where the file has none."""
        if scope not in dict(self.links):
            raise ValueError(
                f"{self.where} has no link for {scope!r}; add {scope} = "
                f'"..." under [links], one of {", ".join(LINKS)}'
            )
        return dict(self.links)[scope]

    def with_axes(self, axes: Mapping[str, int]) -> MeshSpec:
        """Returns the same machine with other mesh axes; one size may be -1, as in a file."""
        sizes, problems = _resolve(axes, self.devices)
        raise_violations(problems, self.where)
        return replace(self, axes=sizes)

    def simulate(self) -> MeshSpec:
        """Returns the same mesh on fake CPU devices (see `simulation.simulation_flags`), without
        options for the compiler of another platform."""
        options = self.compiler_options if self.chip.platform == "cpu" else ()
        return replace(self, simulated=True, compiler_options=options)


def format_axes(axes: AxisSizes) -> str:
    """Returns axes and their sizes as text, such as `data=2 x fsdp=4`."""
    return " x ".join(f"{axis}={size}" for axis, size in axes)


def mesh_from_axes(**axes: int) -> MeshSpec:
    """A simulated mesh of CPU devices: `mesh_from_axes(data=2, fsdp=4)`."""
    sizes = tuple(axes.items())
    devices = math.prod(axes.values())
    return MeshSpec(
        name="_".join(f"{axis}{size}" for axis, size in sizes) or "one_device",
        path="",
        chip=CHIPS["cpu"],
        axes=sizes,
        devices=devices,
        devices_per_host=devices,
        links=(("host", LINKS["memory"]),),
        simulated=True,
    )


# Reading


def load_mesh(mesh: str | Path | MeshSpec) -> MeshSpec:
    """The mesh of a TOML file, given by its path, or by name (`h100_8`) where it comes with
    jaxtrain; a MeshSpec is returned as it is. JAX is not needed.

    Raises one ValueError that lists every violation: a file that is missing or not TOML, unknown
    keys, chips, links and axes, wrong types, axes that do not multiply to the devices.
    """
    if isinstance(mesh, MeshSpec):
        return mesh
    path = local_path("mesh", library.file_of(mesh))
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"mesh file {path}: {error.strerror}{library.nearest(path)}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a TOML file: {error}") from error
    return _parse(document, Path(mesh))


_KEYS = (
    *("chip", "devices", "devices_per_host", "topology"),
    *("axes", "links", "facts", "compiler_options"),
)


def _parse(document: Mapping[str, Any], path: Path) -> MeshSpec:
    problems = [f"{k} is not known{did_you_mean(k, _KEYS)}" for k in document if k not in _KEYS]
    problems += [f"{key} is missing" for key in ("chip", "devices", "axes") if key not in document]
    devices = hardware.read_count(document, "devices", problems)
    per_host = hardware.read_count(document, "devices_per_host", problems) or devices
    chip = (
        hardware.lookup(Chip, CHIPS, document["chip"], "chip", problems)
        if "chip" in document
        else None
    )
    section = hardware.read_section(document, "axes", problems)
    axes, wrong_sizes = _resolve(section, devices)
    problems += wrong_sizes
    links = _links(hardware.read_section(document, "links", problems), problems)
    facts = hardware.read_table(
        Facts, hardware.read_section(document, "facts", problems), "facts", problems
    )
    options = tuple(hardware.read_section(document, "compiler_options", problems).items())
    problems += [
        f"compiler_options.{name} = {value!r} must be a string, a number, true or false"
        for name, value in options
        if not isinstance(value, bool | int | float | str)
    ]
    topology = document.get("topology")
    # Sizes that could not be read are not compared with the devices.
    readable = not wrong_sizes and isinstance(document.get("axes"), Mapping)
    checked = axes if readable else tuple((axis, 1) for axis in section)
    problems += _axis_problems(checked, devices if readable else None)
    if devices and per_host and chip:
        problems += _layout_problems(chip, devices, per_host, topology)
    raise_violations(problems, str(path))
    assert devices and per_host and chip and facts, "a part was not read, and nothing said so"
    return MeshSpec(
        name=path.stem,
        path=str(path),
        chip=chip,
        axes=axes,
        devices=devices,
        devices_per_host=per_host,
        topology=topology,
        links=links,
        facts=facts,
        compiler_options=options,
        simulated=chip.platform == "cpu",
    )


def _links(table: Mapping[str, Any], problems: list[str]) -> tuple[tuple[str, Link], ...]:
    for scope in table:
        if scope not in SCOPES:
            problems.append(f"links.{scope} is not known{did_you_mean(scope, SCOPES)}")
    links = [
        (scope, hardware.lookup(Link, LINKS, table[scope], f"links.{scope}", problems))
        for scope in SCOPES
        if scope in table
    ]
    return tuple((scope, link) for scope, link in links if link)


def _resolve(axes: Mapping[str, Any], devices: int | None) -> tuple[AxisSizes, list[str]]:
    """Returns the axes with -1 replaced by the remaining devices, and the violations of the
    sizes."""
    problems = [
        f"axes.{axis} = {size!r} must be a positive integer, or -1 for what is left"
        for axis, size in axes.items()
        if not isinstance(size, int) or isinstance(size, bool) or (size < 1 and size != -1)
    ]
    if problems:
        return (), problems
    free = [axis for axis, size in axes.items() if size == -1]
    if len(free) > 1:
        return (), [f"only one mesh axis may be -1, but {' and '.join(free)} are"]
    if free and devices:
        fixed = math.prod(size for size in axes.values() if size != -1)
        if devices % fixed:
            sizes = format_axes(tuple((a, s) for a, s in axes.items() if s != -1))
            return (), [
                f"{free[0]} = -1 has no size: {sizes} multiply to {fixed}, which does not divide "
                f"the {devices} devices"
            ]
        return tuple((a, devices // fixed if s == -1 else s) for a, s in axes.items()), []
    return tuple(axes.items()), []


def _axis_problems(axes: AxisSizes, devices: int | None) -> list[str]:
    problems = [
        f"{axis!r} is not a mesh axis{did_you_mean(axis, MESH_AXES)}"
        for axis, _ in axes
        if axis not in MESH_AXES
    ]
    named = Counter(axis for axis, _ in axes)
    problems += [f"mesh axis {axis!r} is given twice" for axis, times in named.items() if times > 1]
    problems += [f"{axis} = {size} must be positive" for axis, size in axes if size < 1]
    product = math.prod(size for _, size in axes)
    if devices is not None and product != devices:
        problems.append(
            f"axes {format_axes(axes) or '(none)'} multiply to {product}, but the mesh has "
            f"{devices} devices; change a size, make one of them -1, or set devices = {product}"
        )
    return problems


def _layout_problems(chip: Chip, devices: int, per_host: int, topology: object) -> list[str]:
    problems = []
    if chip.platform not in hardware.PLATFORMS:
        hint = did_you_mean(chip.platform, hardware.PLATFORMS)
        problems.append(f"chip.platform = {chip.platform!r}{hint}")
    if devices % per_host:
        problems.append(
            f"{devices} devices do not fill hosts of devices_per_host = {per_host}; "
            f"use a multiple of {per_host} devices"
        )
    if topology is None:
        return problems
    if chip.platform != "tpu":
        return [*problems, f"topology is for TPUs, and the chip is {chip.name}; remove it"]
    if not isinstance(topology, str) or not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){1,2}", topology):
        return [*problems, f'topology = {topology!r} must be written like "4x4" or "4x4x8"']
    slice_devices = math.prod(map(int, topology.split("x"))) * chip.devices_per_chip
    if devices % slice_devices:
        problems.append(
            f"topology {topology} is a slice of {slice_devices} devices, which does not divide the "
            f"{devices} devices of the mesh"
        )
    return problems


# Devices


def make_mesh(spec: MeshSpec, devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh of `spec` with all seven mesh axes, each of type Auto, on this machine's devices.

    Raises ValueError when the machine is another one (see `device_order`).
    """
    import jax
    from jax.sharding import AxisType, Mesh

    if devices is None:
        devices = jax.devices("cpu") if spec.simulated else jax.devices()
    axes = tuple(spec.shape)
    return Mesh(device_order(spec, devices), axes, axis_types=(AxisType.Auto,) * len(axes))


def device_order(spec: MeshSpec, devices: Sequence[Any]) -> np.ndarray:
    """Devices as an array of shape `spec.shape`, neighbours on the last mesh axes closest.

    CPU: the order given. A TPU slice: mesh axes laid on the torus. Several slices, or several
    hosts of GPUs: the network between them outermost, cut out of the leading mesh axes. Only
    attributes of the devices are read (platform, device_kind, id, slice_index, process_index,
    coords, core_on_chip). Raises ValueError for too few or other devices than `spec` needs.
    """
    devices, sizes = _usable(spec, devices), tuple(spec.shape.values())
    if (platform := devices[0].platform) == "cpu":
        return np.array(devices, dtype=object).reshape(sizes)
    from jax.experimental import mesh_utils

    by_slice = platform == "tpu" or hasattr(devices[0], "slice_index")
    key = "slice_index" if by_slice else "process_index"
    granules = Counter(getattr(device, key, 0) for device in devices)
    if len(granules) == 1:
        return mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
    if len(set(granules.values())) > 1:
        raise ValueError(
            f"{spec.where}: every {key} must hold as many devices as every other, but "
            f"they hold {', '.join(f'{key} {k}: {n}' for k, n in sorted(granules.items()))}"
        )
    outer, inner = _cut(spec, len(granules), key)
    return mesh_utils.create_hybrid_device_mesh(
        inner, outer, devices, process_is_granule=not by_slice, allow_split_physical_axes=True
    )


def _cut(spec: MeshSpec, granules: int, key: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes between granules and inside one: the leading mesh axes multiply to `granules`."""
    left, outer = granules, []
    for axis, size in spec.shape.items():
        part = math.gcd(left, size)
        if part < min(left, size):
            raise ValueError(
                f"{spec.where}: the leading mesh axes must multiply to the {granules} "
                f"groups of devices (by {key}) between which the network is slow, but at {axis}="
                f"{size} there are {left} left to cut, and neither divides the other; put mesh "
                f"axes that multiply to {granules} first in [axes]"
            )
        outer.append(part)
        left //= part
    inner = [size // part for size, part in zip(spec.shape.values(), outer, strict=True)]
    return tuple(outer), tuple(inner)


def _usable(spec: MeshSpec, devices: Sequence[Any]) -> Sequence[Any]:
    """The devices to use, or a ValueError that says what this machine lacks."""
    mesh, chip, present = spec.where, spec.chip, len(devices)
    platform = devices[0].platform if devices else "usable"
    wanted = "cpu" if spec.simulated else chip.platform
    has = f"{present} {platform} device{'s' * (present != 1)}"
    if wanted == "cpu" and (platform != "cpu" or present < spec.devices):
        raise ValueError(
            f"{mesh} needs {spec.devices} cpu devices; this process has {has}. Their number is "
            f'fixed when JAX starts: before that, jax.config.update("jax_num_cpu_devices", '
            f"{spec.devices}), or set XLA_FLAGS={DEVICE_COUNT_FLAG}={spec.devices}"
        )
    if platform != wanted or present < spec.devices:
        other = "cpu_1" if platform == "cpu" else "a mesh file of the devices here"
        raise ValueError(
            f"{mesh} needs {spec.devices} devices of {chip.name} "
            f"({' or '.join(chip.device_kinds) or chip.platform}); this machine has {has}: "
            f"run with --simulate, or pass --mesh {other}"
        )
    kind = devices[0].device_kind
    if not spec.simulated and chip.device_kinds and kind not in chip.device_kinds:
        raise ValueError(
            f"{mesh} is for {chip.name} ({' or '.join(chip.device_kinds)}), but the devices here "
            f"are {kind!r}; set chip to theirs, or give their numbers in a table [chip]"
        )
    alone = len({device.process_index for device in devices}) == 1
    if present > spec.devices and (platform == "tpu" or not alone):
        raise ValueError(
            f"{mesh} has {spec.devices} devices, but {has} take part; processes and slices "
            f"cannot be left out: set devices = {present} and [axes] to match"
        )
    return devices[: spec.devices]
