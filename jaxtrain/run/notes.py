"""What runs, and is perhaps not what was meant: told by `check`, refused by nobody."""

from __future__ import annotations

import jax

from jaxtrain.mesh.sharding import ways
from jaxtrain.models.description import ExpertCall, operations
from jaxtrain.nn.loss import chunk_count
from jaxtrain.nn.quantized.delayed import without_scales
from jaxtrain.optim.leaves import leaf_dims
from jaxtrain.optim.plain import Optax, mixing
from jaxtrain.optim.rate import injected_rate
from jaxtrain.pipeline.overhead import warnings
from jaxtrain.state_format.hashing import SHA256, XXH3
from jaxtrain.step.assembly import Assembly
from jaxtrain.telemetry.metrics import has_tensorboard

MANY = 4
"""Times as many chunks as would do."""


def notes(assembly: Assembly) -> list[str]:
    """One sentence each, with what to change."""
    found = [*_plain_optax(assembly), *_packages(assembly)]
    if assembly.description is None:
        return found
    tables = [] if assembly.pipeline is None else warnings(assembly.pipeline.schedule)
    pipeline = [f"pipeline: {text}" for text in tables]
    return [*found, *_routers(assembly), *_chunks(assembly), *pipeline]


def _packages(assembly: Assembly) -> list[str]:
    """What a run does without, where a package is not installed."""
    e, found = assembly.experiment, []
    if e.logging.tensorboard is None and not has_tensorboard():
        found.append("logging: tensorboardX is not installed: no TensorBoard events are written")
    if e.checkpoints is not None and XXH3 is None:
        found.append(
            f"checkpoints: xxhash is not installed: digests are {SHA256}'s, slower to take, and "
            "checkpoints that were written with it cannot be read here"
        )
    return found


def _plain_optax(assembly: Assembly) -> list[str]:
    """A transformation of optax's that takes a stack of layers for one leaf, or says no rate."""
    if not isinstance(assembly.experiment.optimizer, Optax):
        return []
    state, found = assembly.abstract.optimizer, []
    if jax.eval_shape(injected_rate, state) is None:
        found.append(
            "optimizer: no learning rate is logged, for the state of this optax transformation "
            "says none; use optax.inject_hyperparams(optax.adamw)(learning_rate=...)"
        )
    places = {k: p for k, p in without_scales(assembly.places).items() if p.trained}
    stacks = [place.path for place in places.values() if leaf_dims(place.axes).stacked]
    params = {k: assembly.abstract.params[k] for k in places}
    met = mixing(assembly.transform, params, state) if stacks else []
    if met:
        found.append(
            f"optimizer: this optax transformation computes over whole leaves ({', '.join(met)}), "
            f"and {len(stacks)} leaves are stacks, such as {stacks[0]}: what it means for the "
            "matrix of one layer it does to all layers at once (a sum over all leaves together is "
            "right); use Lamb, Lars, Muon or Adafactor of jaxtrain"
        )
    return found


def _routers(assembly: Assembly) -> list[str]:
    """Routers whose gradient is zero by their definition."""
    blocks = assembly.described.layers
    calls = [each for b in blocks for each in operations(b) if isinstance(each, ExpertCall)]
    alone = [call for call in calls if call.per_token == 1]
    if not any(call.experts > 1 for call in alone):
        return []
    return [
        f"experts_per_token=1 in {len(alone)} of {len(blocks)} layers: the share of a token's only "
        "expert is 1 whatever its router says, so these routers learn nothing; use "
        "experts_per_token=2"
    ]


def _chunks(assembly: Assembly) -> list[str]:
    """A head that makes its logits in far more chunks than their size asks for."""
    limit, field = assembly.chunk_tokens, assembly.described.tokens
    _, rows, seq = assembly.abstract_batch()[field].shape
    rows //= ways(assembly.batch_splits[field][1], assembly.sizes)
    chunks, wanted = chunk_count(rows * seq, rows, limit), -(-rows * seq // limit)
    if chunks <= MANY * wanted:
        return []
    return [
        f"the head makes its logits in {chunks} chunks of {rows * seq // chunks} tokens, where "
        f"{wanted} would hold model.chunk_tokens={limit} each: chunks divide data.seq={seq}; use "
        f"seq={seq // wanted * wanted}, or chunk_tokens={rows * seq} for a single one"
    ]
