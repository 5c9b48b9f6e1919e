"""An experiment back from a run's config.json, where its classes can be imported."""

from __future__ import annotations

import dataclasses
import importlib
import types
import typing
from pathlib import Path
from typing import Any

from jaxtrain.checkpoint.run_config import NAME, read_config


def stored_field(run_dir: str | Path, name: str) -> Any:
    """One field of the experiment that a run directory was made from, as the value it was.

    Raises ValueError where there is no run, and for what cannot be imported: classes and functions
    of an experiment file are known to that file alone.
    """
    config = read_config(Path(run_dir))
    if config is None or name not in config.get("experiment", {}):
        raise ValueError(f"{Path(run_dir) / NAME} has no experiment; give a run directory")
    try:
        return _value(config["experiment"][name], Any)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"{Path(run_dir) / NAME}: the run's {name} is not of this library ({error}); it can be "
            f"read only where what made it can be imported"
        ) from error


def _value(stored: Any, hint: Any) -> Any:
    """What `config_of` has stored, for a field of that annotation."""
    if isinstance(stored, dict):
        kind = _imported(stored["class"])
        hints = typing.get_type_hints(kind)
        names = [field.name for field in dataclasses.fields(kind) if field.init]
        return kind(**{k: _value(stored[k], hints[k]) for k in names if k in stored})
    if isinstance(stored, list):
        inner = str if tuple[str, ...] in _members(hint) else Any
        return tuple(_value(each, inner) for each in stored)
    if not isinstance(stored, str) or _is_text(hint):
        return stored
    return float(stored) if float in _members(hint) else _named(stored)


def _members(hint: Any) -> tuple[Any, ...]:
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return typing.get_args(hint) if union else (hint,)


def _is_text(hint: Any) -> bool:
    """Whether a text in the field is a text: in others it may name a function or a dtype."""
    kinds = [typing.get_origin(member) or member for member in _members(hint)]
    return str in kinds and all(kind in (str, Path, tuple, types.NoneType) for kind in kinds)


def _named(text: str) -> Any:
    """A function stored as module:name; any other text as it is."""
    module, colon, _ = text.partition(":")
    return _imported(text) if colon and module.replace(".", "").isidentifier() else text


def _imported(text: str) -> Any:
    module, _, name = text.partition(":")
    found = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found
