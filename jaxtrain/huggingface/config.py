"""config.json as a DecoderConfig, and a DecoderConfig as a config.json."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from jaxtrain.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from jaxtrain.families.family import Family
from jaxtrain.families.fields import Fields
from jaxtrain.families.gemma import GEMMA2, GEMMA3
from jaxtrain.families.gpt2 import GPT2
from jaxtrain.families.llama import LLAMA, MISTRAL, OLMO2, QWEN2, QWEN3
from jaxtrain.families.mixtral import MIXTRAL
from jaxtrain.families.mixtures import DOTS1, QWEN2_MOE, QWEN3_MOE
from jaxtrain.families.phi3 import PHI3
from jaxtrain.files.folder import file_of
from jaxtrain.files.json_text import parse_json
from jaxtrain.files.opened import FolderOrPath, OpenedFolder, open_folder
from jaxtrain.files.regular import read_text
from jaxtrain.huggingface.peft_config import CONFIG
from jaxtrain.transformer.decoder import DecoderConfig
from jaxtrain.transformer.essence import differences, essence
from jaxtrain.transformer.feed_forward import MlpConfig

NAME = "config.json"
ADAPTERS = "give their base model's folder, and FromHuggingFace(folder, adapters=...) to train them"

FAMILIES = (
    *(LLAMA, MISTRAL, MIXTRAL, QWEN2, QWEN3, GPT2, QWEN2_MOE, QWEN3_MOE, DOTS1),
    *(GEMMA2, GEMMA3, OLMO2, PHI3, DEEPSEEK_V2, DEEPSEEK_V3),
)
"""A model that several can say is written as the first of them."""


def read_config(folder: FolderOrPath) -> DecoderConfig:
    """Returns the model that a folder's config.json describes.

    Fields that change no logits (dropout, initialisation, a router's jitter and balancing loss) are
    not taken over, and `vocab_multiple` is the default: replace them as the training needs.

    Raises ValueError where there is no readable config.json, or it describes a model that this
    library does not compute: with every such field at once, unknown ones included.
    """
    opened = open_folder("folder", folder)
    family, raw, problems = _family_of(opened.here)
    if family is None:
        raise _refusal(opened, problems)
    config, more = _read(family, raw)
    if problems := problems + more:
        raise _refusal(opened, problems)
    return config


def require_decoder(model: object, label: str) -> DecoderConfig:
    """Returns the model if a Hugging Face folder can hold its weights; else raises ValueError."""
    if not isinstance(model, DecoderConfig):
        raise ValueError(
            f"{label}: a folder holds the weights of a DecoderConfig, and this model is a "
            f"{type(model).__name__}; use huggingface_config(folder), or a run directory (FromRun)"
        )
    return model


def family_of(folder: OpenedFolder) -> Family:
    """Returns the family that names a folder's tensors. Raises ValueError as `read_config` does."""
    family, _, problems = _family_of(folder.here)
    if family is None:
        raise _refusal(folder, problems)
    return family


def _family_of(folder: Path) -> tuple[Family | None, dict[str, Any], list[str]]:
    if not folder.is_dir():
        return None, {}, [f"there is no directory {folder}"]
    if not (folder / NAME).exists() and (folder / CONFIG).is_file():
        return None, {}, [f"the folder has adapters of `peft`; {ADAPTERS}"]
    try:
        raw = parse_json(read_text(file_of(folder, NAME)))
    except (OSError, ValueError) as error:
        return None, {}, [f"it cannot be read: {error}"]
    if not isinstance(raw, dict):
        return None, {}, [f"it holds a {type(raw).__name__}; use an object"]
    kind = raw.get("model_type")
    family = next((item for item in FAMILIES if item.model_type == kind), None)
    if family is None:
        names = ", ".join(item.model_type for item in FAMILIES)
        return None, raw, [f"model_type={kind!r}; the families read here are {names}"]
    architectures = raw.get("architectures")
    if architectures not in (None, [], [family.architecture]):
        return family, raw, [f"architectures={architectures!r}; use [{family.architecture!r}]"]
    return family, raw, []


def _read(family: Family, raw: dict[str, Any]) -> tuple[DecoderConfig, list[str]]:
    fields = Fields({**family.defaults, **raw})
    config = family.read(fields)
    # Defaults of fields that this family does not have are nobody's mistake.
    unknown = Fields({k: v for k, v in raw.items() if k not in fields.used}).unknown()
    problems = fields.problems + unknown
    return config, problems or config.violations()


def _kinds(config: DecoderConfig) -> set[type]:
    """Returns the types of attention in a model, and of its mixtures of experts if it has any."""
    every = {type(part) for block in config.blocks for part in (block.attention, block.mlp)}
    return every - {MlpConfig}


def _refusal(folder: OpenedFolder, problems: list[str]) -> ValueError:
    place = folder.place / NAME
    return ValueError("\n- ".join([f"{place} is not a model that can be read here:", *problems]))


def family_and_fields(config: DecoderConfig) -> tuple[Family, dict[str, Any]]:
    """Returns a family, and fields of its config.json that describe exactly this model.

    The description is exact if reading the fields gives the model back, apart from initialisation,
    dropout and padding of the vocabulary. Raises ValueError if no family can, with the differences
    in the nearest one.
    """
    if problems := config.violations():
        raise ValueError("\n".join(problems))
    wanted = essence(config)
    nearest: tuple[Family, list[str]] | None = None
    kinds, least = _kinds(config), (math.inf, math.inf)
    for family in FAMILIES:
        written = family.write(config)
        read, problems = _read(family, written)
        if not problems:
            problems = [
                f"{name} is {own}, there {written_value}"
                for name, own, written_value in differences(wanted, essence(read))
            ]
        problems = list(dict.fromkeys(problems))
        if not problems:
            head = {"architectures": [family.architecture], "model_type": family.model_type}
            return family, {**head, **written}
        # Missing experts are one problem, but a larger difference than any other field.
        distance = (len(_kinds(read) ^ kinds), len(problems))
        if distance < least:
            nearest, least = (family, problems), distance
    assert nearest is not None
    raise ValueError(
        "\n- ".join(
            [
                f"no family of {', '.join(f.model_type for f in FAMILIES)} has this model; in the "
                f"nearest, {nearest[0].model_type}, these are in the way:",
                *nearest[1],
            ]
        )
    )
