"""Low-rank adapters into folders as Hugging Face `peft` reads them (`huggingface.peft`)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from jaxtrain.files.pointer import given_place
from jaxtrain.files.store import AnyPath
from jaxtrain.huggingface.config import family_and_fields
from jaxtrain.huggingface.layout import StoredTensor
from jaxtrain.huggingface.peft import (
    WEIGHTS,
    adapter_tensors,
    base_tensors,
    leaf_of,
    module_of,
    ranks_of,
)
from jaxtrain.huggingface.peft_config import CONFIG, settings_text
from jaxtrain.huggingface.write import Params, params_problems, write_tensors
from jaxtrain.models.adapters import Adapters, adapter_places, is_adapter
from jaxtrain.models.build import abstract_model
from jaxtrain.transformer.decoder import DecoderConfig

NOT_CONVERTED = ("qwen2_moe",)
"""Families with experts whose adapters `peft` does not convert, though it does those of others."""


def write_adapters(
    folder: str | AnyPath,
    model: DecoderConfig,
    params: Params,
    *,
    alpha: float,
    dtype: Any = None,
    base: str = "",
) -> None:
    """Writes the adapters among a model's parameters, in natural layer order with any sharding, as
    a folder for `peft.PeftModel.from_pretrained`.

    alpha: of LoRA. dtype: of the file, None for that of the adapters. base: name of the base
    model's folder, which `peft` may load. The folder is written completely or not at all. All
    processes call this; process 0 writes.

    Raises:
        ValueError: before anything is written: no family has this model, there are no adapters,
            they are not those of this model's matrices, `peft` could not take them, or `folder` is
            there already and not empty. After that, with nothing left behind: process 0 could not
            write, or a weight is beyond float16.
    """
    place = given_place("folder", folder)
    adapters = {path: leaf for path, leaf in params.items() if is_adapter(path)}
    ranks = ranks_of({path: tuple(leaf.shape) for path, leaf in adapters.items()})
    refuse_unwritable_adapters(model, ranks)
    rank = max(ranks.values())
    own = abstract_model(model, adapters=Adapters(rank, 1.0, tuple(ranks))).params
    expected = {path: tuple(leaf.shape) for path, leaf in own.items() if is_adapter(path)}
    if problems := params_problems(adapters, expected, dtype):
        raise ValueError("\n".join(problems))
    stored = base_tensors(model)
    adapted = [tensor for tensor in stored if leaf_of(tensor) in ranks]
    kind = next(iter(adapters.values())).dtype if dtype is None else dtype
    modules, in_out = _target_modules(stored, ranks), not any(t.transposed for t in adapted)
    text = settings_text(rank, alpha, modules, base, in_out)
    tensors = {WEIGHTS: adapter_tensors(stored, ranks)}
    write_tensors(place, tensors, adapters, str(jnp.dtype(kind)), {CONFIG: text})


def refuse_unwritable_adapters(model: DecoderConfig, matrices: Collection[str]) -> None:
    """Raises ValueError where `peft` could not take adapters of these matrices, with each of them,
    or would leave them out without a word.

    It converts the adapters of experts to the fused ones of `transformers` 5 by the last names of
    modules, such as up_proj, and takes all modules of these names for experts (seen in 0.21).
    """
    if not matrices:
        raise ValueError("the model has no adapters to write; export its weights")
    family, base = family_and_fields(model)[0], base_tensors(model)
    places = adapter_places(model.describe())
    names = {piece.leaf: t.name for t in base for piece in t.pieces}
    own = {leaf_of(tensor): _last(tensor) for tensor in base}
    experts = {leaf_of(tensor) for tensor in base if ".experts." in tensor.name}
    ends = {own[path] for path in experts}
    is_converted = family.model_type not in NOT_CONVERTED
    problems = {}
    for path in matrices:
        layer, _, part = path.rpartition(".")
        other = f"{layer}.{'gate' if part == 'up' else 'up'}"
        if path not in places:
            problems[path] = "is no matrix of this model that can have an adapter"
        elif path not in own:
            problems[path] = f"shares {names[path]} with other matrices"
        elif not is_converted and (path in experts or part == "router"):
            problems[path] = f"is of experts, which it does not find in {family.model_type}"
        elif is_converted and path not in experts and own[path] in ends:
            problems[path] = f"is {own[path]}, which it takes for the experts' own"
        elif path in experts and part in ("gate", "up") and other not in matrices:
            problems[path] = f"is fused with {other}, which has no adapter"
    if problems:
        lines = [f"{path} {problem}" for path, problem in problems.items()]
        merged = "leave these out of LoRA(targets=...), or export the weights with adapters merged"
        raise ValueError("\n- ".join(["`peft` could not take these adapters:", *lines, merged]))


def _last(tensor: StoredTensor) -> str:
    return module_of(tensor).rpartition(".")[2]


def _target_modules(base: Sequence[StoredTensor], ranks: Mapping[str, int]) -> list[str]:
    """Returns the adapted modules as `peft` selects them: by the end of their names where all
    modules of that end have an adapter, else by their whole names."""
    adapted: dict[str, list[str]] = {}
    others = set()
    for tensor in base:
        end = ".".join(module_of(tensor).split(".")[-2:])
        if leaf_of(tensor) in ranks:
            adapted.setdefault(end, []).append(module_of(tensor))
        else:
            others.add(end)
    return sorted(
        name for end, names in adapted.items() for name in (names if end in others else [end])
    )
