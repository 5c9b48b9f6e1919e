"""Which layouts a certificate runs, and an experiment as each of them runs it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxtrain.certificate.covering import (
    AXES,
    covering_array,
    factorisation_count,
    factorisations,
)
from jaxtrain.certificate.routing import Numbered
from jaxtrain.collectives.choice import Collectives
from jaxtrain.collectives.hierarchical import Hierarchical
from jaxtrain.collectives.lax_form import Lax
from jaxtrain.collectives.recursive import Recursive
from jaxtrain.collectives.reducer import ExactReducer
from jaxtrain.collectives.ring import Ring
from jaxtrain.context.choice import Method
from jaxtrain.context.methods import GatheredKeys, RingAttention, TwoLevel, Ulysses
from jaxtrain.experiment import Execution, Experiment
from jaxtrain.mesh.sharding import ShardingRules, data_parallel, fsdp, tensor, zero1, zero2
from jaxtrain.nn.stack import LayerLoop
from jaxtrain.optim.elementwise import SGD
from jaxtrain.optim.precision import Precision, bf16, fp32
from jaxtrain.pipeline.config import Pipeline
from jaxtrain.validation.batch import batch_sizes


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
    context: str = "own"

    def __str__(self) -> str:
        sizes = " x ".join(f"{a}={n}" for a, n in self.axes if n > 1) or "one device"
        unsaid = {"axes": self.axes, "pipeline": "none", "periods": None}
        unsaid |= {"activation": "own", "context": "own"}
        rest = (f"{k}={v}" for k, v in self._asdict().items() if v != unsaid.get(k, ...))
        return f"{sizes}: {' '.join(rest)}"

    def reference(self, *, balanced: bool = False) -> Layout:
        """The one-device run it must equal: in one microbatch, but with dropout, whose masks are
        those of a microbatch, and where experts are `balanced` by the loads of one."""
        alike = bool(self.dropout) or balanced
        plain = Layout((("data", 1),), microbatches=self.microbatches if alike else 1)
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


CONTEXTS: dict[str, Method | None] = {
    "own": None,
    "ring, zig-zag": RingAttention(),
    "ring, in order": RingAttention(zigzag=False),
    "gathered keys": GatheredKeys(),
    "heads": Ulysses(),
    "two levels": TwoLevel(2),
}
"""Methods for rows that are cut; of its own the experiment has one, or the mesh chooses."""
ACTIVATIONS = {"own": None, "steep at zero": steep}
PRECISIONS: dict[str, Precision] = {"fp32": fp32, "bf16": bf16}
MESHES = (
    {"data": 2, "fsdp": 2, "tensor": 2},
    {"data": 8},
    {"fsdp": 8},
    {"tensor": 8},
    {"data": 2, "context": 4},
)
STAGED = (
    {"fsdp": 2, "stage": 2, "tensor": 2},
    {"data": 2, "stage": 4},
    {"stage": 8},
    {"fsdp": 2, "stage": 2, "context": 2},
)
CUT = ({"fsdp": 2, "context": 4}, {"data": 2, "context": 2, "tensor": 2})
"""Meshes on which every method for cut rows is met."""
EXPERTS = (
    {"data": 2, "fsdp": 2, "tensor": 2},
    {"data": 2, "expert": 2, "tensor": 2},
    {"fsdp": 2, "expert": 2, "context": 2},
    {"expert": 8},
    {"tensor": 8},
)
STAGED_EXPERTS = (
    {"fsdp": 2, "stage": 2, "tensor": 2},
    {"data": 2, "stage": 4},
    {"stage": 8},
    {"stage": 4, "expert": 2},
)
"""Meshes of models that have experts, whose programs are the largest: few."""
BESIDE = ({"fsdp": 2, "stage": 2, "context": 2},)
"""Meshes that such a model is run on once, for two mesh axes that stand together on no other."""
USUAL = ("dropout", "precision", "activation", "packing", "periods", "microbatches")
"""Options whose first value is the cheapest to compile, or gives many layouts one reference."""


def layouts(
    devices: int, which: str, *, experts: bool = False, context: bool = True
) -> tuple[list[Layout], int]:
    """The layouts of `quick` or `all`, and their closed count; without the mesh axis `context` of a
    model whose rows cannot be cut.

    quick: a pairwise covering array of meshes without stages, one of meshes with, and one of
    methods for rows that are cut; `expert`, which for others is what `fsdp` is, among the meshes of
    a model that has `experts`. all: also every factorisation of `devices`, devices / 2, .. 1 in
    each mode of EVERYWHERE. Raises ValueError on another word.
    """
    if which not in ("quick", "all"):
        raise ValueError(f"layouts={which!r}; use 'quick' or 'all'")
    axes = tuple(axis for axis in AXES if context or axis != "context")
    pairwise = [*_pairwise(devices, experts, context)]
    if which == "quick":
        return pairwise, len(pairwise)
    sizes = [n for n in range(devices, 0, -1) if devices % n == 0]
    plain = [
        _plain(mesh, mode)
        for n in sizes
        for mesh in factorisations(n, axes)
        for mode in EVERYWHERE
        if mode != "gspmd" or mesh["stage"] == 1
    ]
    unstaged = sum(factorisation_count(n, len(axes) - 1) for n in sizes)
    staged = sum(factorisation_count(n, len(axes)) for n in sizes) - unstaged
    count = len(EVERYWHERE) * unstaged + (len(EVERYWHERE) - 1) * staged
    return plain + pairwise, count + len(pairwise)


@cache
def _pairwise(devices: int, experts: bool, context: bool) -> tuple[Layout, ...]:
    """Those of `quick`."""
    meshes, staged_meshes = (EXPERTS, STAGED_EXPERTS) if experts else (MESHES, STAGED)
    has = {"expert": experts, "context": context}
    every = factorisations(devices, [axis for axis in AXES if has.get(axis, True)])
    arrays = [_options(_fitting(meshes, every) or [m for m in every if m["stage"] == 1])]
    if devices > 1:
        staged = _fitting(staged_meshes, every) or [m for m in every if m["stage"] > 1]
        arrays.append(_staged_options(staged))
        if experts:  # whose rows are padded with zeros, where a steep activation has no derivative
            del arrays[-1]["activation"]
    if devices > 1 and context:
        cut = _fitting(CUT, every) or [m for m in every if m["context"] == devices]
        arrays.append(_cut_options(cut))
    found = [
        Layout(**row)
        for options in arrays
        for row in covering_array(options, _cost, [name for name in USUAL if name in options])
    ]
    beside = _fitting(BESIDE, every) if experts else []
    return (*found, *(_plain(mesh, "explicit") for mesh in beside))


def _cost(rows: list[dict[str, Any]]) -> tuple[int, int]:
    """Programs: of layouts, and of the references that they need."""
    return len(rows), len({Layout(**row).reference(balanced=True) for row in rows})


def _plain(axes: dict[str, int], mode: str) -> Layout:
    layout = Layout(tuple(axes.items()), mode=mode)
    staged = axes["stage"] > 1
    return layout._replace(pipeline="1F1B", microbatches=4, periods=4) if staged else layout


def _fitting(
    meshes: tuple[dict[str, int], ...], every: list[dict[str, int]]
) -> list[dict[str, int]]:
    """Those that are among all meshes of so many devices, written without axes of size 1."""
    known = [{axis: n for axis, n in mesh.items() if n > 1} for mesh in every]
    return [mesh for mesh in meshes if mesh in known]


def _options(meshes: list[dict[str, int]]) -> dict[str, list[Any]]:
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


def _staged_options(meshes: list[dict[str, int]]) -> dict[str, list[Any]]:
    return _options(meshes) | {
        "pipeline": [name for name in PIPELINES if name != "none"],
        "mode": list(IN_PIPELINES),
        "microbatches": [4, 2],
        "periods": [4, 3],
        "activation": list(ACTIVATIONS),
    }


def _cut_options(meshes: list[dict[str, int]]) -> dict[str, list[Any]]:
    """What else touches attention, or the order of tokens."""
    whole = all(mesh["context"] % 2 == 0 for mesh in meshes)  # groups of two levels
    methods = [name for name in CONTEXTS if name != "own" and (whole or name != "two levels")]
    return {
        "axes": [tuple(m.items()) for m in meshes],
        "context": methods,
        "loop": ["unrolled, remat none", "scanned, remat dots_and_attention"],
        "packing": [True, False],
        "dropout": [0.0, 0.1],
        "precision": list(PRECISIONS),
    }


def experiment_on(experiment: Experiment, layout: Layout) -> Experiment:
    """The experiment as this layout runs it."""
    e, mode, model = experiment, MODES[layout.mode], experiment.model
    data = e.data
    if hasattr(data, "isolate_documents"):
        data = replace(data, isolate_documents=layout.packing)
    if hasattr(model, "varied"):
        kept, batch = None, batch_sizes(e.batch)[-1]
        if model.describe().expert_calls:
            data, kept = Numbered(data, batch), batch * data.seq
        model = model.varied(
            dropout=layout.dropout,
            activation=ACTIVATIONS[layout.activation],
            periods=layout.periods,
            kept_routing=kept,
        )
    explicit = mode.name == "explicit"
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
            context=CONTEXTS[layout.context] or (e.execution.context if explicit else None),
        ),
    )
