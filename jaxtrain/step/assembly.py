"""An experiment on a mesh before a device is touched: every shape, every split, every mistake."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from dataclasses import fields as dataclass_fields
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxtrain.compression.residuals import CompressedLeaf, compressed_parts
from jaxtrain.context.choice import Method
from jaxtrain.data.loader import RowSource
from jaxtrain.experiment import Experiment
from jaxtrain.experiment.platform_kernels import Sequences, kernel_refusals, types_checked
from jaxtrain.experiment.resolve import Resolved, resolve
from jaxtrain.experiment.tuning import trained_leaves, with_trained
from jaxtrain.mesh.axes import STAGE, Dims
from jaxtrain.mesh.mesh import MeshSpec
from jaxtrain.mesh.sharding import (
    Leaf,
    LogicalAxes,
    activation_dims,
    dims,
    named_sharding,
    partition_spec,
    place,
    ways,
)
from jaxtrain.models.buffers import without_buffers
from jaxtrain.models.build import abstract_model
from jaxtrain.nn.module import ModuleSplit
from jaxtrain.nn.stack import LayerLoop
from jaxtrain.optim.distributed import OnMesh
from jaxtrain.optim.optimizer import SHARDED
from jaxtrain.step.batches import DOCUMENTS, PlacedRows, token_fields
from jaxtrain.step.initial import initial_state
from jaxtrain.step.on_stages import OnStages, on_stages, split_in_slots
from jaxtrain.step.state import TrainState, state_splits
from jaxtrain.validation.experiment import format_violations, unused_reducer, violations_of
from jaxtrain.validation.model import untrue
from jaxtrain.validation.remedies import with_tried_remedies, without_heads


@dataclass(frozen=True)
class Assembly(Resolved):
    """An experiment that fits a mesh."""

    loop: LayerLoop
    split: ModuleSplit
    places: Mapping[str, Leaf]
    parts: Mapping[str, CompressedLeaf]
    """The leaves whose gradients are summed compressed."""
    transform: optax.GradientTransformation
    abstract: TrainState
    splits: TrainState
    pipeline: OnStages | None
    fields: Mapping[str, tuple[tuple[int, ...], Any]]
    """Fields of a batch: name -> (shape of one row, dtype)."""

    @property
    def explicit(self) -> bool:
        """True if the step is a shard_map of ours. One device needs none."""
        return self.mode == "explicit" and bool(self.sizes)

    @property
    def tokens(self) -> str | None:
        """Name of the batch's field with an element for each token; None if unknown."""
        if self.description is not None:
            return self.description.tokens
        return "tokens" if "tokens" in self.fields else None

    @property
    def frozen(self) -> frozenset[str]:
        """Leaves that are not trained."""
        return frozenset(name for name, place in self.places.items() if not place.trained)

    @property
    def first_derivative(self) -> float:
        """Loss scale over the first step's number of tokens, which is rounded to a power of two."""
        scale = self.experiment.precision.loss_scale
        row, _ = self.fields[self.tokens or "rows"]
        tokens = self.experiment.batch_sizes[0] * math.prod(row)
        return (1.0 if scale is None else scale.initial) / _power_of_two(tokens)

    @property
    def on_stages(self) -> OnStages:
        """The pipeline; the mesh must have stages."""
        assert self.pipeline is not None, "asked for on a mesh without stages"
        return self.pipeline

    @property
    def context(self) -> Method | None:
        """Attention method for cut rows; None if rows are not cut, or if XLA does it."""
        if not self.roles.seq or not self.explicit:
            return None
        rows = self.abstract_batch()[self.described.tokens]
        return self.context_method(rows.shape[2])

    @property
    def row_orders(self) -> dict[str, np.ndarray]:
        """For fields that are cut along their sequence: the permutation of a row's positions."""
        if self.context is None:
            return {}
        order = self.context.order(ways(self.roles.seq, self.sizes))
        leaves = self.abstract_batch()
        cut = [k for k, split in self.batch_splits.items() if split[2:3] == (self.roles.seq,)]
        return {name: order.permutation(leaves[name].shape[2]) for name in cut}

    @property
    def largest_batch(self) -> int:
        return self.experiment.batch_sizes[-1]

    @property
    def check_vma(self) -> bool:
        blocks = [] if self.description is None else self.description.blocks.values()
        return types_checked(self.experiment.execution, blocks, self.sequences)

    @property
    def sequences(self) -> Sequences | None:
        """Sizes and dtype of what attention gets on a device; None if a batch has no tokens."""
        shape, _ = self.fields.get(self.tokens or "", ((), None))
        if not shape:
            return None
        dtype = jnp.dtype(self.experiment.precision.compute)
        seq = shape[0] // ways(self.roles.seq, self.sizes)
        return Sequences(seq, DOCUMENTS in self.fields, dtype)

    @property
    def batch_splits(self) -> dict[str, Dims]:
        """Mesh axes that split each field of a batch [microbatches, rows, seq, ...]. Rows are split
        over batch axes. The other dims are split as the model's description says; in fields that it
        does not name, seq over context, except that document numbers stay whole."""
        rules = self.experiment.sharding.activations
        model_fields = {} if self.description is None else self.description.fields

        def names(field: str, dims: int) -> tuple[str | None, ...]:
            first = None if field == DOCUMENTS else "seq"
            return (None, "batch", *model_fields.get(field, (first, *[None] * dims)[:dims]))

        return {
            name: activation_dims(names(name, len(shape)), rules, sizes=self.sizes)
            for name, (shape, _) in self.fields.items()
        }

    @property
    def batch_specs(self) -> dict[str, Any]:
        return {name: partition_spec(split) for name, split in self.batch_splits.items()}

    def batch_shardings(self, mesh: jax.sharding.Mesh) -> dict[str, Any]:
        return {name: named_sharding(mesh, split) for name, split in self.batch_splits.items()}

    def placed(self, dataset: RowSource, mesh: jax.sharding.Mesh, microbatches: int) -> PlacedRows:
        """Returns the rows of a dataset as arrays for steps and evaluations."""
        return PlacedRows(dataset, self.batch_shardings(mesh), microbatches, self.row_orders)

    def abstract_batch(self, batch: int | None = None) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes of a batch of `batch` rows (None: the largest)."""
        micro = self.experiment.microbatches
        lead = (micro, (batch or self.largest_batch) // micro)
        return {
            name: jax.ShapeDtypeStruct((*lead, *shape), dtype)
            for name, (shape, dtype) in self.fields.items()
        }

    def tokens_power_of_two(self, batch: dict[str, Any]) -> float:
        """Power of two near a batch's number of tokens: dividing by it changes no bit."""
        return _power_of_two(batch[self.tokens or "rows"].size)

    def constrain(self, leaves: Any, mesh: jax.sharding.Mesh, to: str) -> Any:
        """Constrains leaves, named as parameters, to table `to`'s shardings; not on one device."""
        if not self.sizes:
            return leaves
        splits = {k: getattr(self.places[k], to) for k in leaves}
        return {
            k: jax.lax.with_sharding_constraint(v, named_sharding(mesh, splits[k]))
            for k, v in leaves.items()
        }

    def transform_on(self, mesh: jax.sharding.Mesh) -> optax.GradientTransformation:
        """Returns the optimizer, in explicit mode with its own collectives if it has any."""
        e, leaves = self.experiment, without_buffers(self.split.axes, self.buffers)
        axes = _trained_axes(leaves, self.places)
        if not (isinstance(e.optimizer, SHARDED) and self.explicit):
            return self.transform

        def split_of(names: LogicalAxes) -> Dims:
            table = e.sharding.of(names, self.sizes).optimizer_table
            return dims(names, table, sizes=self.sizes)

        shards = OnMesh(mesh, split_of, self.sizes)
        return e.optimizer.build(axes, steps=e.steps, batch=self.largest_batch, shards=shards)

    def next_scale(self, state: Any, finite: jax.Array) -> Any:
        """State of the loss scale after a step; () without a loss scale."""
        scale = self.experiment.precision.loss_scale
        return () if scale is None else scale.update(state, finite)

    def with_matmul_precision(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns `function`, traced at the experiment's matmul precision on any platform."""

        def run(*args: Any) -> Any:
            with jax.default_matmul_precision(self.experiment.precision.matmul):
                return function(*args)

        return run


def assemble(experiment: Experiment, spec: MeshSpec, fields: Any = None) -> Assembly:
    """Returns the assembly. Raises ValueError with every violation of experiment and mesh together.

    `fields`: those of a batch of the opened data; None takes `TextData`'s.
    """
    assembly, violations = try_assemble(experiment, spec, fields)
    if assembly is None or violations:
        raise ValueError(format_violations(violations, spec))
    return assembly


@with_tried_remedies
def try_assemble(
    experiment: Experiment, spec: MeshSpec, fields: Any = None
) -> tuple[Assembly | None, list[str]]:
    """Returns the assembly, or None if violations prevent it, and all violations."""
    resolved, unbuildable = resolve(experiment, spec)
    violations = violations_of(resolved, unbuildable)
    if unbuildable:
        return None, violations
    try:
        laid_out = _lay_out(resolved, violations)
        assembly = _build(resolved, fields, **laid_out)
        return assembly, violations + _kernel_violations(assembly)
    except Exception:  # caused by one of the violations, which say more
        if not violations:
            raise
        return None, violations


def _kernel_violations(assembly: Assembly) -> list[str]:
    """Returns violations of an attention kernel that the experiment names. Parts of rows that it
    cannot compute run in `Blockwise`."""
    if assembly.description is None or assembly.sequences is None or assembly.roles.seq:
        return []
    kernel, blocks = assembly.experiment.execution.attention, assembly.described.blocks.values()
    return kernel_refusals(kernel, blocks, assembly.sequences)


def _lay_out(resolved: Resolved, violations: list[str]) -> dict[str, Any]:
    """Returns the fields of an assembly that say where parameters are. Adds to `violations`."""
    e, sizes, buffers = resolved.experiment, resolved.sizes, resolved.buffers
    options: Any = dict(kernel=e.execution.attention, scales=bool(buffers.scales), tallies=True)
    options |= dict(adapters=resolved.adapters, objective=e.objective)
    split = abstract_model(e.model, **options)
    violations += untrue(resolved.description, split, buffers.names)
    pipeline, unpiped = on_stages(resolved)
    violations += unpiped
    layout = None if pipeline is None else pipeline.layout
    if layout is not None:
        split = split_in_slots(split, layout)
    places, unplaced = place(split.params, split.axes, e.sharding, sizes=sizes)
    trained, untrained = trained_leaves(
        e.fine_tuning, resolved.description, buffers, split.params, stages=sizes.get(STAGE, 1)
    )
    places = with_trained(places, trained)
    violations += untrained
    violations += without_heads(unplaced, violations)
    execution, summed = e.execution, without_buffers(places, buffers)
    parts = compressed_parts(execution.reducer, execution.small_leaf, summed, sizes, layout)
    violations += unused_reducer(execution.reducer, parts, execution.small_leaf)
    return dict(split=split, places=places, parts=parts, pipeline=pipeline)


def _build(
    resolved: Resolved,
    fields: Any,
    *,
    split: ModuleSplit,
    places: Mapping[str, Leaf],
    parts: Mapping[str, CompressedLeaf],
    pipeline: OnStages | None,
) -> Assembly:
    """Returns the assembly with these values, computing the others."""
    e = resolved.experiment
    axes = _trained_axes(without_buffers(split.axes, resolved.buffers), places)
    transform = e.optimizer.build(axes, steps=e.steps, batch=e.batch_sizes[-1])
    layout = None if pipeline is None else pipeline.layout
    abstract = jax.eval_shape(
        lambda: initial_state(resolved, transform, parts, layout, axes.keys(), derivative=1.0)
    )
    return Assembly(
        **{field.name: getattr(resolved, field.name) for field in dataclass_fields(Resolved)},
        loop=e.execution.loop_on(resolved.spec.platform, _fetches(resolved.sizes, places)),
        split=split,
        places=places,
        parts=parts,
        transform=transform,
        abstract=abstract,
        splits=state_splits(abstract, places, parts),
        pipeline=pipeline,
        fields=token_fields(e.data) if fields is None else fields,
    )


def _trained_axes(
    axes: Mapping[str, LogicalAxes], places: Mapping[str, Leaf]
) -> dict[str, LogicalAxes]:
    return {k: names for k, names in axes.items() if places[k].trained}


def _power_of_two(tokens: int) -> float:
    return 2.0 ** round(math.log2(tokens))


def _fetches(sizes: Mapping[str, int], places: Mapping[str, Leaf]) -> bool:
    """True if any weight is gathered before its use, or if layers are split into stages."""
    return STAGE in sizes or any(leaf.params != leaf.in_use for leaf in places.values())


def active_mesh(mesh: jax.sharding.Mesh, sizes: Mapping[str, int]) -> jax.sharding.Mesh:
    """The mesh without its axes of size 1: an operation over those is the identity. On one device
    the program is plain code."""
    names = tuple(sizes) or ("data",)
    shape = tuple(sizes.values()) or (1,)
    devices = np.asarray(mesh.devices).reshape(shape)
    return jax.sharding.Mesh(devices, names, axis_types=(jax.sharding.AxisType.Auto,) * len(names))
