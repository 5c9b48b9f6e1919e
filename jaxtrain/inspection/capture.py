"""Activations of a decoder by name, and the gradient of a batch by parameter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtrain.arrays import Arrays
from jaxtrain.experiment.reading import Trust
from jaxtrain.inspection.opened import mesh_spec, stored_model
from jaxtrain.inspection.score import data_of_rows
from jaxtrain.mesh.mesh import MeshSpec
from jaxtrain.nn.local import Local
from jaxtrain.session.rows import open_split
from jaxtrain.step.layer_order import AtRest, params_in_natural_order
from jaxtrain.step.mean_gradients import make_mean_gradients
from jaxtrain.step.state import TrainState

Activations = dict[str, jax.Array]
EMBEDDING, NORM = "embedding", "norm"


@runtime_checkable
class ModelOfBlocks(Protocol):
    """A model whose activations have names, such as a decoder."""

    norm: Any

    def batch_of(self, tokens: Any, segments: Any, positions: Any) -> Arrays: ...

    def gather_lookups(self, comm: Local, batch: Arrays) -> tuple[Mapping[str, Any], Arrays]: ...

    def context(self, batch: Arrays, key: None, comm: Local) -> Any: ...

    def embed(self, table: Any, ids: Any, context: Any, comm: Local) -> jax.Array: ...

    def blocks(self, comm: Local) -> Iterator[Any]: ...


def capture(
    model: ModelOfBlocks,
    tokens: jax.Array,
    names: str | Sequence[str] = "layers.*",
    *,
    segments: jax.Array | None = None,
    positions: jax.Array | None = None,
    dtype: Any = jnp.float32,
) -> Activations:
    """Returns activations by name, [rows, seq, ...], in the order in which they arise.

    names: patterns. There are `embedding`; for each layer, from 0, `layers.N`, the residual stream
    behind it, and `layers.N.PATH`, the output of a module within its block such as `attention`,
    `mlp` or `attention_norm`, before it is added; and `norm`, what the head multiplies. model: of
    `load`, or another decoder. tokens, segments, positions, dtype: as for its `logits`. Under
    `jax.jit` only what is asked for is kept. Raises ValueError for a pattern that names nothing.
    """
    if not isinstance(model, ModelOfBlocks):
        raise ValueError(
            f"a {type(model).__name__} is no decoder; of a module of your own, flax.nnx.capture "
            "gives what its methods return"
        )
    comm = Local(dtype)
    batch = model.batch_of(tokens, segments, positions)
    with jax.default_matmul_precision("highest" if dtype == jnp.float32 else None):
        activations = _activations(model, batch, comm)
    patterns = (names,) if isinstance(names, str) else tuple(names)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in activations):
            there = ", ".join(activations)
            raise ValueError(f"{pattern!r} names no activation; there are {there}")
    shape = tokens.shape
    return {
        name: value.reshape(*shape, *value.shape[1:])
        for name, value in activations.items()
        if any(fnmatchcase(name, pattern) for pattern in patterns)
    }


def _activations(model: ModelOfBlocks, batch: Arrays, comm: Local) -> Activations:
    """Returns all activations, [rows * seq, ...]."""
    tables, batch = model.gather_lookups(comm, batch)
    context = model.context(batch, None, comm)
    x = model.embed(tables[EMBEDDING], batch["tokens"], context, comm)
    activations = {EMBEDDING: x}
    for number, block in enumerate(model.blocks(comm)):
        run = partial(_run_block, context=context, comm=comm, layer=number)
        outputs = nnx.capture(run, nnx.Intermediate, method_outputs=nnx.Intermediate)
        x, inner = outputs(block, x)
        for path, variable in nnx.to_flat_state(inner):
            value = jax.tree.leaves(variable.get_value())[0]
            if path[:-1] and path[-1] == "__call__" and len(value) == len(x):
                name = ".".join(map(str, path[:-1]))
                activations[f"layers.{number}.{name}"] = value
        activations[f"layers.{number}"] = x
    return {**activations, NORM: model.norm(x)}


def _run_block(block: Any, x: jax.Array, *, context: Any, comm: Local, layer: int) -> jax.Array:
    return block(x, context, comm, layer=layer)[0]


def gradients(
    run: str | Path,
    rows: Mapping[str, np.ndarray],
    *,
    mesh: MeshSpec | str | Path | None = None,
    microbatches: int = 1,
    isolate_documents: bool | None = None,
    trust: Trust = (),
) -> dict[str, jax.Array]:
    """Returns the gradient of the loss of rows, a mean over their weights, by trained parameter, in
    fp32, unclipped; layers are stacked on dim 0 in their order.

    run: RUN or RUN@STEP; its last weights, not averaged ones, in its own precision and with its
    dropout. rows: one batch; microbatches: its parts. The others as for `score_rows`. Raises
    ValueError for what does not fit, and DamagedCheckpoint.
    """
    spec, data = mesh_spec(mesh), data_of_rows(run, rows, isolate_documents, trust)
    stored = stored_model(run, data, averaged=False, microbatches=microbatches, trust=trust)
    stored = replace(stored, experiment=replace(stored.experiment, batch=len(data)))
    dataset = open_split(stored.experiment, "train", Path())
    assembly, devices = stored.on(spec, dataset)
    state = stored.state(AtRest(assembly, devices))
    batch = assembly.placed(dataset, devices, microbatches).rows(np.arange(len(data)))
    mean_gradients = make_mean_gradients(assembly, devices)
    key = jax.random.key(stored.experiment.seed)

    @jax.jit
    def mean(state: TrainState, batch: Any) -> dict[str, jax.Array]:
        scale = jnp.float32(1.0 / assembly.tokens_power_of_two(batch))  # of a mean, as in training
        grads = mean_gradients(state, batch, scale, key).grads
        return params_in_natural_order(assembly, grads)

    return assembly.with_matmul_precision(mean)(state, batch)
