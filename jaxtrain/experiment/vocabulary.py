"""Classes and functions that a stored experiment may name, by the fields that may hold them.

config.json is data, possibly from an untrusted source. A name in it is looked up among these
objects, which are imported already; it is never imported. Most entries follow from the annotations,
starting at `Experiment`; this file has the entries for open annotations: a protocol, `Any`, a
function.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.attention.blockwise import Blockwise
from jaxtrain.attention.cudnn import Cudnn
from jaxtrain.attention.kernels import PlatformKernel, Reference
from jaxtrain.attention.rotary.scaling import (
    DynamicNtk,
    LinearScaling,
    Llama3Scaling,
    LongRope,
    RopeScaling,
    Yarn,
)
from jaxtrain.attention.splash import Splash, SplashBlocks
from jaxtrain.attention.triton import Triton
from jaxtrain.collectives.algorithm import Algorithm
from jaxtrain.collectives.lax_form import Lax
from jaxtrain.collectives.recursive import Recursive
from jaxtrain.collectives.ring import Ring
from jaxtrain.compression.codecs import Codec, Fp8, Int8, RandomK, Sign, TopK
from jaxtrain.data import (
    BigramChain,
    BpeTokenizer,
    ByteTokenizer,
    Conversations,
    Csv,
    JsonLines,
    Mixture,
    Parquet,
    Preferences,
    RowStream,
    StdlibSource,
    TextData,
    TextFiles,
    TokenFiles,
    TokenizerFile,
)
from jaxtrain.data.row_stream import RowMaker
from jaxtrain.experiment.evaluation import Evaluation
from jaxtrain.experiment.fields import Execution, Experiment, Logging
from jaxtrain.experiment.load import stored_name
from jaxtrain.hopper.attention import FlashAttention
from jaxtrain.moe.block_loop import BlockLoop
from jaxtrain.moe.kernels import PlatformGroupedMatmul
from jaxtrain.moe.layer import Activation
from jaxtrain.moe.megablox import Megablox
from jaxtrain.moe.mosaic_blocks import MosaicBlocks
from jaxtrain.moe.router import Router, SigmoidRouter, SoftmaxRouter
from jaxtrain.moe.triton_blocks import TritonBlocks
from jaxtrain.optim.leaves import LeafMask, everything, hidden_matrices, matrices
from jaxtrain.optim.optimizer import ELEMENTWISE, SHARDED
from jaxtrain.optim.rate import linear_scaling, square_root_scaling
from jaxtrain.optim.schedule import (
    Constant,
    InverseSqrt,
    RateFn,
    RateSchedule,
    WarmupCosine,
    WarmupLinear,
    WarmupStableDecay,
    cosine_decay,
    linear_decay,
    one_minus_sqrt,
)
from jaxtrain.scores import Alibi, RelativeBias, ScoreFunction
from jaxtrain.sources import Source
from jaxtrain.tokenizers import Tokenizer
from jaxtrain.transformer.families import FAMILIES
from jaxtrain.transformer.feed_forward import gelu_exact, gelu_tanh, silu

ANY: dict[tuple[type, str], tuple[Any, ...]] = {
    (Experiment, "model"): FAMILIES,
    (Experiment, "data"): (TextData, BigramChain, RowStream),
    (Experiment, "optimizer"): (*ELEMENTWISE, *SHARDED),
    (Execution, "attention"): (
        *(PlatformKernel, Reference, Blockwise, Cudnn, Triton, Splash, SplashBlocks),
        *(FlashAttention, types.NoneType),
    ),
    (Execution, "grouped_matmul"): (
        *(PlatformGroupedMatmul, BlockLoop, Megablox, TritonBlocks, MosaicBlocks),
        types.NoneType,
    ),
    (Mixture, "parts"): (Source, TokenFiles),
    (Logging, "callbacks"): (),
    (Evaluation, "sets"): (
        *(Source, TokenFiles, Mixture, TextData, BigramChain, RowStream),
        *(str, Path, tuple[str | Path, ...]),
    ),
}
"""Values allowed in fields annotated with `Any`."""

PROTOCOLS: dict[Any, tuple[type, ...]] = {
    Algorithm: (Lax, Ring, Recursive),
    Codec: (Int8, Fp8, Sign, TopK, RandomK),
    RopeScaling: (LinearScaling, Llama3Scaling, Yarn, DynamicNtk, LongRope),
    ScoreFunction: (Alibi, RelativeBias),
    Router: (SoftmaxRouter, SigmoidRouter),
    RateSchedule: (Constant, WarmupCosine, WarmupLinear, WarmupStableDecay, InverseSqrt),
    Source: (StdlibSource, TextFiles, JsonLines, Csv, Parquet, Conversations, Preferences),
    Tokenizer: (ByteTokenizer, BpeTokenizer, TokenizerFile),
}

_OF_JAX = "celu elu gelu leaky_relu mish relu relu6 selu sigmoid silu soft_sign softplus squareplus"
ACTIVATIONS = (
    silu,
    gelu_tanh,
    gelu_exact,
    jnp.tanh,
    *(getattr(jax.nn, n) for n in _OF_JAX.split()),
)
DECAY_SHAPES = (linear_decay, cosine_decay, one_minus_sqrt)

FUNCTIONS: dict[Any, tuple[Callable[..., Any], ...]] = {
    LeafMask: (matrices, hidden_matrices, everything),
    Callable[[float], float]: (linear_scaling, square_root_scaling),
    RateFn: (),
    RowMaker: (),
    Activation: (*ACTIVATIONS, *DECAY_SHAPES),  # both are functions of an array
}

DTYPES = {
    name: dtype
    for name_of_dtype in ("bfloat16", "float16", "float32", "float64")
    for name, dtype in (
        (name_of_dtype, name_of_dtype),  # a text, or a numpy dtype
        (f"jax.numpy:{name_of_dtype}", getattr(jnp, name_of_dtype)),
        (stored_name(np.dtype(name_of_dtype).type), np.dtype(name_of_dtype).type),
    )
}
"""Floating types, by every name under which `config_of` stores one."""

SCALARS = (bool, int, float, str, Path, types.NoneType)


class Slot(NamedTuple):
    """Values that a field, or an item of its tuple, accepts.

    scalars: of `SCALARS`. dataclasses: classes. tuples: for each tuple annotation the slots of its
      items, and True if its one slot repeats. functions: by stored name. dtypes: names of `DTYPES`
      are accepted.
    open: classes and functions outside this library are accepted if their module is trusted.
      anything: a field of such a class, whose annotation is not understood here.
    """

    scalars: tuple[type, ...] = ()
    dataclasses: tuple[type, ...] = ()
    tuples: tuple[tuple[tuple[Slot, ...], bool], ...] = ()
    functions: dict[str, Any] = {}  # noqa: RUF012 (never changed)
    dtypes: bool = False
    open: bool = False
    anything: bool = False


def slot_of(hint: Any, of_any: tuple[Any, ...] | None = None) -> Slot:
    """Returns the slot of an annotation. of_any: values allowed for `Any` in it."""
    if isinstance(hint, tuple) or typing.get_origin(hint) in (typing.Union, types.UnionType):
        members = hint if isinstance(hint, tuple) else typing.get_args(hint)
        if any((typing.get_origin(member) or member) is np.dtype for member in members):
            # `DTypeLike`, a union of all that numpy accepts as a dtype.
            return Slot(dtypes=True, scalars=_only_none(members))
        return _joined([slot_of(member, of_any) for member in members])
    if hint is Any and of_any is not None:
        return slot_of(of_any)._replace(open=True)
    if hint in PROTOCOLS:
        return slot_of(PROTOCOLS[hint])._replace(open=True)
    if hint in FUNCTIONS:
        return Slot(
            functions={stored_name(function): function for function in FUNCTIONS[hint]}, open=True
        )
    if hint in SCALARS:
        return Slot(scalars=(hint,))
    if typing.get_origin(hint) is Mapping:
        return Slot()  # it is stored as pairs
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return Slot(dataclasses=(hint,))
    if typing.get_origin(hint) is tuple:
        items = typing.get_args(hint)
        repeats = items[-1:] == (...,)
        slots = tuple(slot_of(item, of_any) for item in items if item is not ...)
        return Slot(tuples=((slots, repeats),))
    return Slot(anything=True, open=True)


def _only_none(members: tuple[Any, ...]) -> tuple[type, ...]:
    return (types.NoneType,) if types.NoneType in members else ()


def _joined(slots: list[Slot]) -> Slot:
    return Slot(
        scalars=tuple(entry for slot in slots for entry in slot.scalars),
        dataclasses=tuple(entry for slot in slots for entry in slot.dataclasses),
        tuples=tuple(entry for slot in slots for entry in slot.tuples),
        functions={name: entry for slot in slots for name, entry in slot.functions.items()},
        dtypes=any(slot.dtypes for slot in slots),
        open=any(slot.open for slot in slots),
        anything=any(slot.anything for slot in slots),
    )


@lru_cache(maxsize=256)
def slots_of(kind: type) -> dict[str, Slot]:
    """Returns the slots of a dataclass's init fields, by name."""
    hints = typing.get_type_hints(kind)
    names = [field.name for field in dataclasses.fields(kind) if field.init]
    return {name: slot_of(hints[name], ANY.get((kind, name))) for name in names}


def _reached(kind: type, classes: dict[str, type]) -> dict[str, type]:
    """Adds to `classes` a dataclass of this library and all that its fields may hold, by stored
    name."""
    if stored_name(kind) not in classes:
        classes[stored_name(kind)] = kind
        for name, slot in slots_of(kind).items():
            assert not _unknown(slot), f"{kind.__qualname__}.{name}: say in this file what it holds"
            for inner in _held(slot):
                _reached(inner, classes)
    return classes


def _held(slot: Slot) -> list[type]:
    items = [item for items, _ in slot.tuples for item in items]
    return [*slot.dataclasses, *(kind for item in items for kind in _held(item))]


def _unknown(slot: Slot) -> bool:
    return slot.anything or any(_unknown(item) for items, _ in slot.tuples for item in items)


CLASSES = _reached(Experiment, {})
"""Dataclasses of this library that an experiment may hold, by their name in config.json."""
