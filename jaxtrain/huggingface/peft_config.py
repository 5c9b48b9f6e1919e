"""adapter_config.json: what a folder of `peft` says of its adapters."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jaxtrain.files.folder import file_of
from jaxtrain.files.json_text import parse_json
from jaxtrain.files.opened import OpenedFolder
from jaxtrain.files.pointer import CHECKPOINTS, POINTER
from jaxtrain.files.regular import read_text
from jaxtrain.files.store import AnyPath
from jaxtrain.violations import count, positive

CONFIG = "adapter_config.json"

ALLOWED: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_rslora": (False, True, None),
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),  # others change w
}
"""Values under which alpha / rank A B is all that a folder adds to the model, the usual first."""
IGNORED = frozenset(
    (
        *("r", "lora_alpha", "lora_dropout", "target_modules", "exclude_modules"),
        *("layers_to_transform", "layers_pattern", "fan_in_fan_out", "inference_mode"),
        *("task_type", "peft_version", "auto_mapping", "base_model_name_or_path", "revision"),
        *("eva_config", "qalora_group_size", "megatron_config", "megatron_core"),
        *("runtime_config", "ensure_weight_tying"),
    )
)
"""Fields that are read elsewhere, or change no result: which matrices have adapters is seen by the
tensors. Any other field must be empty or False, for it may change what is computed."""
MERGE = (
    "for other adapters merge them by `peft` (merge_and_unload), save that model, and begin with "
    "its folder: FromHuggingFace(folder)"
)


def read_settings(folder: OpenedFolder) -> tuple[int, float]:
    """Returns rank and alpha. Raises ValueError where a folder has no adapters, or adds something
    else to the model than alpha / rank A B: with every such field."""
    place = folder.place
    if not (folder.here / CONFIG).is_file():
        raise ValueError(f"{place} has no {CONFIG}: {_what_it_is(folder.here)}")
    try:
        fields = parse_json(read_text(file_of(folder.here, CONFIG)))
    except (OSError, ValueError) as error:
        raise ValueError(f"{place / CONFIG} cannot be read: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{place / CONFIG} holds a {type(fields).__name__}; use an object")
    rank: Any = fields.get("r")
    alpha: Any = fields.get("lora_alpha")
    problems = [
        f"{name}={fields.get(name)!r}; a plain LoRA has {values[0]!r}"
        for name, values in ALLOWED.items()
        if fields.get(name) not in values
    ]
    problems += [
        f"{name}={value!r} is not known here; a plain LoRA has none"
        for name, value in fields.items()
        if value and name not in ALLOWED and name not in IGNORED
    ]
    numbers = count("r", rank, 1) + positive("lora_alpha", alpha)
    if problems or numbers:
        raise refusal(place, [*problems, *numbers], MERGE if problems else "")
    # `use_rslora`: scaled by alpha / sqrt(rank) (Kalajdzievski 2023).
    return rank, float(alpha) * (math.sqrt(rank) if fields.get("use_rslora") else 1.0)


def settings_text(rank: int, alpha: float, modules: list[str], base: str, in_out: bool) -> str:
    """Returns adapter_config.json of adapters of these modules. base: the base model's folder or
    name. in_out: True if its matrices lie as [in, out]."""
    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base or None,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": modules,
        "fan_in_fan_out": in_out,
        "inference_mode": True,
        "init_lora_weights": True,
    }
    return json.dumps(fields, indent=2, sort_keys=True) + "\n"


def refusal(folder: AnyPath, problems: Iterable[str], *remedies: str) -> ValueError:
    """Returns the error that names ten problems of a folder, and what helps."""
    lines = [*problems]
    more = [f"and {len(lines) - 10:,} more of such lines"] if len(lines) > 10 else []
    lines = [*lines[:10], *more, *filter(None, remedies)]
    return ValueError(
        "\n- ".join([f"{folder} has no adapters that go on with this model:", *lines])
    )


def _what_it_is(folder: Path) -> str:
    """Returns what a folder without adapters is, and what to use."""
    if not folder.is_dir():
        return "there is no such folder"
    is_copy = (folder / POINTER).is_file() or '"experiment"' in _text(folder / "config.json")
    if (folder / CHECKPOINTS).is_dir() or is_copy:
        return (
            "it is a run; `jaxtrain export RUN --adapters --out FOLDER` writes its adapters, and "
            "FromRun(run_dir) goes on with the run's parameters"
        )
    if inner := sorted(path.parent for path in folder.glob(f"*/{CONFIG}")):
        return f"give the folder of one adapter, such as {inner[0]}"
    if (folder / "config.json").is_file():
        return "it is a model's folder: FromHuggingFace(folder) begins with it"
    return "give a folder as `peft` saves it"


def _text(path: Path) -> str:
    try:
        return read_text(path)
    except (OSError, ValueError):
        return ""
