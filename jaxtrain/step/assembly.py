"""An experiment on a mesh before a device is touched: every shape, every split, every mistake."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxtrain.collectives.choice import Collectives
from jaxtrain.collectives.ring import Ring
from jaxtrain.compression.residuals import Part, compressed_parts, no_residuals
from jaxtrain.experiment import Execution, Experiment
from jaxtrain.mesh.mesh import MeshSpec
from jaxtrain.mesh.sharding import (
    STAGE,
    Axes,
    Dims,
    Leaf,
    activation_dims,
    dims,
    named_sharding,
    partition_spec,
    place,
)
from jaxtrain.models.decoder import DecoderConfig
from jaxtrain.nn.attention import PlatformKernel
from jaxtrain.nn.module import Split, build, take_apart
from jaxtrain.nn.param import named_key
from jaxtrain.nn.stack import LayerLoop
from jaxtrain.optim.distributed import OnMesh
from jaxtrain.optim.optimizer import SHARDED
from jaxtrain.pipeline.layout import StageLayout
from jaxtrain.pipeline.schedule import Schedule
from jaxtrain.step.batches import token_fields
from jaxtrain.step.state import TrainState, state_splits
from jaxtrain.step.tuning import adapted_model, base_model, trained_leaves, with_trained
from jaxtrain.step.violations import (
    batch_sizes,
    chosen_mode,
    field_violations,
    listed,
    mesh_violations,
    model_violations,
    unused_reducer,
)

KEEP_BARRIERS = "cse_barrier_expander"
"""XLA:CPU's pass that drops optimization barriers before equal instructions are merged for the last
time: with it nothing is rematerialised there, and gathers leave their places. Other platforms keep
their barriers that long by themselves."""


class OnStages(NamedTuple):
    """A pipeline: who works when, and which layer lies where."""

    schedule: Schedule
    layout: StageLayout


@dataclass(frozen=True)
class Assembly:
    """An experiment that fits a mesh. `sizes`: mesh axes of size > 1, in mesh order."""

    experiment: Experiment
    spec: MeshSpec
    sizes: Mapping[str, int]
    mode: str
    loop: LayerLoop
    split: Split
    places: Mapping[str, Leaf]
    parts: Mapping[str, Part]
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

    @property
    def built_in(self) -> bool:
        return isinstance(self.experiment.model, DecoderConfig)

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
    def check_vma(self) -> bool:
        """Off on TPU unless asked for: Pallas kernels, splash attention among them, refuse it."""
        asked = self.experiment.execution.check_vma
        return platform_of(self.spec) != "tpu" if asked is None else asked

    @property
    def batch_splits(self) -> dict[str, Dims]:
        """Batches are [microbatches, rows, seq, ...]: rows over batch axes, seq over context."""
        rules = self.experiment.sharding.activations
        names = (None, "batch", "seq", None, None, None)
        return {
            name: activation_dims(names[: len(shape) + 2], rules, sizes=self.sizes)
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

    @staticmethod
    def tokens_power_of_two(batch: dict[str, Any]) -> float:
        """About the tokens of a batch: dividing by a power of two changes no bit."""
        first = batch.get("targets", batch["rows"])
        return 2.0 ** round(math.log2(first.size))

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

        def split_of(names: Axes) -> Dims:
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
    assembly, violations = examined(experiment, spec, fields)
    if assembly is None or violations:
        raise ValueError(listed(violations, spec))
    return assembly


def examined(
    experiment: Experiment, spec: MeshSpec, fields: Any = None
) -> tuple[Assembly | None, list[str]]:
    """Every violation of experiment and mesh, and the assembly where they leave one to be made."""
    sizes = {axis: n for axis, n in spec.shape.items() if n > 1}
    if experiment.execution.attention is None and isinstance(experiment.model, DecoderConfig):
        chosen = replace(experiment.execution, attention=PlatformKernel(platform_of(spec)))
        experiment = replace(experiment, execution=chosen)
    violations = field_violations(experiment)
    mode = chosen_mode(experiment, violations)
    unbuildable = model_violations(experiment)
    violations += unbuildable + mesh_violations(experiment, spec, sizes, mode)
    if unbuildable:
        return None, violations
    experiment, split, untuned = _tuned(experiment)
    violations += untuned
    pipeline, unpiped = _on_stages(experiment, sizes)
    violations += unpiped
    if pipeline is not None:
        split = _laid(split, pipeline.layout)
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
        made = _made(
            fields, experiment=experiment, spec=spec, sizes=sizes, mode=mode, split=split,
            places=places, parts=parts, pipeline=pipeline,
        )  # fmt: skip
        return made, violations
    except Exception:  # of what is wrong already, however it shows
        if not violations:
            raise
        return None, violations


def _made(fields: Any, **found: Any) -> Assembly:
    """The assembly of the fields that were examined."""
    e, places, parts = found["experiment"], found["places"], found["parts"]
    axes = _trained_axes(found["split"].axes, places)
    transform = e.optimizer.build(axes, steps=e.steps, batch=batch_sizes(e.batch)[-1])
    abstract = jax.eval_shape(
        lambda: initial_state(e, transform, parts, found["pipeline"], axes.keys())
    )
    return Assembly(
        **found,
        loop=_loop(e.execution, found["spec"]),
        transform=transform,
        abstract=abstract,
        splits=state_splits(abstract, places, parts),
        fields=token_fields(e.data) if fields is None else fields,
    )


def _tuned(experiment: Experiment) -> tuple[Experiment, Split, list[str]]:
    """The experiment with its adapters, its model taken apart, and what is wrong with them."""
    plain = base_model(experiment)
    if getattr(experiment.fine_tuning, "lora", None) is None and plain != experiment:
        told = "model: adapters are made by fine_tuning=FineTuning(lora=...); leave them out"
        return plain, take_apart(_abstract_model(plain)), [told]
    split = take_apart(_abstract_model(plain))
    tuned, problems = adapted_model(plain, {k: leaf.shape for k, leaf in split.params.items()})
    if tuned is plain or problems:
        return plain, split, problems
    return tuned, take_apart(_abstract_model(tuned)), []


def _trained_axes(axes: Mapping[str, Axes], places: Mapping[str, Leaf]) -> dict[str, Axes]:
    return {k: names for k, names in axes.items() if places[k].trained}


def platform_of(spec: MeshSpec) -> str:
    """JAX's name of the platform the mesh runs on."""
    return "cpu" if spec.simulated else spec.chip.platform


def _on_stages(
    experiment: Experiment, sizes: Mapping[str, int]
) -> tuple[OnStages | None, list[str]]:
    """The pipeline of a mesh with stages, and why there is none of a kind that was asked for."""
    stages, model = sizes.get(STAGE, 1), experiment.model
    if stages == 1 or not isinstance(model, DecoderConfig):
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
    return OnStages(schedule, StageLayout(model.periods, stages, schedule.chunks)), []


def _laid(split: Split, layout: StageLayout) -> Split:
    """The stacked parameters and their axes as they rest on stages."""
    stacked = {k for k, axes in split.axes.items() if "layers" in axes}
    params = {
        k: jax.eval_shape(layout.laid, leaf) if k in stacked else leaf
        for k, leaf in split.params.items()
    }
    axes = {k: layout.axes(names) if k in stacked else names for k, names in split.axes.items()}
    return split._replace(params=params, axes=axes)


def initial_state(
    experiment: Experiment,
    transform: optax.GradientTransformation,
    parts: Mapping[str, Part],
    pipeline: OnStages | None,
    trained: Set[str],
    given: Mapping[str, jax.Array] | None = None,
) -> TrainState:
    """The state before the first step; but for residuals, the slots of a pipeline and parameters
    that are `given`, as they rest, a function of the seed only."""
    split = take_apart(make_model(experiment))
    params = dict(split.params)
    if pipeline is not None:
        lay = pipeline.layout.laid
        params = {k: lay(v) if "layers" in split.axes[k] else v for k, v in params.items()}
    dtype = experiment.precision.params
    params = {k: v.astype(dtype) for k, v in {**params, **(given or {})}.items()}
    moved = {k: v for k, v in params.items() if k in trained}
    scale = experiment.precision.loss_scale
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        optimizer=transform.init(moved),
        rest=split.rest,
        ema=moved if experiment.ema_decay is not None else {},
        loss_scale=() if scale is None else scale.init(),
        skipped=jnp.zeros((), jnp.int32),
        residuals=no_residuals(experiment.execution.reducer, parts, experiment.seed),
    )


def make_model(experiment: Experiment) -> nnx.Module:
    """The module with its initial parameters."""
    key = named_key(jax.random.key(experiment.seed), "model")
    model = experiment.model
    if isinstance(model, DecoderConfig):
        return build(lambda key: model.build(key, kernel=experiment.execution.attention), key)
    make = getattr(model, "build", model)
    return build(lambda key: make(nnx.Rngs(key)), key)


def _abstract_model(experiment: Experiment) -> nnx.Module:
    return nnx.eval_shape(lambda: make_model(experiment))


def _loop(execution: Execution, spec: MeshSpec) -> LayerLoop:
    """The platform's default: unrolled on CPU, where a scanned loop costs 1.3x."""
    if execution.loop is not None:
        return execution.loop
    on_cpu = platform_of(spec) == "cpu"
    return LayerLoop(unroll=on_cpu, remat="none" if on_cpu else "dots_and_attention")


def default_collectives(spec: MeshSpec) -> Collectives:
    """On TPU collective matmuls for tensor parallelism: there the compiler hides each hop
    behind a product, and leaves the plain gather synchronous (experiments/LOG.md). Elsewhere the
    compiler's own: on simulated devices nothing is hidden, on GPUs nothing is measured yet."""
    return Collectives(tensor=Ring()) if platform_of(spec) == "tpu" else Collectives()


def active_mesh(mesh: jax.sharding.Mesh, sizes: Mapping[str, int]) -> jax.sharding.Mesh:
    """The mesh without its axes of size 1: an operation over those is the identity, and on one
    device the program is plain code."""
    names = tuple(sizes) or ("data",)
    shape = tuple(sizes.values()) or (1,)
    devices = np.asarray(mesh.devices).reshape(shape)
    return jax.sharding.Mesh(devices, names, axis_types=(jax.sharding.AxisType.Auto,) * len(names))
