"""An experiment back from a run's config.json, which is data: `vocabulary` has what it may name."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from jaxtrain.attention.splash import Splash, SplashBlocks
from jaxtrain.checkpoint.run_config import NAME, read_config
from jaxtrain.checkpoint.storage import json_text
from jaxtrain.experiment.fields import Experiment
from jaxtrain.experiment.load import config_of, stored_name
from jaxtrain.experiment.reading import Reader, Trust
from jaxtrain.experiment.vocabulary import CLASSES, Slot, slots_of
from jaxtrain.models.transformer.block import BlockConfig

ATTENTION = "experiment.execution.attention"

RESUMABLE = (
    "experiment.logging",
    "experiment.evaluation",
    "experiment.checkpoints",
    "experiment.model.chunk_tokens",
    "experiment.execution.mode",
    "experiment.execution.loop",
    ATTENTION,
    "experiment.execution.grouped_matmul",
    "experiment.execution.collectives",
    "experiment.execution.context",
    "experiment.execution.check_vma",
    "experiment.execution.reduce_layers",
    "experiment.execution.pipeline",
    "experiment.execution.health",
    "experiment.execution.expert_chunk",
    "experiment.sharding",
    "experiment.microbatches",
    "experiment.fine_tuning.start.trust",
)
"""Fields a resumed run may change: none of them changes what is learned, but for what `health` does
about spikes of the loss: which batches were skipped is in each save. A reducer may: compressed sums
do, and `small_leaf` says which leaves they are of."""


def own_attention(experiment: Any) -> str:
    """The name of the attention kernel of a user's own that a stored experiment has; "" where the
    kernel is this library's."""
    execution = experiment.get("execution") if isinstance(experiment, dict) else None
    kernel = execution.get("attention") if isinstance(execution, dict) else None
    name = kernel.get("class") if isinstance(kernel, dict) else kernel
    return name if isinstance(name, str) and not name.startswith("jaxtrain.") else ""


def resumable(*experiments: Any) -> tuple[str, ...]:
    """The fields that may differ between stored experiments of one run: `RESUMABLE`, and not the
    attention where one of them has a kernel of a user's own, which may compute anything."""
    own = any(map(own_attention, experiments))
    return tuple(name for name in RESUMABLE if not (own and name == ATTENTION))


MOVED = {
    "jaxtrain.nn.attention:Cudnn": "jaxtrain.attention.cudnn:Cudnn",
    "jaxtrain.nn.attention:Splash": "jaxtrain.attention.splash:Splash",
    "jaxtrain.attention.kernels:Cudnn": "jaxtrain.attention.cudnn:Cudnn",
    "jaxtrain.attention.kernels:Splash": "jaxtrain.attention.splash:Splash",
    "jaxtrain.nn.attention:PlatformKernel": "jaxtrain.attention.kernels:PlatformKernel",
    "jaxtrain.nn.attention:Reference": "jaxtrain.attention.kernels:Reference",
    "jaxtrain.nn.blockwise:Blockwise": "jaxtrain.attention.blockwise:Blockwise",
    "jaxtrain.nn.rotary:Rope": "jaxtrain.nn.rotary.rope:Rope",
    "jaxtrain.nn.rotary:LinearScaling": "jaxtrain.nn.rotary.scaling:LinearScaling",
    "jaxtrain.nn.rotary:Llama3Scaling": "jaxtrain.nn.rotary.scaling:Llama3Scaling",
} | {
    f"jaxtrain.models.block:{name}": f"jaxtrain.models.transformer.{file}:{name}"
    for file, names in {
        "attention": "AttentionConfig",
        "feed_forward": "MlpConfig silu gelu_tanh gelu_exact",
        "mixture": "MoeConfig SharedExpert",
        "block": "BlockConfig",
    }.items()
    for name in names.split()
}
"""Classes and functions as older runs name them -> where those are now."""


class ForeignField(ValueError):
    """A field holds a class or a function that is not of this library, nor trusted."""


def stored_field(run_dir: str | Path, name: str, *, trust: Trust = ()) -> Any:
    """One field of the experiment that a run directory was made from, as the value it was; its
    default, where the run is older than the field.

    What it names is one of this library's own classes and functions, and each value is of the kind
    that its field is annotated with: both are checked before anything is built. trust: modules of
    the caller's own, with all below them, that are imported where it names them.

    Raises ForeignField where the field is an object of another module's, and ValueError with all
    that is wrong with it: there is no run, a name that is not trusted or can't be imported (classes
    and functions of an experiment file are known to that file alone), a value of another kind.
    """
    path = Path(run_dir) / NAME
    stored = completed(read_config(Path(run_dir)) or {}).get("experiment")
    if not isinstance(stored, dict) or name not in stored:
        raise ValueError(f"{path} has no experiment; give a run directory")
    reader = Reader(trust)
    make = reader.read(stored[name], slots_of(Experiment)[name], name)
    if reader.violations:
        kind = ForeignField if reader.foreign == [name] else ValueError
        what = "is not of this library" if reader.foreign else "cannot be read"
        raise kind(f"{path}: the run's {name} {what}:\n  " + "\n  ".join(reader.violations))
    try:
        return make()
    except ValueError as error:
        raise ValueError(f"{path}: the run's {name} cannot be read: {error}") from error


def unreadable(config: dict[str, Any]) -> list[str]:
    """Values of other kinds than their fields', such as `tied=1`: a run that stored them would
    train, and could not be read. What JSON makes of them is what is read: a number of NumPy's is a
    number there."""
    reader = Reader(anybody=True)
    stored = json.loads(json_text(config["experiment"], what="the experiment"))
    reader.read(stored, Slot(dataclasses=(Experiment,)), "experiment")
    return reader.violations


def refuse_unreadable(config: dict[str, Any]) -> None:
    """Raise ValueError where there is anything `unreadable`."""
    if found := unreadable(config):
        raise ValueError(
            "a run with these values could not be read again:\n  " + "\n  ".join(found)
        )


def completed(config: dict[str, Any], experiment: Experiment | None = None) -> dict[str, Any]:
    """What `config_of` stored, as it would be stored today: fields that it is older than have their
    defaults, and what has moved is where it is now.

    experiment: one at hand, whose classes' defaults are known too. Of no other class that is not of
    this library is anything called.
    """
    stored = config.get("experiment")
    if not isinstance(stored, dict) or "class" not in stored:
        return config
    stored = dict(stored)
    if "sample" in stored:  # once a field beside `evaluation`
        sample, evaluation = stored.pop("sample"), stored.get("evaluation")
        if isinstance(evaluation, dict):
            stored["evaluation"] = {"sample": sample, **evaluation}
    known = CLASSES | {stored_name(kind): kind for kind in _classes_in(experiment)}
    return {**config, "experiment": _completed(stored, known)}


def _classes_in(value: Any) -> set[type]:
    """The dataclasses of a value and of all that it holds."""
    if isinstance(value, tuple):
        return {kind for each in value for kind in _classes_in(each)}
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return set()
    held = (getattr(value, field.name) for field in dataclasses.fields(value))
    return {type(value), *(kind for each in held for kind in _classes_in(each))}


def _completed(stored: Any, known: dict[str, type]) -> Any:
    if isinstance(stored, list):
        return [_completed(each, known) for each in stored]
    if isinstance(stored, str):
        return MOVED.get(stored, stored)
    if not isinstance(stored, dict):
        return stored
    found = {name: _completed(each, known) for name, each in stored.items()}
    name = found.get("class")
    if name == stored_name(Splash) and isinstance(size := found.pop("block", None), int):
        # Once one size for all tiles.
        found["blocks"] = config_of(SplashBlocks()) | dict.fromkeys(SplashBlocks().sizes(), size)
    if name == stored_name(BlockConfig) and found.get("adapters", ...) is None:
        del found["adapters"]  # once a field, which was None in every run
    for field in dataclasses.fields(known[name]) if isinstance(name, str) and name in known else ():
        given = field.default
        if field.default_factory is not dataclasses.MISSING:
            given = field.default_factory()
        if field.init and field.name not in found and given is not dataclasses.MISSING:
            found[field.name] = config_of(given)
    return found
