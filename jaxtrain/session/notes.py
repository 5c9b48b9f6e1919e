"""Notes on settings that run but may not be intended: `check` prints them, none is an error."""

from __future__ import annotations

import jax

from jaxtrain.experiment import Experiment, FromHuggingFace, FromRun
from jaxtrain.files.opened import open_folder
from jaxtrain.losses.cross_entropy import chunk_count
from jaxtrain.models.buffers import without_buffers
from jaxtrain.moe.grouped import takes_8_bits
from jaxtrain.operations.block import mixtures
from jaxtrain.optim.leaves import leaf_dims
from jaxtrain.optim.plain import Optax, mixing
from jaxtrain.optim.rate import injected_rate
from jaxtrain.pipeline.overhead import warnings
from jaxtrain.state_format.hashing import SHA256, XXH3
from jaxtrain.step.assembly import Assembly
from jaxtrain.step.running_kernels import kernel_of, local_rows
from jaxtrain.telemetry.events import has_tensorboard
from jaxtrain.weights.start import run_of
from jaxtrain.weights.tokenizer_files import declared_positions

MANY = 4
"""Note head chunks when there are over this many times as many as needed."""


INT8_ON_GPUS = (
    "precision.products: XLA has no fast kernel for int8 products on GPUs: on an H200 a step took "
    "1.4 times bf16's time; use fp8, with which it took 0.89"
)


def notes(assembly: Assembly) -> list[str]:
    """One sentence each, with what to change."""
    lines = [*_plain_optax(assembly), *_packages(assembly), *starting(assembly.experiment)]
    if assembly.description is None:
        return lines
    tables = [] if assembly.pipeline is None else warnings(assembly.pipeline.schedule)
    pipeline = [f"pipeline: {text}" for text in tables]
    products = [*_products(assembly), *_experts(assembly)]
    return [*lines, *_routers(assembly), *products, *_chunks(assembly), *pipeline]


def starting(experiment: Experiment) -> list[str]:
    """Notes starting weights that do not suit the data: none, for a loss of pairs; and rows that
    are longer than those that the weights were trained on."""
    start = experiment.start
    from_random = [
        "fine_tuning.preferences compares with the model that the run begins with, and this one "
        "begins with random weights; use start=FromHuggingFace(...) or FromRun(...)"
    ]
    is_random = experiment.objective is not None and start is None
    return from_random * is_random + _positions(experiment)


def _positions(experiment: Experiment) -> list[str]:
    start = experiment.start
    seq = getattr(experiment.data, "seq", None)
    if not isinstance(start, FromHuggingFace | FromRun) or seq is None:
        return []
    try:
        if isinstance(start, FromRun):
            place, path = start.run_dir, run_of(start)
        else:
            place, path = start.folder, open_folder("folder", start.folder).here
        declared = declared_positions(path)
    except (OSError, ValueError):  # what else reads it says so
        return []
    if declared is None or seq <= declared:
        return []
    return [
        f"data.seq={seq} is longer than the max_position_embeddings={declared} of {place}: its "
        f"weights have seen no later position; use seq={declared} or less"
    ]


def _packages(assembly: Assembly) -> list[str]:
    """Features that a run lacks because a package is not installed."""
    e, lines = assembly.experiment, []
    if e.logging.tensorboard is None and not has_tensorboard():
        lines.append("logging: tensorboardX is not installed: no TensorBoard events are written")
    if e.checkpoints is not None and XXH3 is None:
        lines.append(
            f"checkpoints: xxhash is not installed: digests are {SHA256}'s, slower to take, and "
            "checkpoints that were written with it cannot be read here"
        )
    return lines


def _plain_optax(assembly: Assembly) -> list[str]:
    """Notes on an optax transformation that mixes stacked layers, or has no learning rate."""
    if not isinstance(assembly.experiment.optimizer, Optax):
        return []
    state, lines = assembly.abstract.optimizer, []
    if jax.eval_shape(injected_rate, state) is None:
        lines.append(
            "optimizer: no learning rate is logged, for the state of this optax transformation "
            "says none; use optax.inject_hyperparams(optax.adamw)(learning_rate=...)"
        )
    all_places = without_buffers(assembly.places, assembly.buffers)
    places = {k: p for k, p in all_places.items() if p.trained}
    stacks = [place.path for place in places.values() if leaf_dims(place.axes).stacked]
    params = {k: assembly.abstract.params[k] for k in places}
    used = mixing(assembly.transform, params, state) if stacks else []
    if used:
        lines.append(
            f"optimizer: this optax transformation computes over whole leaves ({', '.join(used)}), "
            f"and {len(stacks)} leaves are stacks, such as {stacks[0]}: what it means for the "
            "matrix of one layer it does to all layers at once (a sum over all leaves together is "
            "right); use Lamb, Lars, Muon or Adafactor of jaxtrain"
        )
    return lines


def _routers(assembly: Assembly) -> list[str]:
    """Notes routers whose gradient is zero by definition."""
    blocks = assembly.described.layers
    alone = [call for block in blocks for call in mixtures(block) if not call.learns]
    if not alone:
        return []
    return [
        f"experts_per_token=1 in {len(alone)} of {len(blocks)} layers: the share of a token's only "
        "expert is 1 whatever its router says, so these routers learn nothing; use "
        "experts_per_token=2, or router=SoftmaxRouter(renormalise=False)"
    ]


def _products(assembly: Assembly) -> list[str]:
    """Notes 8-bit products on a chip that computes them no faster than 16-bit ones."""
    products, chip = assembly.experiment.precision.products, assembly.spec.chip
    if products is None or assembly.spec.simulated:
        return []
    if assembly.product_flops > chip.bf16_flops:
        return [INT8_ON_GPUS] if (products.rate, chip.platform) == ("int8", "gpu") else []
    other = {"fp8": ("int8", "Int8Products"), "int8": ("fp8", "Fp8Products")}[products.rate]
    faster = (getattr(chip, f"{other[0]}_flops") or 0) > chip.bf16_flops
    return [
        f"precision.products: {chip.name} multiplies {products.rate} no faster than bf16: operands "
        "are rounded, weights gathered a byte each, and products take the time of bf16's; use "
        + (f"{other[1]}(), whose rate is twice that" if faster else "None for speed")
    ]


def _experts(assembly: Assembly) -> list[str]:
    """Notes experts whose 8-bit products run no faster than 16-bit ones."""
    if assembly.experiment.precision.products is None:
        return []
    blocks = assembly.described.layers
    kernels = (kernel_of(assembly, call) for block in blocks for call in mixtures(block))
    wide = dict.fromkeys(type(k).__name__ for k in kernels if not takes_8_bits(k))
    return [
        f"precision.products: experts' operands are rounded to 8 bits, and their matrices gathered "
        f"so, and {name} multiplies them in 16 bits: their products take the time of bf16's"
        for name in wide
    ]


def _chunks(assembly: Assembly) -> list[str]:
    """Notes a head that computes its logits in far more chunks than their size needs."""
    limit, (rows, seq) = assembly.chunk_tokens, local_rows(assembly)
    chunks, needed = chunk_count(rows * seq, rows, limit), -(-rows * seq // limit)
    if chunks <= MANY * needed:
        return []
    return [
        f"the head makes its logits in {chunks} chunks of {rows * seq // chunks} tokens, where "
        f"{needed} would hold model.chunk_tokens={limit} each: chunks divide data.seq={seq}; use "
        f"seq={seq // needed * needed}, or chunk_tokens={rows * seq} for a single one"
    ]
