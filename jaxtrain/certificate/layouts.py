"""Which layouts a certificate runs, and an experiment as each of them runs it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.certificate.covering import covering_array, factorisation_count, factorisations
from jaxtrain.collectives.choice import Collectives
from jaxtrain.collectives.hierarchical import Hierarchical
from jaxtrain.collectives.lax_form import Lax
from jaxtrain.collectives.recursive import Recursive
from jaxtrain.collectives.reducer import ExactReducer
from jaxtrain.collectives.ring import Ring
from jaxtrain.experiment import Execution, Experiment
from jaxtrain.mesh.sharding import ShardingRules, data_parallel, fsdp, tensor, zero1, zero2
from jaxtrain.nn.stack import LayerLoop
from jaxtrain.optim.elementwise import SGD
from jaxtrain.optim.precision import Precision, bf16, fp32
from jaxtrain.pipeline.config import Pipeline


class Layout(NamedTuple):
    """A mesh and every other choice that must not change the run."""

    axes: tuple[tuple[str, int], ...]
    mode: str = "explicit"
    sharding: str = "fsdp"
    microbatches: int = 2
    packing: bool = True
    loop: str = "unrolled, remat none"
    dropout: float = 0.0
    precision: str = "fp32"
    optimizer: str = "own"
    pipeline: str = "none"
    periods: int | None = None
    """Of layers; None: as many as a small model has."""
    activation: str = "own"

    def __str__(self) -> str:
        sizes = " x ".join(f"{a}={n}" for a, n in self.axes if n > 1) or "one device"
        unsaid = {"axes": self.axes, "pipeline": "none", "periods": None, "activation": "own"}
        rest = (f"{k}={v}" for k, v in self._asdict().items() if v != unsaid.get(k, ...))
        return f"{sizes}: {' '.join(rest)}"

    def reference(self) -> Layout:
        """The one-device run it must equal: in one microbatch, but with dropout, whose masks are
        those of a microbatch."""
        plain = Layout((("data", 1),), microbatches=self.microbatches if self.dropout else 1)
        return plain._replace(**{name: getattr(self, name) for name in SEMANTIC})


SEMANTIC = ("packing", "dropout", "precision", "optimizer", "periods", "activation")
"""Fields that change what is computed; the others may not."""

SHARDING: dict[str, ShardingRules] = {
    "fsdp": fsdp() | tensor(),
    "zero1": zero1() | tensor(),
    "zero2": zero2() | tensor(),
    "data parallel": data_parallel() | tensor(),
    "fsdp, reduced once": (fsdp() | tensor()).whole_until_update(),
}
LOOPS: dict[str, LayerLoop] = {
    "unrolled, remat none": LayerLoop(unroll=True, remat="none"),
    "scanned, prefetch, remat full": LayerLoop(unroll=False, remat="full"),
    "scanned, prefetch, kept weights": LayerLoop(
        unroll=False, remat="dots", reshard_after_forward=False
    ),
    "scanned, remat dots_and_attention": LayerLoop(
        unroll=False, remat="dots_and_attention", prefetch=False
    ),
}


class Mode(NamedTuple):
    """Who communicates, and by what; gspmd chooses itself."""

    name: str
    collectives: Collectives | None
    reducer: ExactReducer = Lax()
    reduce_layers: bool = False


def _explicit(by: Lax | Ring | Recursive, reducer: ExactReducer) -> Mode:
    return Mode("explicit", Collectives(by, by), reducer)


MODES: dict[str, Mode] = {
    "explicit": _explicit(Lax(), Lax()),
    # Weights' gradients, too, are scattered by the products that make them.
    "explicit, ring": Mode("explicit", Collectives(Ring(), Ring(), Ring()), Ring()),
    "explicit, ring looped, layer by layer": _explicit(
        Ring(1, unroll=False), Ring(1, unroll=False)
    )._replace(reduce_layers=True),
    "explicit, recursive": _explicit(Recursive(), Recursive()),
    "explicit, hierarchical sums": _explicit(Lax(), Hierarchical(slow=Ring(), fast=Lax())),
    "gspmd": Mode("gspmd", None),
}
EVERYWHERE = ("explicit", "explicit, ring", "gspmd")
"""Modes in which `all` runs every factorisation; `gspmd` has no pipelines."""
PIPELINES: dict[str, Pipeline] = {
    "none": Pipeline(),
    "1F1B": Pipeline("one_f_one_b"),
    "GPipe, residuals": Pipeline("gpipe", save="residuals"),
    "interleaved": Pipeline("interleaved", chunks=2),
    "zero bubble": Pipeline("zero_bubble"),
    "zero bubble, 2 chunks, residuals": Pipeline("zero_bubble", chunks=2, save="residuals"),
}
IN_PIPELINES = ("explicit", "explicit, ring", "explicit, recursive")
"""Modes of the pipelines' pairwise array."""
SGD_AND_AVERAGES = SGD(0.5, momentum=0.9, weight_decay=0.1), 0.9
"""An optimizer and a decay of averaged weights. What a step makes of a gradient is linear in it, so
that gradients can be compared in every step; those of Adam's kind make a whole step of rounding
where a gradient is near zero."""
OPTIMIZERS = {"own": None, "SGD, averages": SGD_AND_AVERAGES}


def steep(x: jax.Array) -> jax.Array:
    """SiLU but for its derivative at zero, which is none: an idle or a padding slot of a pipeline
    that works on zeros makes every gradient it gets into not a number."""
    return jax.nn.silu(x) + 1e-8 * jnp.sign(x) * jnp.sqrt(jnp.abs(x))


ACTIVATIONS = {"own": None, "steep at zero": steep}
PRECISIONS: dict[str, Precision] = {"fp32": fp32, "bf16": bf16}
MESHES = (
    {"data": 2, "fsdp": 2, "tensor": 2},
    {"data": 8},
    {"fsdp": 8},
    {"tensor": 8},
    {"fsdp": 4, "tensor": 2},
    {"data": 2, "fsdp": 4},
    {"data": 2, "tensor": 4},
)
STAGED = (
    {"fsdp": 2, "stage": 2, "tensor": 2},
    {"data": 2, "stage": 4},
    {"stage": 8},
    {"data": 2, "fsdp": 2, "stage": 2},
)


def layouts(devices: int, which: str) -> tuple[list[Layout], int]:
    """The layouts of `quick` or `all`, and their closed count.

    quick: a pairwise covering array of meshes without stages, and one of meshes with. all: also
    every factorisation of `devices`, devices / 2, .. 1 in each mode of EVERYWHERE. Raises
    ValueError on another word.
    """
    if which not in ("quick", "all"):
        raise ValueError(f"layouts={which!r}; use 'quick' or 'all'")
    arrays = [_options(devices, _fitting(MESHES, devices))]
    if devices > 1:
        arrays.append(_staged_options(devices, _fitting(STAGED, devices)))
    pairwise = [Layout(**row) for options in arrays for row in covering_array(options)]
    if which == "quick":
        return pairwise, len(pairwise)
    sizes = [n for n in range(devices, 0, -1) if devices % n == 0]
    every = [
        _plain(axes, mode)
        for n in sizes
        for axes in factorisations(n)
        for mode in EVERYWHERE
        if mode != "gspmd" or axes["stage"] == 1
    ]
    unstaged = sum(factorisation_count(n, 3) for n in sizes)
    staged = sum(factorisation_count(n, 4) for n in sizes) - unstaged
    count = len(EVERYWHERE) * unstaged + (len(EVERYWHERE) - 1) * staged
    return every + pairwise, count + len(pairwise)


def _plain(axes: dict[str, int], mode: str) -> Layout:
    layout = Layout(tuple(axes.items()), mode=mode)
    staged = axes["stage"] > 1
    return layout._replace(pipeline="1F1B", microbatches=4, periods=4) if staged else layout


def _fitting(meshes: tuple[dict[str, int], ...], devices: int) -> list[dict[str, int]]:
    return [m for m in meshes if int(np.prod(list(m.values()))) == devices]


def _options(devices: int, meshes: list[dict[str, int]]) -> dict[str, list[Any]]:
    meshes = meshes or [m for m in factorisations(devices) if m["stage"] == 1]
    return {
        "axes": [tuple(m.items()) for m in meshes],
        "sharding": list(SHARDING),
        "mode": list(MODES),
        "loop": list(LOOPS),
        "packing": [True, False],
        "microbatches": [2, 1],
        "dropout": [0.0, 0.1],
        "precision": list(PRECISIONS),
        "optimizer": list(OPTIMIZERS),
    }


def _staged_options(devices: int, meshes: list[dict[str, int]]) -> dict[str, list[Any]]:
    meshes = meshes or [m for m in factorisations(devices) if m["stage"] > 1]
    return _options(devices, meshes) | {
        "pipeline": [name for name in PIPELINES if name != "none"],
        "mode": list(IN_PIPELINES),
        "microbatches": [4, 2],
        "periods": [4, 3],
        "activation": list(ACTIVATIONS),
    }


def experiment_on(experiment: Experiment, layout: Layout) -> Experiment:
    """The experiment as this layout runs it."""
    e, mode, model = experiment, MODES[layout.mode], experiment.model
    if hasattr(model, "varied"):
        # In bf16 a token that is near a tie takes another expert where rounding falls another way,
        # and no bound holds for what becomes of it: there all experts take all tokens.
        model = model.varied(
            dropout=layout.dropout,
            activation=ACTIVATIONS[layout.activation],
            periods=layout.periods,
            every_expert=layout.precision != "fp32",
        )
    data = e.data
    if hasattr(data, "isolate_documents"):
        data = replace(data, isolate_documents=layout.packing)
    optimizer, ema_decay = OPTIMIZERS[layout.optimizer] or (e.optimizer, e.ema_decay)
    return replace(
        e,
        model=model,
        optimizer=optimizer,
        ema_decay=ema_decay,
        data=data,
        microbatches=layout.microbatches,
        precision=PRECISIONS[layout.precision],
        sharding=SHARDING[layout.sharding],
        execution=Execution(
            mode.name,
            LOOPS[layout.loop],
            e.execution.attention,
            e.execution.grouped_matmul,
            mode.collectives,
            reducer=mode.reducer,
            reduce_layers=mode.reduce_layers,
            pipeline=PIPELINES[layout.pipeline],
        ),
    )
