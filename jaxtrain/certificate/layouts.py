"""Lists the layouts that a certificate runs, and converts an experiment to each of them."""

from __future__ import annotations

import math
from collections.abc import Set
from dataclasses import replace
from functools import cache, partial
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
from jaxtrain.collectives.ring import Ring
from jaxtrain.collectives.rows import Padded
from jaxtrain.compression.reducer import ExactReducer
from jaxtrain.context.choice import Method
from jaxtrain.context.methods import GatheredKeys, RingAttention, TwoLevel, Ulysses
from jaxtrain.experiment import Execution, Experiment
from jaxtrain.experiment.tuning import adapters_of
from jaxtrain.mesh.sharding import ShardingRules, data_parallel, fsdp, tensor, zero1, zero2
from jaxtrain.models.layered import description_of
from jaxtrain.nn.stack import LayerLoop
from jaxtrain.optim.elementwise import SGD
from jaxtrain.optim.precision import Precision, bf16, fp32
from jaxtrain.pipeline.config import Pipeline


class Layout(NamedTuple):
    """A mesh and every other option that must not change the run."""

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
    """Periods of layers; None: as many as a small model has."""
    activation: str = "own"
    context: str = "own"

    def __str__(self) -> str:
        sizes = " x ".join(f"{a}={n}" for a, n in self.axes if n > 1) or "one device"
        defaults = {"axes": self.axes, "pipeline": "none", "periods": None}
        defaults |= {"activation": "own", "context": "own"}
        options = (f"{k}={v}" for k, v in self._asdict().items() if v != defaults.get(k, ...))
        return f"{sizes}: {' '.join(options)}"

    @property
    def narrow(self) -> bool:
        """True if products are in 8 bits, as in the experiment."""
        return self.precision.endswith(NARROW)

    @property
    def dtype(self) -> str:
        """Compute dtype."""
        return jnp.dtype(PRECISIONS[self.precision.removesuffix(NARROW)].compute).name

    def reference(self, *, balanced: bool = False) -> Layout:
        """Returns the one-device layout whose run must equal this layout's run. It has one
        microbatch; it keeps this layout's number of microbatches if the result depends on it: with
        dropout (masks differ by microbatch), with products in 8 bits (scales differ), or if experts
        are `balanced` by the loads of one microbatch."""
        by_microbatch = bool(self.dropout) or balanced or self.narrow
        plain = Layout((("data", 1),), microbatches=self.microbatches if by_microbatch else 1)
        return plain._replace(**{name: getattr(self, name) for name in SEMANTIC})


SEMANTIC = ("packing", "dropout", "precision", "optimizer", "periods", "activation")
"""Fields that change the result; the other fields must not."""

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
    """Execution mode, collectives and reducer; with gspmd XLA chooses its own collectives."""

    name: str
    collectives: Collectives | None
    reducer: ExactReducer = Lax()
    reduce_layers: bool = False
    expert_chunk: int | None = None


def _explicit(algorithm: Lax | Ring | Recursive, reducer: ExactReducer) -> Mode:
    return Mode("explicit", Collectives(algorithm, algorithm, None, Padded(algorithm)), reducer)


MODES: dict[str, Mode] = {
    "explicit": _explicit(Lax(), Lax()),
    # Weights' gradients are scattered within the products that compute them, too.
    "explicit, ring": Mode("explicit", Collectives(Ring(), Ring(), Ring(), Padded(Ring())), Ring()),
    "explicit, ring looped, layer by layer": _explicit(
        Ring(1, unroll=False), Ring(1, unroll=False)
    )._replace(reduce_layers=True),
    # Rows of experts travel beside products of other chunks.
    "explicit, recursive": _explicit(Recursive(), Recursive())._replace(expert_chunk=16),
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
SGD_RATE, AVERAGES_DECAY = 0.5, 0.9
"""Of "SGD, averages". A step of SGD is linear in the gradient, so gradients can be compared in
every step. Adam and similar optimizers turn rounding into a full step if a gradient is near
zero."""
OPTIMIZERS = ("own", "SGD, averages")


def steep(x: jax.Array) -> jax.Array:
    """SiLU without a derivative at zero: an idle or padding slot of a pipeline that computes on
    zeros turns every gradient that it reaches into nan."""
    return jax.nn.silu(x) + 1e-8 * jnp.sign(x) * jnp.sqrt(jnp.abs(x))


CONTEXTS: dict[str, Method | None] = {
    "own": None,
    "ring, zig-zag": RingAttention(),
    "ring, in order": RingAttention(zigzag=False),
    "gathered keys": GatheredKeys(),
    "heads": Ulysses(),
    "two levels": TwoLevel(2),
}
"""Methods for split rows; "own" is the experiment's, or the mesh's choice."""
ACTIVATIONS = {"own": None, "steep at zero": steep}
SMOOTH = jax.nn.silu
"""Takes the place of an activation whose derivative jumps. Of 10^7 values one is rounded to the
other side of the jump in fp32, about one a certificate, and a unit's gradient is another then."""
PRECISIONS: dict[str, Precision] = {"fp32": fp32, "bf16": bf16}
NARROW = ", 8 bits"
"""Follows the name of a precision whose products are those of the experiment, in 8 bits."""
MESHES = (
    {"data": 2, "fsdp": 2, "tensor": 2},
    {"replica": 2, "data": 4},
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
"""Meshes on which every method for split rows runs."""
EXPERTS = (
    {"data": 2, "fsdp": 2, "tensor": 2},
    {"data": 2, "expert": 2, "tensor": 2},
    {"fsdp": 2, "expert": 2, "context": 2},
    {"expert": 8},
    {"replica": 2, "tensor": 4},
)
STAGED_EXPERTS = (
    {"fsdp": 2, "stage": 2, "tensor": 2},
    {"data": 2, "stage": 4},
    {"stage": 8},
    {"stage": 4, "expert": 2},
)
"""Meshes of models with experts. They are few, because their programs are the largest."""
EXTRA = ({"fsdp": 2, "stage": 2, "context": 2},)
"""Meshes that such a model runs on once, for two mesh axes that no other mesh combines."""
USUAL = ("dropout", "precision", "activation", "packing", "periods", "microbatches")
"""Options whose first value is the cheapest to compile, or gives many layouts one reference."""


def layouts(
    devices: int,
    selection: str,
    *,
    experts: bool = False,
    context: bool = True,
    narrow: bool = False,
    adapters: bool = False,
) -> tuple[list[Layout], int]:
    """Returns the layouts of `quick` or `all`, and their closed count. Without `context` no layout
    splits rows. narrow: products are in 8 bits. adapters: matrices have some.

    quick: a pairwise covering array of meshes without stages, one of meshes with stages, and one of
      methods for split rows. The mesh axis `expert` is on meshes of models with `experts` only; for
      others it equals `fsdp`. all: also every factorisation of `devices`, devices / 2, .. 1 in each
      mode of EVERYWHERE. Raises ValueError on another word.
    """
    if selection not in ("quick", "all"):
        raise ValueError(f"layouts={selection!r}; use 'quick' or 'all'")
    axes = tuple(axis for axis in AXES if context or axis != "context")
    pairwise = [*_pairwise(devices, experts, context, narrow, adapters)]
    if selection == "quick":
        return pairwise, len(pairwise)
    sizes = [n for n in range(devices, 0, -1) if devices % n == 0]
    plain = [
        _named(_plain(mesh, mode), narrow)
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
def _pairwise(
    devices: int, experts: bool, context: bool, narrow: bool, adapters: bool
) -> tuple[Layout, ...]:
    """Returns the layouts of `quick`."""
    meshes, staged_meshes = (EXPERTS, STAGED_EXPERTS) if experts else (MESHES, STAGED)
    without = {axis for axis, has in (("expert", experts), ("context", context)) if not has}
    every = factorisations(devices, [axis for axis in AXES if axis not in without])
    fitting = partial(_fitting, devices=devices, without=without)
    arrays = [_options(fitting(meshes) or [m for m in every if m["stage"] == 1])]
    if devices > 1:
        staged = fitting(staged_meshes) or [m for m in every if m["stage"] > 1]
        arrays.append(_staged_options(staged))
        # A steep activation has no derivative at zero: rows of experts are padded with zeros;
        # products in 8 bits may be zero, and in bf16 the sum of a product and an adapter's (a few
        # of 1,000, rounded to 2^-8).
        if experts or narrow or adapters:
            del arrays[-1]["activation"]
    if devices > 1 and context:
        cut = fitting(CUT) or [m for m in every if m["context"] == devices]
        arrays.append(_cut_options(cut))
    pairwise = [
        Layout(**row)
        for options in arrays
        for row in covering_array(options, _cost, [name for name in USUAL if name in options])
    ]
    extra = fitting(EXTRA) if experts else []
    every_layout = (*pairwise, *(_plain(mesh, "explicit") for mesh in extra))
    return tuple(_named(layout, narrow) for layout in every_layout)


def _named(layout: Layout, narrow: bool) -> Layout:
    """Returns the layout with products in 8 bits, if `narrow`."""
    return layout._replace(precision=layout.precision + NARROW) if narrow else layout


def _cost(rows: list[dict[str, Any]]) -> tuple[int, int]:
    """Number of programs: of layouts, and of the references that they need."""
    return len(rows), len({Layout(**row).reference(balanced=True) for row in rows})


def _plain(axes: dict[str, int], mode: str) -> Layout:
    layout = Layout(tuple(axes.items()), mode=mode)
    staged = axes["stage"] > 1
    return layout._replace(pipeline="1F1B", microbatches=4, periods=4) if staged else layout


def _fitting(
    meshes: tuple[dict[str, int], ...], *, devices: int, without: Set[str]
) -> list[dict[str, int]]:
    """Returns the meshes of so many devices that have none of the axes in `without`."""
    return [
        mesh for mesh in meshes if math.prod(mesh.values()) == devices and without.isdisjoint(mesh)
    ]


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
    """Returns the options that affect attention, or the order of tokens."""
    divides = all(mesh["context"] % 2 == 0 for mesh in meshes)  # groups of two levels
    methods = [name for name in CONTEXTS if name != "own" and (divides or name != "two levels")]
    return {
        "axes": [tuple(m.items()) for m in meshes],
        "context": methods,
        "loop": ["unrolled, remat none", "scanned, remat dots_and_attention"],
        "packing": [True, False],
        "dropout": [0.0, 0.1],
        "precision": list(PRECISIONS),
    }


def _optimizer(layout: Layout, experiment: Experiment) -> tuple[Any, float | None]:
    """Returns the optimizer and the decay of averaged weights."""
    if layout.optimizer == "own":
        return experiment.optimizer, experiment.ema_decay
    adapters, _ = adapters_of(experiment.lora, description_of(experiment.model))
    # Both an adapter's gradient and its product have the scale.
    scale = 1.0 if adapters is None else max(1.0, adapters.scale)
    return SGD(SGD_RATE / scale**2, momentum=0.9, weight_decay=0.1), AVERAGES_DECAY


def _precision(layout: Layout, own: Precision) -> Precision:
    """own: of the experiment, whose products are kept where they are in 8 bits."""
    precision = PRECISIONS[layout.precision.removesuffix(NARROW)]
    return replace(precision, products=own.products) if layout.narrow else precision


def experiment_on(experiment: Experiment, layout: Layout) -> Experiment:
    """Returns the experiment as this layout runs it."""
    e, mode, model = experiment, MODES[layout.mode], experiment.model
    data = e.data
    if hasattr(data, "isolate_documents") and e.objective is None:
        data = replace(data, isolate_documents=layout.packing)
    if hasattr(model, "varied"):
        kept_tokens, batch = None, e.batch_sizes[-1]
        activation = ACTIVATIONS[layout.activation]
        if activation is None and getattr(model, "kinked", False):
            activation = SMOOTH
        if model.describe().expert_calls:
            data, kept_tokens = Numbered(data, batch), batch * data.seq
        model = model.varied(
            dropout=layout.dropout,
            activation=activation,
            periods=layout.periods,
            kept_routing=kept_tokens,
        )
    explicit = mode.name == "explicit"
    optimizer, ema_decay = _optimizer(layout, e)
    return replace(
        e,
        model=model,
        optimizer=optimizer,
        ema_decay=ema_decay,
        data=data,
        microbatches=layout.microbatches,
        precision=_precision(layout, e.precision),
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
            # In 8 bits each chunk would have its own scale, which is refused.
            expert_chunk=None if layout.narrow else mode.expert_chunk,
        ),
    )
