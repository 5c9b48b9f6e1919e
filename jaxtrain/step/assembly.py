"""An experiment on a mesh before a device is touched: every shape, every split, every mistake."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxtrain.collectives.choice import Collectives
from jaxtrain.collectives.ring import Ring
from jaxtrain.compression.residuals import CompressedLeaf, compressed_parts
from jaxtrain.experiment import Execution, Experiment
from jaxtrain.mesh.mesh import MeshSpec
from jaxtrain.mesh.sharding import (
    STAGE,
    Dims,
    Leaf,
    LogicalAxes,
    activation_dims,
    dims,
    named_sharding,
    partition_spec,
    place,
    ways,
)
from jaxtrain.models.build import abstract_model
from jaxtrain.models.description import ModelDescription
from jaxtrain.models.layered import description_of
from jaxtrain.nn.head_chunk import LEAST_CHUNK, chunk_tokens_of
from jaxtrain.nn.module import ModuleSplit
from jaxtrain.nn.quantized.delayed import without_scales
from jaxtrain.nn.stack import LayerLoop
from jaxtrain.optim.distributed import OnMesh
from jaxtrain.optim.optimizer import SHARDED
from jaxtrain.pipeline.executor import Executor
from jaxtrain.pipeline.layout import StageLayout
from jaxtrain.pipeline.schedule import Schedule
from jaxtrain.step.batches import token_fields
from jaxtrain.step.initial import initial_state
from jaxtrain.step.platform_kernels import types_checked, with_kernels
from jaxtrain.step.state import TrainState, state_splits
from jaxtrain.step.tuning import adapters_of, delays_scales, trained_leaves, with_trained
from jaxtrain.validation.experiment import (
    batch_sizes,
    chosen_mode,
    field_violations,
    format_violations,
    late_gradients,
    mesh_violations,
    unused_reducer,
)
from jaxtrain.validation.model import describes, model_violations, untrue

KEEP_BARRIERS = "cse_barrier_expander"
"""XLA:CPU's pass that drops optimization barriers before equal instructions are merged for the last
time: with it nothing is rematerialised there, and gathers leave their places. Other platforms keep
their barriers that long by themselves."""


MOST_TILES = 32
"""Into how many tiles the product of a weight's gradient is cut by default: those of 4,096 rows are
then 128 or more, below which a TPU's matrix unit is not filled, and all of them are written out in
the program."""


class OnStages(NamedTuple):
    """A pipeline: who works when, which layer lies where, and what follows the tables (benchmarks
    have another executor)."""

    schedule: Schedule
    layout: StageLayout
    executor: type[Executor] = Executor


@dataclass(frozen=True)
class Assembly:
    """An experiment that fits a mesh. `sizes`: mesh axes of size > 1, in mesh order."""

    experiment: Experiment
    spec: MeshSpec
    sizes: Mapping[str, int]
    mode: str
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
    """What a batch holds: name -> (shape of one row, dtype)."""

    @property
    def explicit(self) -> bool:
        """Whether the step is a shard_map of ours: on one device there is nothing to map over."""
        return self.mode == "explicit" and bool(self.sizes)

    @cached_property
    def description(self) -> ModelDescription | None:
        """What the model says of itself; None of a user's own that does not."""
        return description_of(self.experiment.model)

    @property
    def chunk_tokens(self) -> int:
        """Tokens whose logits exist at one time: as the model says, else as suits the chip."""
        told = self.description
        if told is not None and told.head.chunk_tokens is not None:
            return told.head.chunk_tokens
        if told is None or self.spec.simulated:
            return LEAST_CHUNK
        return chunk_tokens_of(self.spec.chip, told.head.padded // ways(self.tensor, self.sizes))

    @property
    def described(self) -> ModelDescription:
        """The description of a model that has one."""
        assert self.description is not None, "asked for of a model that does not describe itself"
        return self.description

    @property
    def tokens(self) -> str | None:
        """The field of a batch that has an element for each token; None where none is known."""
        if self.description is not None:
            return self.description.tokens
        return "tokens" if "tokens" in self.fields else None

    @property
    def frozen(self) -> frozenset[str]:
        """Leaves that are not trained."""
        return frozenset(name for name, place in self.places.items() if not place.trained)

    @property
    def on_stages(self) -> OnStages:
        """The pipeline of a mesh that has one."""
        assert self.pipeline is not None, "asked for on a mesh without stages"
        return self.pipeline

    @property
    def tensor(self) -> tuple[str, ...]:
        """Mesh axes over which the model's heads, hidden units and vocabulary are split."""
        rules = self.experiment.sharding.activations
        return activation_dims(("heads",), rules, sizes=self.sizes)[0]

    @property
    def collectives(self) -> Collectives:
        return self.experiment.execution.collectives or default_collectives(self.spec)

    @property
    def compiler_options(self) -> dict[str, Any]:
        """The mesh's own. On CPU also KEEP_BARRIERS."""
        options: dict[str, Any] = dict(self.spec.compiler_options)
        if platform_of(self.spec) == "cpu":
            off = (options.get("xla_disable_hlo_passes"), KEEP_BARRIERS)
            options["xla_disable_hlo_passes"] = ",".join(filter(None, off))
        return options

    @property
    def largest_batch(self) -> int:
        return batch_sizes(self.experiment.batch)[-1]

    @property
    def peak_flops(self) -> float:
        """Dense peak of one device in the compute dtype, FLOP/s."""
        return self.spec.chip.peak_flops(jnp.dtype(self.experiment.precision.compute).name)

    @property
    def product_flops(self) -> float:
        """Dense peak of one device in the products of layers, FLOP/s: of 8 bits where they are and
        the chip has a rate for them."""
        products = self.experiment.precision.products
        known = None if products is None else getattr(self.spec.chip, f"{products.rate}_flops")
        return self.peak_flops if known is None else known

    @property
    def check_vma(self) -> bool:
        return types_checked(self.experiment.execution, self.fields)

    @property
    def batch_splits(self) -> dict[str, Dims]:
        """Batches are [microbatches, rows, seq, ...]: rows over batch axes, seq over context; or as
        the model describes its fields."""
        rules = self.experiment.sharding.activations
        known = {} if self.description is None else self.description.fields

        def names(field: str, dims: int) -> tuple[str | None, ...]:
            return (None, "batch", *known.get(field, ("seq", *[None] * dims)[:dims]))

        return {
            name: activation_dims(names(name, len(shape)), rules, sizes=self.sizes)
            for name, (shape, _) in self.fields.items()
        }

    @property
    def batch_specs(self) -> dict[str, Any]:
        return {name: partition_spec(split) for name, split in self.batch_splits.items()}

    def batch_shardings(self, mesh: jax.sharding.Mesh) -> dict[str, Any]:
        return {name: named_sharding(mesh, split) for name, split in self.batch_splits.items()}

    def abstract_batch(self, batch: int | None = None) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes of a batch of `batch` rows (None: the largest)."""
        micro = self.experiment.microbatches
        lead = (micro, (batch or self.largest_batch) // micro)
        return {
            name: jax.ShapeDtypeStruct((*lead, *shape), dtype)
            for name, (shape, dtype) in self.fields.items()
        }

    def tokens_power_of_two(self, batch: dict[str, Any]) -> float:
        """About the tokens of a batch: dividing by a power of two changes no bit."""
        return 2.0 ** round(math.log2(batch[self.tokens or "rows"].size))

    def constrain(self, leaves: Any, mesh: jax.sharding.Mesh, to: str) -> Any:
        """State that leaves named as parameters rest as table `to` says; nothing on one device."""
        if not self.sizes:
            return leaves
        splits = {k: getattr(self.places[k], to) for k in leaves}
        return {
            k: jax.lax.with_sharding_constraint(v, named_sharding(mesh, splits[k]))
            for k, v in leaves.items()
        }

    def transform_on(self, mesh: jax.sharding.Mesh) -> optax.GradientTransformation:
        """The optimizer with its own collectives where it has any, in explicit mode."""
        e, axes = self.experiment, _trained_axes(self.split.axes, self.places)
        if not (isinstance(e.optimizer, SHARDED) and self.explicit):
            return self.transform

        def split_of(names: LogicalAxes) -> Dims:
            table = e.sharding.of(names, self.sizes).optimizer_table
            return dims(names, table, sizes=self.sizes)

        shards = OnMesh(mesh, split_of, self.sizes)
        return e.optimizer.build(axes, steps=e.steps, batch=self.largest_batch, shards=shards)

    def next_scale(self, state: Any, finite: jax.Array) -> Any:
        """The loss scale's state after a step; () without one."""
        scale = self.experiment.precision.loss_scale
        return () if scale is None else scale.update(state, finite)

    def with_matmul_precision(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` traced at the experiment's matmul precision, whatever the platform's."""

        def run(*args: Any) -> Any:
            with jax.default_matmul_precision(self.experiment.precision.matmul):
                return function(*args)

        return run


def assemble(experiment: Experiment, spec: MeshSpec, fields: Any = None) -> Assembly:
    """The assembly. Raises ValueError with every violation of experiment and mesh together.

    `fields`: what a batch of the opened data holds; None takes `TextData`'s.
    """
    assembly, violations = try_assemble(experiment, spec, fields)
    if assembly is None or violations:
        raise ValueError(format_violations(violations, spec))
    return assembly


def try_assemble(
    experiment: Experiment, spec: MeshSpec, fields: Any = None
) -> tuple[Assembly | None, list[str]]:
    """Every violation of experiment and mesh, and the assembly where they leave one to be made."""
    sizes = {axis: n for axis, n in spec.shape.items() if n > 1}
    if describes(experiment.model):
        experiment = with_kernels(experiment, platform_of(spec), spec.chip.capability)
    violations = field_violations(experiment)
    mode = chosen_mode(experiment, violations)
    unbuildable = model_violations(experiment)
    violations += unbuildable + mesh_violations(experiment, spec, sizes, mode)
    if unbuildable:
        return None, violations
    adapters, untuned = adapters_of(experiment)
    adapters, kernel = None if untuned else adapters, experiment.execution.attention
    scales = delays_scales(experiment)
    split = abstract_model(experiment.model, adapters=adapters, kernel=kernel, scales=scales)
    violations += untuned + untrue(experiment.model, split)
    pipeline, unpiped = _on_stages(experiment, sizes)
    violations += unpiped
    if pipeline is not None:
        split = _split_in_slots(split, pipeline.layout)
    places, unplaced = place(split.params, split.axes, experiment.sharding, sizes=sizes)
    trained, untrained = trained_leaves(experiment, split.params, sizes)
    places, violations = with_trained(places, trained), violations + untrained
    # A head count that does not split is told once, not again as the sizes of its matrices.
    told = any("heads=" in v for v in violations)
    violations += [v for v in unplaced if not (told and "heads=" in v)]
    execution = experiment.execution
    layout = None if pipeline is None else pipeline.layout
    parts = compressed_parts(execution.reducer, execution.small_leaf, places, sizes, layout)
    violations += unused_reducer(execution.reducer, parts, execution.small_leaf)
    try:
        made = _build(
            fields, experiment=experiment, spec=spec, sizes=sizes, mode=mode, split=split,
            places=places, parts=parts, pipeline=pipeline,
        )  # fmt: skip
        return made, violations
    except Exception:  # of what is wrong already, however it shows
        if not violations:
            raise
        return None, violations


def _build(fields: Any, **found: Any) -> Assembly:
    """The assembly of these fields."""
    e, places, parts = found["experiment"], found["places"], found["parts"]
    axes = _trained_axes(found["split"].axes, places)
    transform = e.optimizer.build(axes, steps=e.steps, batch=batch_sizes(e.batch)[-1])
    layout = None if found["pipeline"] is None else found["pipeline"].layout
    abstract = jax.eval_shape(lambda: initial_state(e, transform, parts, layout, axes.keys()))
    return Assembly(
        **found,
        loop=_loop(e.execution, found["spec"]),
        transform=transform,
        abstract=abstract,
        splits=state_splits(abstract, places, parts),
        fields=token_fields(e.data) if fields is None else fields,
    )


def _trained_axes(
    axes: Mapping[str, LogicalAxes], places: Mapping[str, Leaf]
) -> dict[str, LogicalAxes]:
    return {k: names for k, names in without_scales(axes).items() if places[k].trained}


def platform_of(spec: MeshSpec) -> str:
    """JAX's name of the platform the mesh runs on."""
    return "cpu" if spec.simulated else spec.chip.platform


def _on_stages(
    experiment: Experiment, sizes: Mapping[str, int]
) -> tuple[OnStages | None, list[str]]:
    """The pipeline of a mesh with stages, and why there is none of a kind that was asked for."""
    stages, model = sizes.get(STAGE, 1), description_of(experiment.model)
    if stages == 1 or model is None or "pipeline" not in model.can:
        return None, []
    try:
        schedule = experiment.execution.pipeline.table(
            stages=stages, microbatches=experiment.microbatches
        )
    except ValueError as error:
        return None, [f"execution.pipeline: {error}"]
    except OSError as error:
        where = experiment.execution.pipeline.schedule
        return None, [f"execution.pipeline: {where} cannot be read: {error.strerror}"]
    if violations := late_gradients(experiment, splits=schedule.weight is not None):
        return None, violations
    return OnStages(schedule, StageLayout(model.periods, stages, schedule.chunks)), []


def _split_in_slots(split: ModuleSplit, layout: StageLayout) -> ModuleSplit:
    """The stacked parameters and their axes as they rest on stages."""
    stacked = {k for k, axes in split.axes.items() if "layers" in axes}
    params = {
        k: jax.eval_shape(layout.to_slots, leaf) if k in stacked else leaf
        for k, leaf in split.params.items()
    }
    axes = {k: layout.axes(names) if k in stacked else names for k, names in split.axes.items()}
    return split._replace(params=params, axes=axes)


def _loop(execution: Execution, spec: MeshSpec) -> LayerLoop:
    """The platform's default: unrolled on CPU, where a scanned loop costs 1.3x."""
    if execution.loop is not None:
        return execution.loop
    on_cpu = platform_of(spec) == "cpu"
    return LayerLoop(unroll=on_cpu, remat="none" if on_cpu else "dots_and_attention")


def default_collectives(spec: MeshSpec) -> Collectives:
    """On TPU collective matmuls, for tensor parallelism and for weights' gradients: there the
    compiler hides each hop behind a product, and leaves the plain gather, and the reduce-scatter as
    a whole all-reduce, synchronous (experiments/LOG.md). Elsewhere the compiler's own: on simulated
    devices nothing is hidden, on GPUs nothing is measured yet."""
    if platform_of(spec) != "tpu":
        return Collectives()
    tiles = math.prod(spec.shape[axis] for axis in ("fsdp", "expert"))
    return Collectives(tensor=Ring(), weight_gradients=Ring(1) if 1 < tiles <= MOST_TILES else None)


def active_mesh(mesh: jax.sharding.Mesh, sizes: Mapping[str, int]) -> jax.sharding.Mesh:
    """The mesh without its axes of size 1: an operation over those is the identity, and on one
    device the program is plain code."""
    names = tuple(sizes) or ("data",)
    shape = tuple(sizes.values()) or (1,)
    devices = np.asarray(mesh.devices).reshape(shape)
    return jax.sharding.Mesh(devices, names, axis_types=(jax.sharding.AxisType.Auto,) * len(names))
