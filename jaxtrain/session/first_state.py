"""The state that a run begins with."""

from __future__ import annotations

from typing import Any

import jax

from jaxtrain.mesh.compiler_options import SAME_BITS
from jaxtrain.step.assembly import Assembly
from jaxtrain.step.initial import initial_state
from jaxtrain.step.layer_order import AtRest
from jaxtrain.step.state import TrainState
from jaxtrain.weights.start import settled_start, starting_params


def first_model(at_rest: AtRest, state: TrainState | None, step: int | None) -> TrainState:
    """Returns the state that a run began with: `state`, or where that is None one made anew. step:
    of the run that its start names, None for the one that it names."""
    if state is not None:
        return state
    loaded = starting_params(at_rest, settled_start(at_rest.assembly, step))
    return initialise(at_rest.assembly, at_rest.shardings, loaded)


def initialise(
    assembly: Assembly, shardings: TrainState, loaded: dict[str, jax.Array] | None = None
) -> TrainState:
    """Returns the initial state on its devices; the same bits on every mesh. loaded: starting
    parameters, in their at-rest sharding; they are donated."""
    return initial_program(assembly, shardings)(loaded or {})


def initial_program(assembly: Assembly, shardings: TrainState) -> Any:
    """The jitted function of `initialise`, from loaded parameters to the state; on CPU compiled so
    that its bits do not depend on how a leaf is split."""

    def make(loaded: dict[str, jax.Array]) -> TrainState:
        trained = assembly.places.keys() - assembly.frozen
        layout = None if assembly.pipeline is None else assembly.pipeline.layout
        more: Any = dict(derivative=assembly.first_derivative)
        given = (assembly.transform, assembly.parts, layout, trained, loaded)
        return initial_state(assembly, *given, **more)

    on_cpu = jax.tree.leaves(shardings)[0].mesh.devices.flat[0].platform == "cpu"
    options = SAME_BITS if on_cpu else {}
    return jax.jit(make, out_shardings=shardings, donate_argnums=0, compiler_options=options)
