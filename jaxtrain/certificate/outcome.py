"""What a few steps of an experiment come to on a layout: all that a certificate compares."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.certificate.layouts import Layout, experiment_on
from jaxtrain.certificate.routing import Replays, StepRouting
from jaxtrain.experiment import Experiment
from jaxtrain.files.cache import cache_directory
from jaxtrain.mesh.compiler_options import quick_to_compile
from jaxtrain.mesh.mesh import mesh_from_axes
from jaxtrain.models.buffers import without_buffers
from jaxtrain.optim.elementwise import SGD
from jaxtrain.run.evaluate import Evaluator
from jaxtrain.run.rows import open_split
from jaxtrain.run.session import initial_program
from jaxtrain.step.assembly import Assembly, active_mesh, assemble
from jaxtrain.step.batches import fields_of, row_numbers
from jaxtrain.step.layer_order import params_in_natural_order, to_natural_order
from jaxtrain.step.state import TrainState, shardings, state_axes_of
from jaxtrain.step.train_step import make_train_step

STEPS = 5
HostArrays = dict[str, np.ndarray]


class Outcome(NamedTuple):
    """Leaves are on the host and in natural layer order; of an optimizer's state by their paths.
    losses and norms are those of each step. grads: before clipping; of each step with SGD in fp32,
    else of the first alone, but for leaves where that is zero (A of an adapter: its B begins so) of
    the second. routing: of each step, as the layout would have it. The others are of the last step,
    but for `init`."""

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
    def __call__(self, given: list[StepRouting] | None = None) -> Outcome:
        """given: the experts that tokens go through in each step, None for the routers' own."""
        ...


def program(experiment: Experiment, layout: Layout) -> Program:
    """STEPS steps of the experiment on the layout, and an evaluation: compiled, not yet run. Tokens
    of the evaluation go through the experts of those of the last step, wherever they would go.
    Raises what assembling, tracing and compiling raise."""
    e = experiment_on(experiment, layout)
    cache_dir = cache_directory()
    dataset = open_split(e, "train", cache_dir)
    assembly = assemble(e, mesh_from_axes(**dict(layout.axes)), fields_of(dataset, e.data))
    mesh = _mesh(layout, assembly)
    where = shardings(assembly.abstract, assembly.splits, mesh)
    by_shape = assembly.batch_shardings(mesh)
    # The programs run for a second and are compiled for ten.
    options: dict[str, Any] = assembly.compiler_options | quick_to_compile(mesh.devices.flat[0])
    initialise = initial_program(assembly, where).lower({}).compile(compiler_options=options)
    make = make_train_step(assembly, mesh, keep_gradients=True)
    lowered = jax.jit(make, in_shardings=(where, by_shape)).lower(
        assembly.abstract, assembly.abstract_batch()
    )
    step = lowered.compile(compiler_options=options)
    evaluate = Evaluator(assembly, mesh, cache_dir=cache_dir)
    evaluate.compile(where, options)
    placed, rows = assembly.placed(dataset, mesh, e.microbatches), row_numbers(e.batch)

    replays, buffers = Replays(assembly, where), assembly.buffers

    def run(given: list[StepRouting] | None = None) -> Outcome:
        state = initialise({})
        first, metrics, routing = _on_host(assembly, state), [], []
        for at in range(STEPS):
            if given is not None:
                state = replays.given(state, given[at])
            state, found = jax.block_until_ready(step(state, placed.rows(rows(at))))
            metrics.append(jax.tree.map(np.asarray, found))
            routing.append(replays.kept(metrics[-1]["gradients"]))
        last = _on_host(assembly, state)
        state = replays.given(state, (given or routing)[-1])
        return Outcome(
            init=first.params,
            losses=np.array([m["loss"] for m in metrics]),
            norms=np.array([m["grad_norm"] for m in metrics]),
            grads=_bounded_gradients(
                [
                    _natural_order(assembly, without_buffers(m["gradients"], buffers))
                    for m in metrics
                ],
                e,
            ),
            params=last.params,
            averages=last.ema,
            optimizer=_by_path(last.optimizer),
            eval_loss=evaluate(state, batches=1).get("eval_loss", 0.0),
            routing=routing,
        )

    return run


def _bounded_gradients(grads: list[HostArrays], experiment: Experiment) -> list[HostArrays]:
    """Those that are held to a bound."""
    if isinstance(experiment.optimizer, SGD) and experiment.precision.compute == jnp.float32:
        return grads
    first, second = grads[:2]
    return [{k: g if g.any() else second[k] for k, g in first.items()}]


def _mesh(layout: Layout, assembly: Assembly) -> jax.sharding.Mesh:
    """Of the first devices, as many as the layout takes."""
    names, sizes = zip(*layout.axes, strict=True)
    devices = np.array(jax.devices()[: math.prod(sizes)]).reshape(sizes)
    types = (jax.sharding.AxisType.Auto,) * len(sizes)
    return active_mesh(jax.sharding.Mesh(devices, names, axis_types=types), assembly.sizes)


def _on_host(assembly: Assembly, state: TrainState) -> TrainState:
    names = state_axes_of(assembly.abstract, assembly.places)
    # Routing that is given is no part of what a run comes to.
    kept = assembly.buffers.replays
    state, names = (
        replace(each, params={k: v for k, v in each.params.items() if k not in kept})
        for each in (state, names)
    )
    # On the host first: an array that is split would be put in order by a program of its own.
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
