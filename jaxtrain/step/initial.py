"""The state before the first step, and the initial model."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jaxtrain.compression.residuals import CompressedLeaf, no_residuals
from jaxtrain.experiment.resolve import Resolved
from jaxtrain.models.buffers import without_buffers
from jaxtrain.models.build import build_model
from jaxtrain.models.scales import first_scales
from jaxtrain.nn.module import take_apart
from jaxtrain.nn.param import named_key
from jaxtrain.pipeline.layout import StageLayout
from jaxtrain.step.state import TrainState


def initial_state(
    resolved: Resolved,
    transform: optax.GradientTransformation,
    parts: Mapping[str, CompressedLeaf],
    layout: StageLayout | None,
    trained: Set[str],
    loaded: Mapping[str, jax.Array] | None = None,
    *,
    derivative: float,
) -> TrainState:
    """Returns the state before the first step. It is a function of the seed only, except for
    residuals, a pipeline's slots and `loaded` parameters, which are laid out as in the state.
    derivative: of the first step's loss, as it is differentiated, by a token's loss."""
    experiment, buffers = resolved.experiment, resolved.buffers
    split = take_apart(make_model(resolved))
    params = dict(split.params)
    if layout is not None:
        params = {
            k: layout.to_slots(v) if "layers" in split.axes[k] else v for k, v in params.items()
        }
    dtype = experiment.precision.params
    all_params = {**params, **(loaded or {})}
    params = first_scales(all_params, buffers.scales, experiment.precision.products, derivative)
    # Buffers count steps and tokens: 16 bits lose count beyond 256.
    params = {k: v if k in buffers.names else v.astype(dtype) for k, v in params.items()}
    moved = {k: v for k, v in without_buffers(params, buffers).items() if k in trained}
    scale = experiment.precision.loss_scale
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        optimizer=transform.init(moved),
        model_state=split.model_state,
        ema=moved if experiment.ema_decay is not None else {},
        loss_scale=() if scale is None else scale.init(),
        skipped=jnp.zeros((), jnp.int32),
        residuals=no_residuals(experiment.execution.reducer, parts, experiment.seed),
    )


def make_model(resolved: Resolved) -> nnx.Module:
    """Returns the module with its initial parameters, including adapters."""
    experiment, scales = resolved.experiment, bool(resolved.buffers.scales)
    key = named_key(jax.random.key(experiment.seed), "model")
    options: Any = dict(kernel=experiment.execution.attention, scales=scales, tallies=True)
    return build_model(experiment.model, key, adapters=resolved.adapters, **options)
