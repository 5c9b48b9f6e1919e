"""An experiment back from a run's config.json, where its classes can be imported."""

from __future__ import annotations

import dataclasses
import importlib
import sys
import types
import typing
from pathlib import Path
from typing import Any

from jaxtrain.checkpoint.run_config import NAME, read_config
from jaxtrain.experiment.load import config_of

RESUMABLE = (
    "experiment.logging",
    "experiment.evaluation",
    "experiment.checkpoints",
    "experiment.execution.mode",
    "experiment.execution.loop",
    "experiment.execution.attention",
    "experiment.execution.collectives",
    "experiment.execution.check_vma",
    "experiment.execution.reduce_layers",
    "experiment.execution.pipeline",
    "experiment.sharding",
    "experiment.microbatches",
)
"""Fields a resumed run may change: none of them changes what is learned. A reducer may: compressed
sums do, and `small_leaf` says which leaves they are of."""


def stored_field(run_dir: str | Path, name: str) -> Any:
    """One field of the experiment that a run directory was made from, as the value it was; its
    default, where the run is older than the field.

    Raises ValueError where there is no run, and for what cannot be imported: classes and functions
    of an experiment file are known to that file alone.
    """
    path = Path(run_dir) / NAME
    stored = completed(read_config(Path(run_dir)) or {}).get("experiment")
    if not isinstance(stored, dict) or name not in stored:
        raise ValueError(f"{path} has no experiment; give a run directory")
    try:
        return _value(stored[name], Any)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"{path}: the run's {name} is not of this library ({error}); it can be read only where "
            f"what made it can be imported"
        ) from error
    except TypeError as error:
        raise ValueError(
            f"{path}: the run's {name} is of another version of this library ({error}); read it "
            f"with that one"
        ) from error


def completed(config: dict[str, Any]) -> dict[str, Any]:
    """What `config_of` stored, as it would be stored today: fields that it is older than have their
    defaults, and what has moved is where it is now."""
    experiment = config.get("experiment")
    if not isinstance(experiment, dict) or "class" not in experiment:
        return config
    experiment = dict(experiment)
    if "sample" in experiment:  # once a field beside `evaluation`
        sample, evaluation = experiment.pop("sample"), experiment.get("evaluation")
        if isinstance(evaluation, dict):
            experiment["evaluation"] = {"sample": sample, **evaluation}
    return {**config, "experiment": _completed(experiment)}


def _completed(stored: Any) -> Any:
    if isinstance(stored, list):
        return [_completed(each) for each in stored]
    if not isinstance(stored, dict):
        return stored
    found = {name: _completed(each) for name, each in stored.items()}
    for field in _fields(str(stored.get("class"))):
        given = field.default
        if field.default_factory is not dataclasses.MISSING:
            given = field.default_factory()
        if field.init and field.name not in found and given is not dataclasses.MISSING:
            found[field.name] = config_of(given)
    return found


def _fields(kind: str) -> tuple[dataclasses.Field[Any], ...]:
    """Those of a dataclass; () of one whose module nobody has imported, for a module's name may be
    the name of an experiment file, which is not to be run for this."""
    module, _, name = kind.partition(":")
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return dataclasses.fields(found) if dataclasses.is_dataclass(found) else ()


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
