"""Remedies for an experiment's sizes. Each is tried on the mesh, with the model, before it is
suggested.

Nothing is compiled: the model's module is traced for its shapes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from functools import partial, wraps
from typing import Any, NamedTuple, TypeVar

from jaxtrain.experiment import Experiment
from jaxtrain.experiment.resolve import resolve
from jaxtrain.mesh.axes import MESH_AXES
from jaxtrain.mesh.mesh import MeshSpec
from jaxtrain.mesh.roles import roles_of
from jaxtrain.mesh.sharding import place, ways
from jaxtrain.models.build import abstract_model
from jaxtrain.remedies import Change, Clash, Near, resized, settled
from jaxtrain.validation.experiment import field_violations, mesh_violations

Fitted = TypeVar("Fitted")
FIELDS = {
    "embed": ("embed",),
    "mlp": ("hidden",),
    "heads": ("heads",),
    "kv_heads": ("kv_heads",),
    "latent": ("latent", "query_latent"),
    "experts": ("experts",),
    "vocab": ("vocab",),
}
"""Names of the fields that hold the size of a logical axis."""


class ExperimentOnMesh(NamedTuple):
    """An experiment, and the mesh axes of size > 1: those of a mesh, or others that are tried."""

    experiment: Experiment
    sizes: Mapping[str, int]


def with_tried_remedies(
    attempt: Callable[[Experiment, MeshSpec, Any], tuple[Fitted, list[str]]],
) -> Callable[..., tuple[Fitted, list[str]]]:
    """Decorates an attempt to fit an experiment to a mesh: the remedies of its violations are
    tried."""

    @wraps(attempt)
    def tried(
        experiment: Experiment, spec: MeshSpec, fields: Any = None
    ) -> tuple[Fitted, list[str]]:
        fitted, violations = attempt(experiment, spec, fields)
        return fitted, try_remedies(violations, experiment, spec)

    return tried


def try_remedies(violations: list[str], experiment: Experiment, spec: MeshSpec) -> list[str]:
    """Returns the violations, one for each cause, with remedies that were tried."""
    if not any(isinstance(violation, Clash) for violation in violations):
        return violations
    sizes = {axis: n for axis, n in spec.shape.items() if n > 1}
    return settled(
        _of_written(_of_fields(violations, experiment.model), experiment.model),
        ExperimentOnMesh(experiment, sizes),
        change=_changed,
        violations_of=partial(_violations, spec),
        parts=_parts(experiment, sizes),
        complete=partial(_all_devices, spec),
    )


def _violations(spec: MeshSpec, subject: ExperimentOnMesh) -> Iterator[str]:
    """Yields violations that sizes may cause, the cheap ones first."""
    experiment, sizes = subject
    resolved, unbuildable = resolve(experiment, spec, sizes)
    yield from unbuildable
    yield from field_violations(resolved)
    yield from mesh_violations(resolved)
    if unbuildable:
        return
    split = abstract_model(experiment.model)
    unplaced = place(split.params, split.axes, experiment.sharding, sizes=sizes)[1]
    # A pipeline pads its layers to slots, which always split.
    unpadded = [v for v in unplaced if not (isinstance(v, Clash) and "layers" in v.sizes)]
    yield from _of_fields(unpadded, experiment.model)


def without_heads(unplaced: list[str], violations: list[str]) -> list[str]:
    """Returns `unplaced` without the sizes of heads' matrices if `violations` has a number of heads
    that does not split."""
    if not any("heads=" in violation for violation in violations):
        return unplaced
    return [violation for violation in unplaced if "heads=" not in violation]


def _changed(subject: ExperimentOnMesh, clash: Clash, new: Change) -> ExperimentOnMesh | None:
    """Returns the subject with new sizes; None if the experiment does not have one of them."""
    experiment, sizes = subject
    of_mesh = {axis: n for axis, n in new.items() if axis in MESH_AXES}
    sizes = {axis: n for axis, n in ({**sizes, **of_mesh}).items() if n > 1}
    own: dict[str, Any] = {k: n for k, n in new.items() if k in ("batch", "microbatches")}
    if any(not isinstance(getattr(experiment, name), int) for name in own):
        return None
    experiment = replace(experiment, **own)
    if "seq" in new:
        data: Any = experiment.data
        if not is_dataclass(data) or "seq" not in {field.name for field in fields(data)}:
            return None
        experiment = replace(experiment, data=replace(data, seq=new["seq"]))
    of_model = {k: n for k, n in new.items() if k not in {*of_mesh, *own, "seq"}}
    if of_model:
        model = resized(experiment.model, clash, of_model)
        if model is None:
            return None
        experiment = replace(experiment, model=model)
    return ExperimentOnMesh(experiment, sizes)


def _all_devices(spec: MeshSpec, new: Change) -> Change:
    """Returns the change with another mesh axis that takes the remaining devices: a mesh file has a
    fixed number of devices."""
    axis, size = next(iter(new.items()))
    if not spec.path or axis not in MESH_AXES:
        return new
    other = "fsdp" if axis == "data" else "data"
    return new | {other: spec.size(other) * spec.size(axis) // size}


def _of_fields(violations: list[str], model: Any) -> list[str]:
    """Returns clashes of logical axes in terms of the fields that hold these sizes."""
    return [_of_field(v, model) if isinstance(v, Clash) else v for v in violations]


def _of_field(clash: Clash, model: Any) -> Clash:
    if len(clash.sizes) > 1:
        return clash
    ((axis, size),) = clash.sizes.items()
    multiple, padded = f"{axis}_multiple", getattr(model, f"{axis}_multiple", None)
    if padded is not None and clash.ways[0][0].name == multiple:
        rule = clash.rule.replace(", does", f" by {multiple}={padded}, does")
        step = clash.ways[0][0].step
        return clash.changed(rule=rule, ways=[(Near(multiple, padded, step),), *clash.ways[1:]])
    for field in FIELDS.get(axis, ()):
        own = clash.changed(
            rule=clash.rule.replace(f"{axis}=", f"{field}=", 1),
            remedy=clash.remedy.replace(f"{axis}=", f"{field}=", 1),
            sizes={field: size},
            ways=[(way[0]._replace(name=field),) if way[0].step else way for way in clash.ways],
        )
        if field != axis and resized(model, own, {field: 1}) is not None:
            return own
    return clash


def _of_written(violations: list[str], model: Any) -> list[str]:
    """Returns the violations without those of kv_heads if kv_heads defaults to heads."""
    rules = {v.rule: v for v in violations if isinstance(v, Clash)}

    def implied(violation: str) -> bool:
        if not isinstance(violation, Clash) or violation.sizes.keys() != {"kv_heads"}:
            return False
        heads = rules.get(violation.rule.replace("kv_heads=", "heads=", 1))
        return (
            heads is not None
            and resized(model, heads, {"heads": 1}) is not None
            and resized(model, violation, {"kv_heads": 1}) is None
        )

    return [violation for violation in violations if not implied(violation)]


def _parts(experiment: Experiment, sizes: Mapping[str, int]) -> dict[str, int]:
    """Returns, for each size, the number that must divide it wherever the sharding rules split
    it."""
    rules = experiment.sharding
    tables = [dict(table) for table in (rules.params, rules.optimizer_table, rules.activations)]

    def of(axis: str) -> int:
        rows = [table.get(axis, ()) for table in tables]
        return math.lcm(*(math.prod(sizes.get(a, 1) for a in row) for row in rows))

    parts = {field: of(axis) for axis, names in FIELDS.items() for field in names}
    parts["batch"] = max(experiment.microbatches, 1) * of("batch")
    roles = roles_of(rules.activations, sizes)
    parts["seq"] = 2 * ways((*roles.seq, *roles.outside_stack().stream), sizes)
    return parts
