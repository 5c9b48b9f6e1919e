"""The two vocabularies: names of mesh axes (physical) and of logical axes (of tensors).

The sets share no word, so a name alone says which of the two is meant. `TABLE` has a row for each
mesh axis, and what the rest of the package knows of an axis comes from its row: a new axis that
splits the batch is a new row. Code asks for the axes of a role, which is a logical axis that is
split in use: `axes_that_split("batch")`.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass

MeshAxes = tuple[str, ...]
"""Names of mesh axes, major first."""
Dims = tuple[MeshAxes, ...]
"""For each dim of a tensor the mesh axes it is split over, major first."""

MODES = ("explicit", "gspmd")
"""Who chooses the collectives of a step: the package or XLA."""


@dataclass(frozen=True)
class AxisRow:
    """What a mesh axis does.

    splits: the logical axes that it splits in use, its roles.
    kept: its place among the axes when a run goes on with fewer devices: the axis with the lowest
      number keeps its size longest.
    meaning: what it splits, for docs and messages.
    parameters: parameters rest split over it under `fsdp()`.
    optimizer: optimizer state rests split over it under `zero1()` and `zero2()`.
    preset: the preset of sharding rules that has its entries; None if all rules have them.
    modes: execution modes that run it.
    link: the scope of the links between its devices, where a mesh has such links; None: those of
      the mesh that reach far enough.
    """

    name: str
    splits: tuple[str, ...]
    kept: int
    meaning: str
    parameters: bool = False
    optimizer: bool = False
    preset: str | None = None
    modes: tuple[str, ...] = MODES
    link: str | None = None


TABLE = (
    AxisRow("replica", ("batch",), 5, "the batch, between copies on different sites", link="wan"),
    AxisRow("data", ("batch",), 6, "the batch", optimizer=True),
    AxisRow(
        "fsdp",
        ("batch",),
        4,
        "the batch, and parameters, gradients and optimizer state at rest",
        parameters=True,
        optimizer=True,
    ),
    AxisRow("stage", ("layers",), 2, "the layers, into a pipeline", modes=("explicit",)),
    AxisRow(
        "expert",
        ("batch", "experts"),
        3,
        "what fsdp splits, and the experts of each layer",
        parameters=True,
    ),
    AxisRow("context", ("seq",), 1, "the sequence"),
    AxisRow(
        "tensor",
        ("heads", "kv_heads", "mlp", "vocab"),
        0,
        "heads, hidden units and vocabulary",
        preset="tensor()",
    ),
)
"""In the order in which messages and docs list them."""

ROWS = {row.name: row for row in TABLE}
MESH_AXES = tuple(ROWS)


def axes_that_split(*logical: str) -> tuple[str, ...]:
    """Returns the mesh axes that split any of these logical axes."""
    return tuple(row.name for row in TABLE if not set(logical).isdisjoint(row.splits))


BATCH_AXES = axes_that_split("batch")
TOKEN_AXES = axes_that_split("batch", "seq")
"""Mesh axes along which devices have different tokens of the same microbatch."""

EXPERT_AXES = axes_that_split("experts")
(STAGE,) = axes_that_split("layers")
TENSOR_PARALLEL = ROWS["tensor"].splits
"""Logical axes that tensor parallelism splits; in a pipeline `stage` splits them too, outside the
stack."""


def order_violations(axes: Iterable[tuple[str, int]], links: Container[str]) -> list[str]:
    """Returns violations of mesh axes, given with their sizes from the slowest link to the fastest,
    that have a link of their own and are not first. links: the scopes that a mesh has links for."""
    sizes = {axis: size for axis, size in axes if size > 1}
    first = next(iter(sizes), "")
    return [
        f"{axis}={sizes[axis]} is joined by links.{ROWS[axis].link}, the slowest of this mesh, and "
        f"{first} stands before it; put {axis} first in [axes]"
        for axis in sizes
        if axis != first and axis in ROWS and (ROWS[axis].link or "") in links
    ]


LOGICAL_AXES = (
    "batch",
    "seq",
    "embed",
    "heads",
    "kv_heads",
    "head_dim",
    "latent",
    "mlp",
    "vocab",
    "layers",
    "chunks",
    "experts",
    "height",
    "width",
    "channels",
    "classes",
)

STACKING_AXES = ("layers", "chunks", "experts")
"""Logical axes that stack whole tensors: an optimizer treats each slice as a tensor of its own."""


def keeps_dtype(name: str, dims: int) -> bool:
    """True if a leaf with `dims` dims, stacking ones not counted, is used in its stored dtype.

    Leaves with one dim are small, and norms are computed in fp32. Routers and their adapters keep
    their dtype so that choices depend on rounding as little as possible (Fedus et al. 2022), and
    what functions of scores learn because scores are fp32."""
    return dims < 2 or name.split(".")[-1].startswith(("router", "score_values"))
