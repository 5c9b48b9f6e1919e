"""Inputs of a part of `bench gpu`: the device, sizes, and rows of earlier parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from jaxtrain.mesh.hardware import Chip, chip_of
from jaxtrain.mesh.mesh import MeshSpec, load_mesh, mesh_from_axes

Row = dict[str, Any]
"""What a part says: `row` is its name in the table, the other keys have their units in theirs."""


class Skipped(Exception):
    """A part cannot be measured here; the text is the reason."""


@dataclass(frozen=True)
class AttentionShape:
    """Sizes of one layer: q [rows, seq, heads, head_dim], k and v with kv_heads."""

    rows: int
    seq: int
    heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class ExpertShape:
    """Sizes of one mixture: every token goes through `chosen` of the experts."""

    tokens: int
    embed: int
    hidden: int
    experts: int
    chosen: int = 2


@dataclass(frozen=True)
class Sizes:
    """Sizes of all measurements.

    matmul: rows of a square product. copied: bytes read, and as many written. launches: of a chain
    of small kernels. mean: tokens of a document. round_s: seconds of one of three rounds. checked:
    the layer that is compared with the dense reference, also with this window; layers: timed ones,
    by name. shrunk: True for a small model. most: the largest batch of the search. usable: bytes
    that its program may use, None for the device's own number. experts, checked_experts: the same
    of a mixture. saved: bytes of a state. steps: of a model, in each of three rounds.
    """

    matmul: int
    copied: int
    launches: int
    mean: int
    round_s: float
    checked: AttentionShape
    window: int
    layers: Mapping[str, AttentionShape]
    shrunk: bool
    most: int
    usable: int | None
    experts: ExpertShape
    checked_experts: ExpertShape
    saved: int
    steps: int
    longest_round_s: float


REAL = Sizes(
    matmul=8192,
    copied=4 * 2**30,
    launches=2000,
    mean=1000,
    round_s=0.3,
    checked=AttentionShape(2, 2048, 8, 2, 128),
    window=300,
    layers={
        "8B": AttentionShape(2, 8192, 16, 4, 128),
        "1B": AttentionShape(4, 4096, 32, 8, 64),
    },
    shrunk=False,
    most=128,
    usable=None,
    experts=ExpertShape(16384, 4096, 3584, 8),
    checked_experts=ExpertShape(1024, 256, 384, 8),
    saved=15 * 10**9,
    steps=5,
    longest_round_s=20.0,
)
DRY = Sizes(
    matmul=64,
    copied=2**16,
    launches=10,
    mean=20,
    round_s=0.0,
    checked=AttentionShape(1, 128, 2, 1, 64),
    window=10,
    layers={"small": AttentionShape(1, 128, 2, 1, 64)},
    shrunk=True,
    most=8,
    usable=2_600_000,
    experts=ExpertShape(64, 16, 24, 4),
    checked_experts=ExpertShape(64, 16, 24, 4),
    saved=2**16,
    steps=1,
    longest_round_s=1.0,
)


@dataclass(frozen=True)
class Setting:
    """dry: every part at sizes that mean nothing, on a CPU, to test that it runs. device: its name;
    no part asks JAX for it, since torch's parts need the memory that JAX would allocate. mesh: a
    mesh file of one device; None looks the device up in the table of chips. earlier: rows of the
    parts that are done. out: a directory for files. tell: called with each row when it is known."""

    dry: bool
    device: str
    mesh: str | None
    earlier: Mapping[str, list[Row]]
    out: Path
    tell: Callable[[Row], None]

    @property
    def sizes(self) -> Sizes:
        return DRY if self.dry else REAL

    @cached_property
    def spec(self) -> MeshSpec:
        """The measured device. Raises ValueError for an unknown one."""
        if self.dry:
            return mesh_from_axes(fsdp=1)
        if self.mesh is None:
            chip, axes = chip_of(self.device), (("fsdp", 1),)
            name = f"{chip.name}_1"
            return MeshSpec(name=name, path="", chip=chip, axes=axes, devices=1, devices_per_host=1)
        spec = load_mesh(self.mesh)
        if spec.devices != 1:
            raise ValueError(
                f"{spec.where} has {spec.devices} devices, and bench gpu measures one; give a mesh "
                "file of one device, such as h100_1"
            )
        return spec

    @property
    def chip(self) -> Chip:
        return self.spec.chip

    @property
    def platform(self) -> str:
        return "cpu" if self.dry else self.chip.platform

    def share(self, flops_per_s: float, dtype: str = "bfloat16") -> float:
        """Share of the chip's dense peak."""
        return flops_per_s / self.chip.peak_flops(dtype)

    def rows(self, part: str) -> list[Row]:
        """Returns the rows of a part that ran earlier. Raises Skipped if that part has none."""
        if not self.earlier.get(part):
            raise Skipped(f"needs what {part} finds, which found nothing")
        return self.earlier[part]
