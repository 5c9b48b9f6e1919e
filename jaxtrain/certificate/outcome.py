"""Runs a few steps of an experiment on a layout, and returns all that a certificate compares."""

from __future__ import annotations

import math
import zlib
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.certificate.layouts import Layout, experiment_on
from jaxtrain.certificate.routing import Replays, StepRouting
from jaxtrain.data.batch_size import row_numbers
from jaxtrain.experiment import Experiment
from jaxtrain.files.cache import cache_directory
from jaxtrain.mesh.compiler_options import quick_to_compile
from jaxtrain.mesh.mesh import mesh_from_axes
from jaxtrain.models.buffers import without_buffers
from jaxtrain.models.description import ADAPTER_B
from jaxtrain.optim.elementwise import SGD
from jaxtrain.program.order import side_by_side
from jaxtrain.program.text import program_text
from jaxtrain.session.evaluate import Evaluator
from jaxtrain.session.first_state import initial_program
from jaxtrain.session.rows import open_split
from jaxtrain.step.assembly import Assembly, active_mesh, assemble
from jaxtrain.step.batches import fields_of
from jaxtrain.step.layer_order import (
    natural_shapes,
    params_in_natural_order,
    to_natural_order,
    to_rest_order,
)
from jaxtrain.step.state import TrainState, shardings, state_axes_of
from jaxtrain.step.train_step import make_train_step
from jaxtrain.violations import raise_violations

STEPS = 5
B_STD = 0.1
"""At rank 2 and alpha 4 an adapter's product is a quarter of its matrix."""
HostArrays = dict[str, np.ndarray]


class Outcome(NamedTuple):
    """Results of a run. Leaves are on the host and in natural layer order; an optimizer's are keyed
    by path.

    losses, norms: of each step. grads: before clipping; of each step with SGD in fp32, else of the
      first step alone. A leaf whose first gradient is zero (of a matrix before one that starts at
      zero) has the second step's. routing: of each step, as the layout itself chooses it. init:
      before the first step. The others are of the last step.
    """

    init: HostArrays
    losses: np.ndarray
    norms: np.ndarray
    grads: list[HostArrays]
    params: HostArrays
    averages: HostArrays
    optimizer: HostArrays
    eval_loss: float
    routing: list[StepRouting]


class Program(Protocol):
    def __call__(self, given_routing: list[StepRouting] | None = None) -> Outcome:
        """given_routing: the experts of tokens in each step, None for the routers' own choice."""
        ...


class InitialPrograms:
    """Compiled programs of initial states: of layouts with the same one, it is compiled once."""

    def __init__(self) -> None:
        self._compiled: dict[Any, jax.stages.Compiled] = {}

    def compile(
        self, layout: Layout, lowered: jax.stages.Lowered, options: dict[str, Any]
    ) -> jax.stages.Compiled:
        chosen = tuple(sorted(options.items()))
        key = (layout.axes, chosen, lowered.out_tree, lowered.as_text())
        if key not in self._compiled:
            self._compiled[key] = lowered.compile(compiler_options=options)
        return self._compiled[key]


def program(
    experiment: Experiment, layout: Layout, initial_programs: InitialPrograms | None = None
) -> Program:
    """Compiles STEPS steps of the experiment on the layout, and an evaluation; they are not yet
    run. Tokens of the evaluation use the experts of the last step's tokens, whatever their own
    choice. initial_programs: of other layouts of the experiment. Raises what assembling, tracing
    and compiling raise, and ValueError if devices of a CPU may mix up collectives."""
    e = experiment_on(experiment, layout)
    cache_dir = cache_directory()
    dataset = open_split(e, "train", cache_dir)
    assembly = assemble(e, mesh_from_axes(**dict(layout.axes)), fields_of(dataset, e.data))
    mesh = _mesh(layout, assembly)
    state_shardings = shardings(assembly.abstract, assembly.splits, mesh)
    by_shape = assembly.batch_shardings(mesh)
    # Compilation takes ten times as long as the run.
    options: dict[str, Any] = assembly.compiler_options | quick_to_compile(mesh.devices.flat[0])
    lowered_initial = initial_program(assembly, state_shardings).lower(
        _drawn_adapters(assembly, state_shardings)
    )
    programs = InitialPrograms() if initial_programs is None else initial_programs
    initialise = programs.compile(layout, lowered_initial, options)
    train_step = make_train_step(assembly, mesh, keep_gradients=True)
    lowered = jax.jit(train_step, in_shardings=(state_shardings, by_shape)).lower(
        assembly.abstract, assembly.abstract_batch()
    )
    step = lowered.compile(compiler_options=options)
    evaluate = Evaluator(assembly, mesh, cache_dir=cache_dir)
    evaluate.compile(state_shardings, options)
    _refuse_unordered(mesh, step, evaluate.program)
    placed, rows = assembly.placed(dataset, mesh, e.microbatches), row_numbers(e.batch)
    replays, buffers = Replays(assembly, state_shardings), assembly.buffers

    def run(given_routing: list[StepRouting] | None = None) -> Outcome:
        # Drawn for each run, since the program donates them.
        state = initialise(_drawn_adapters(assembly, state_shardings))
        first, metrics, routing = _on_host(assembly, state), [], []
        for number in range(STEPS):
            if given_routing is not None:
                state = replays.with_routing(state, given_routing[number])
            state, step_metrics = jax.block_until_ready(step(state, placed.rows(rows(number))))
            metrics.append(jax.tree.map(np.asarray, step_metrics))
            routing.append(replays.read_routing(metrics[-1]["gradients"]))
        grads = [
            _natural_order(assembly, without_buffers(m["gradients"], buffers)) for m in metrics
        ]
        last = _on_host(assembly, state)
        state = replays.with_routing(state, (given_routing or routing)[-1])
        return Outcome(
            init=first.params,
            losses=np.array([m["loss"] for m in metrics]),
            norms=np.array([m["grad_norm"] for m in metrics]),
            grads=_bounded_gradients(grads, e),
            params=last.params,
            averages=last.ema,
            optimizer=_by_path(last.optimizer),
            eval_loss=evaluate(state, batches=1).get("eval_loss", 0.0),
            routing=routing,
        )

    return run


def _drawn_adapters(assembly: Assembly, state_shardings: TrainState) -> dict[str, jax.Array]:
    """Returns B of each adapter at rest, drawn from N(0, B_STD^2); the same of each layer on every
    layout.

    A run begins with B = 0, where A has no gradient. After a step of Adam each element of B is as
    large as the rate and has its gradient's sign, that of rounding where the gradient is small: A's
    gradients in bf16 were 0.4 apart there.
    """
    drawn = {}
    for name, leaf in natural_shapes(assembly).params.items():
        if not name.endswith(ADAPTER_B):
            continue
        generator = np.random.default_rng(zlib.crc32(name.encode()))
        values = B_STD * generator.standard_normal(leaf.shape, np.float32)
        at_rest = to_rest_order(assembly, values, assembly.places[name].axes)
        drawn[name] = jax.device_put(at_rest, state_shardings.params[name])
    return drawn


def _refuse_unordered(mesh: jax.sharding.Mesh, *programs: Any) -> None:
    """Raises ValueError for programs whose right values would be luck."""
    if mesh.devices.flat[0].platform == "cpu":
        raise_violations(
            line for program in programs for line in side_by_side(program_text(program))
        )


def _bounded_gradients(grads: list[HostArrays], experiment: Experiment) -> list[HostArrays]:
    """Returns the gradients that have a bound."""
    precision = experiment.precision
    exact = precision.compute == jnp.float32 and precision.products is None
    if isinstance(experiment.optimizer, SGD) and exact:
        return grads
    first, second = grads[:2]
    return [{k: g if g.any() else second[k] for k, g in first.items()}]


def _mesh(layout: Layout, assembly: Assembly) -> jax.sharding.Mesh:
    """Returns a mesh of the first devices, as many as the layout needs."""
    names, sizes = zip(*layout.axes, strict=True)
    devices = np.array(jax.devices()[: math.prod(sizes)]).reshape(sizes)
    types = (jax.sharding.AxisType.Auto,) * len(sizes)
    return active_mesh(jax.sharding.Mesh(devices, names, axis_types=types), assembly.sizes)


def _on_host(assembly: Assembly, state: TrainState) -> TrainState:
    names = state_axes_of(assembly.abstract, assembly.places)
    # Given routing is not a result of the run.
    replayed = assembly.buffers.replays
    state, names = (
        replace(tree, params={k: v for k, v in tree.params.items() if k not in replayed})
        for tree in (state, names)
    )
    # To the host first: reordering a split array would need a program of its own.
    return jax.tree.map(
        lambda leaf, axes: np.asarray(to_natural_order(assembly, np.asarray(leaf), axes)),
        state,
        names,
    )


def _natural_order(assembly: Assembly, params: HostArrays) -> HostArrays:
    return jax.tree.map(np.asarray, params_in_natural_order(assembly, params))


def _by_path(tree: Any) -> HostArrays:
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}
