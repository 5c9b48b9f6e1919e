"""Sharding of every tensor: three tables from logical axes to mesh axes.

The only file that writes a PartitionSpec.

A table maps a logical axis to the mesh axes its dim is split over. `params` says how parameters
rest, `optimizer` how optimizer state rests (ZeRO-1/2 split it where parameters are whole), and
`activations` how tensors are split while in use. A parameter is gathered, before use, over the
mesh axes that its `params` entry has and its `activations` entry lacks.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jaxtrain.mesh.axes import (
    BATCH_AXES,
    EXPERT_AXES,
    LOGICAL_AXES,
    MESH_AXES,
    STACKING_AXES,
    STAGE,
    TABLE,
    TENSOR_PARALLEL,
    Dims,
    axes_that_split,
)
from jaxtrain.remedies import Clash, Near, multiples_near, options, smaller_axis
from jaxtrain.reprs import short_repr

Table = tuple[tuple[str, tuple[str, ...]], ...]
LogicalAxes = tuple[str | None, ...]
"""The logical axis of each dim; None of one without a name."""


class PaddedAxis(str):
    """A logical axis whose entries from `real` on are padding: zeros that stay zero.

    Equal to its name, so that tables and masks treat it as any other axis.
    """

    __slots__ = ("real",)
    real: int

    def __new__(cls, name: str, real: int) -> PaddedAxis:
        axis = super().__new__(cls, name)
        axis.real = real
        return axis

    def __getnewargs__(self) -> tuple[str, int]:  # type: ignore[override]
        return (str(self), self.real)


def table(entries: Mapping[str, str | tuple[str, ...]]) -> Table:
    """A table from a mapping; raises ValueError on an unknown mesh axis."""
    rows = []
    for logical, mesh_axes in entries.items():
        mesh_axes = (mesh_axes,) if isinstance(mesh_axes, str) else tuple(mesh_axes)
        for axis in mesh_axes:
            if axis not in MESH_AXES:
                raise ValueError(
                    f"rule {logical} -> {mesh_axes}: {axis!r} is not a mesh axis; "
                    f"the mesh axes are {', '.join(MESH_AXES)}"
                )
        rows.append((logical, mesh_axes))
    return tuple(rows)


_IN_USE = table({name: axes_that_split(name) for name in ("batch", "seq")})


@dataclass(frozen=True)
class ShardingRules:
    """Sharding of parameters, optimizer state and activations; combine presets with `|`.

    `accumulate_sharded`: gradients are reduce-scattered in every microbatch into sharded fp32
    accumulators (ZeRO-2, FSDP); False reduces once a step from unsharded ones (ZeRO-1): fewer
    bytes sent, more memory.

    params, optimizer, activations: tables of parameters, optimizer state and what is in use. A
    pair (logical axis, mesh axes) splits a dim of that logical axis over those mesh axes. Without
    an optimizer table (None) its state is split as the parameters are.
    """

    params: Table = ()
    optimizer: Table | None = None
    activations: Table = _IN_USE
    accumulate_sharded: bool = True

    def __repr__(self) -> str:
        """Returns the presets that make these rules, else the call."""
        for preset in (data_parallel, zero1, zero2, fsdp):
            for rules, second in ((preset(), ""), (preset() | tensor(), " | tensor()")):
                if rules == self:
                    return f"{preset.__name__}(){second}"
        return short_repr(self)

    def __or__(self, other: ShardingRules) -> ShardingRules:
        """The product of two presets; raises ValueError where both split one logical axis."""
        optimizer = None
        if self.optimizer is not None or other.optimizer is not None:
            optimizer = _merge(self.optimizer or self.params, other.optimizer or other.params)
        return ShardingRules(
            params=_merge(self.params, other.params),
            optimizer=optimizer,
            activations=_merge(self.activations, other.activations),
            accumulate_sharded=self.accumulate_sharded and other.accumulate_sharded,
        )

    def whole_until_update(self) -> ShardingRules:
        """The same rules with one reduction a step into unsharded accumulators."""
        return replace(self, accumulate_sharded=False)

    @property
    def optimizer_table(self) -> Table:
        return self.params if self.optimizer is None else self.optimizer

    def of(self, axes: LogicalAxes, sizes: Mapping[str, int]) -> ShardingRules:
        """These rules for a parameter of logical axes `axes` on mesh axes `sizes`: `expert` splits
        matrices that are stacked over experts by expert, in use too, and nothing else of them. In a
        pipeline `stage` splits what is stacked over layers by layer; all other parameters belong to
        every stage, and are split over it as they are over `tensor` (and within that)."""
        rules = self
        by_expert = any(sizes.get(axis, 1) > 1 for axis in EXPERT_AXES)
        if by_expert and "experts" in axes and not is_small(axes):
            rules = self._by_expert()
        return rules if sizes.get(STAGE, 1) == 1 else rules._by_stage(axes, sizes)

    def _by_expert(self) -> ShardingRules:
        def split(rules: Table) -> Table:
            table = {name: tuple(a for a in over if a not in EXPERT_AXES) for name, over in rules}
            return tuple((table | {"experts": EXPERT_AXES + table.get("experts", ())}).items())

        optimizer = None if self.optimizer is None else split(self.optimizer)
        return replace(
            self,
            params=split(self.params),
            optimizer=optimizer,
            activations=split(self.activations),
        )

    def _by_stage(self, axes: LogicalAxes, sizes: Mapping[str, int]) -> ShardingRules:
        in_use = dict(self.activations)
        names = ("layers",) if "layers" in axes else TENSOR_PARALLEL
        added = {name: (*in_use.get(name, ()), STAGE) for name in names}

        def present(split: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(a for a in split if sizes.get(a, 1) > 1)

        def staged(rules: Table) -> Table:
            lookup = dict(rules)
            for name, split in added.items():
                at_rest, shared = present(lookup.get(name, ())), present(in_use.get(name, ()))
                if not at_rest or at_rest[: len(shared)] == shared:  # else `place` tells of it
                    lookup[name] = (*split, *at_rest[len(shared) :])
            return tuple(lookup.items())

        optimizer = None if self.optimizer is None else staged(self.optimizer)
        activations = tuple({**in_use, **added}.items())
        return replace(
            self, params=staged(self.params), optimizer=optimizer, activations=activations
        )


def _merge(a: Table, b: Table) -> Table:
    merged = dict(a)
    for logical, mesh_axes in b:
        if merged.get(logical, mesh_axes) != mesh_axes:
            raise ValueError(
                f"two presets split logical axis {logical!r}: over {merged[logical]} and over "
                f"{mesh_axes}; write one table with the axes in the order you want"
            )
        merged[logical] = mesh_axes
    return tuple(merged.items())


def data_parallel() -> ShardingRules:
    """Everything whole on every device; gradients are summed."""
    return ShardingRules()


def zero1() -> ShardingRules:
    """Parameters whole, optimizer state split (Rajbhandari et al. 2020, P_os).

    Gradients are reduced once a step, each device updates its part, parameters are all-gathered.
    """
    return replace(zero2(), accumulate_sharded=False)


def zero2() -> ShardingRules:
    """Parameters whole, optimizer state and accumulated gradients split (P_os+g)."""
    split = tuple(row.name for row in reversed(TABLE) if row.optimizer)
    return ShardingRules(optimizer=table({"embed": split, "latent": split}))


def fsdp() -> ShardingRules:
    """Parameters, gradients and optimizer state split (ZeRO-3, P_os+g+p)."""
    split = tuple(row.name for row in TABLE if row.parameters)
    return ShardingRules(params=table({"embed": split, "latent": split}))


def tensor() -> ShardingRules:
    """Heads, hidden units and vocabulary split (Megatron; Shoeybi et al. 2019)."""
    split = table({name: axes_that_split(name) for name in TENSOR_PARALLEL})
    return ShardingRules(params=split, activations=_merge(_IN_USE, split))


def is_small(axes: LogicalAxes) -> bool:
    """True if a leaf has fewer than two dims, stacking ones not counted."""
    return sum(axis not in STACKING_AXES for axis in axes) < 2


def dims(
    axes: LogicalAxes, rules: Table, *, sizes: Mapping[str, int], what: str = "tensor"
) -> Dims:
    """The mesh axes of each dim, those of size 1 dropped.

    Leaves with one dim beside stacking ones stay whole over the batch axes: gathering a norm
    scale costs a collective and saves a few bytes. Raises ValueError on an unknown logical axis
    and on a mesh axis used twice, showing the logical axes and the result.
    """
    lookup = dict(rules)
    small = is_small(axes)
    out = []
    for axis in axes:
        if axis is not None and axis not in LOGICAL_AXES and axis not in lookup:
            near = difflib.get_close_matches(axis, [*LOGICAL_AXES, *lookup], n=1)
            hint = f"did you mean {near[0]!r}?" if near else "add a rule for it or use None"
            raise ValueError(f"{what} has logical axes {axes}: {axis!r} is unknown; {hint}")
        chosen = tuple(a for a in lookup.get(axis or "", ()) if sizes.get(a, 1) > 1)
        out.append(tuple(a for a in chosen if not (small and a in BATCH_AXES)))
    used = [a for d in out for a in d]
    for axis in used:
        if used.count(axis) > 1:
            raise ValueError(
                f"{what} has logical axes {axes}, which the rules split over {tuple(out)}: mesh "
                f"axis {axis!r} is used twice; split one of the dims over another mesh axis"
            )
    return tuple(out)


def activation_dims(axes: LogicalAxes, rules: Table, *, sizes: Mapping[str, int]) -> Dims:
    """The mesh axes of each dim of an activation. Unlike in `dims`, tensors with one dim are split
    too, and `batch*seq` is a merged dim."""
    out = []
    for axis in axes:
        parts = (axis or "").split("*")
        over = [a for part in parts for a in dict(rules).get(part, ())]
        out.append(tuple(a for a in over if sizes.get(a, 1) > 1))
    return tuple(out)


def partition_spec(split: Dims) -> PartitionSpec:
    """The PartitionSpec of a tensor whose dims are split so."""
    return PartitionSpec(*(d[0] if len(d) == 1 else (d or None) for d in split))


def named_sharding(mesh: jax.sharding.Mesh, split: Dims) -> NamedSharding:
    return NamedSharding(mesh, partition_spec(split))


def ways(dim: tuple[str, ...], sizes: Mapping[str, int]) -> int:
    """Number of parts into which a dim is split."""
    return math.prod(sizes[a] for a in dim)


class Leaf(NamedTuple):
    """One parameter and its sharding at rest, in the optimizer and in use. trained: not frozen."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    axes: LogicalAxes
    params: Dims
    optimizer: Dims
    in_use: Dims
    trained: bool = True

    def local_size(self, sizes: Mapping[str, int], split: Dims | None = None) -> int:
        """Elements held by one device at rest (or under another split)."""
        split = self.params if split is None else split
        return math.prod(n // ways(d, sizes) for n, d in zip(self.shape, split, strict=True))


def place(
    leaves: Mapping[str, jax.ShapeDtypeStruct],
    axes: Mapping[str, LogicalAxes],
    rules: ShardingRules,
    *,
    sizes: Mapping[str, int],
) -> tuple[dict[str, Leaf], list[str]]:
    """Returns every leaf with its sharding, and all violations."""
    placed: dict[str, Leaf] = {}
    violations = _unused_rules(rules, {name for names in axes.values() for name in names})
    for path, leaf in leaves.items():
        try:
            names = axes[path]
            own = rules.of(names, sizes)
            # A parameter's "seq" is a table of positions, looked up by number wherever tokens are.
            used = tuple((name, split) for name, split in own.activations if name != "seq")
            if len(names) != len(leaf.shape):
                raise ValueError(
                    f"{path} has shape {leaf.shape} and {len(names)} logical axes {names}; "
                    f"name one axis for each dim"
                )
            in_use = dims(names, used, sizes=sizes, what=path)
            at_rest = dims(names, own.params, sizes=sizes, what=path)
            at_rest = in_use if is_small(names) else at_rest
            optimizer = dims(names, own.optimizer_table, sizes=sizes, what=path)
        except ValueError as error:
            violations.append(str(error))
            continue
        place = Leaf(path, tuple(leaf.shape), str(leaf.dtype), names, at_rest, optimizer, in_use)
        violations += _table_violations(place)
        placed[path] = place
    return placed, violations + _unsplit(placed.values(), sizes)


def _unused_rules(rules: ShardingRules, used: set[str | None]) -> list[str]:
    """Violations of rules for a logical axis that no leaf has and no list names, such as a typo."""
    entries = {**dict(rules.params), **dict(rules.optimizer_table), **dict(rules.activations)}
    violations = []
    for name in entries:
        if name not in LOGICAL_AXES and name not in used:
            near = difflib.get_close_matches(name, [*LOGICAL_AXES, *filter(None, used)], n=1)
            hint = f"did you mean {near[0]!r}?" if near else "remove the entry"
            violations.append(
                f"the sharding rules split {name!r}, an axis that no leaf has; {hint}"
            )
    return violations


def _unsplit(leaves: Iterable[Leaf], sizes: Mapping[str, int]) -> list[str]:
    """Violations of sizes that do not split over their mesh axes, one for all leaves of a size."""
    causes: dict[tuple[str, int, tuple[str, ...]], list[str]] = {}
    steps: dict[tuple[str, int], int] = {}
    padded: dict[tuple[str, int], int] = {}
    for leaf in leaves:
        for table_name, split in (("", leaf.params), ("optimizer state of ", leaf.optimizer)):
            for axis, size, dim in zip(leaf.axes, leaf.shape, split, strict=True):
                parts, dim_size = ways(dim, sizes), (str(axis), size)
                steps[dim_size] = math.lcm(steps.get(dim_size, 1), parts)
                if isinstance(axis, PaddedAxis):
                    padded[dim_size] = axis.real
                if size % parts:
                    paths = causes.setdefault((*dim_size, dim), [])
                    paths += [table_name + leaf.path] * (leaf.path not in paths)
    clashes: list[str] = []
    for (axis, size, dim), paths in causes.items():
        step, last = steps[axis, size], dim[-1]
        many = f" and {len(paths) - 2} more" if len(paths) > 2 else ""
        over = " x ".join(f"{a}={sizes[a]}" for a in dim)
        name, real = axis, padded.get((axis, size))
        rule, value, near = f"{axis}={size}", size, multiples_near(size, step)
        if real is not None:
            rule, value = f"{axis}={real}, padded to {size},", step
            name, near = f"{axis}_multiple", [math.lcm(step, 64)]
        fewer = [f", or {last}={n}" for n in smaller_axis(size, [sizes[a] for a in dim])]
        clashes.append(
            Clash(
                f"{rule} does not split over {over} ({', '.join(paths[:2])}{many})",
                f"use {name}={options(near)}{''.join(fewer)}",
                sizes={axis: size if real is None else real},
                ways=[(Near(name, value, step),), *((Near(a, sizes[a], 0),) for a in dim[::-1])],
            )
        )
    return clashes


def _table_violations(leaf: Leaf) -> list[str]:
    """Violations of a leaf whose tables do not agree."""
    violations = []
    for axis, at_rest, use in zip(leaf.axes, leaf.params, leaf.in_use, strict=True):
        if at_rest[: len(use)] != use:
            violations.append(
                f"{leaf.path}: {axis} rests split over {at_rest} and is used split over {use}; a "
                f"tensor is gathered for use, so the second must be the beginning of the first"
            )
    for axis, at_rest, split in zip(leaf.axes, leaf.params, leaf.optimizer, strict=True):
        if split[: len(at_rest)] != at_rest:
            violations.append(
                f"{leaf.path}: {axis} rests split over {at_rest} and its optimizer state over "
                f"{split}; the first must be the beginning of the second"
            )
    return violations
