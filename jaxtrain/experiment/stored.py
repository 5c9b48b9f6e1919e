"""Reads an experiment from a run's config.json, which is data: `vocabulary` lists the names it may
use."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from jaxtrain.attention.splash import Splash, SplashBlocks
from jaxtrain.checkpoint.run_config import (
    ABSENT,
    NAME,
    FieldDifference,
    config_differences,
    read_config,
)
from jaxtrain.checkpoint.storage import json_text
from jaxtrain.experiment.fields import Experiment
from jaxtrain.experiment.load import config_of, stored_name
from jaxtrain.experiment.reading import Reader, Trust
from jaxtrain.experiment.vocabulary import CLASSES, Slot, slots_of
from jaxtrain.transformer.block import BlockConfig

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
    "experiment.fine_tuning.start.folder",
    "experiment.fine_tuning.start.adapters",
    "experiment.fine_tuning.start.run_dir",
    "experiment.data.source.patterns",
    "experiment.data.source.held_out_patterns",
    "experiment.data.source.paths",
    "experiment.data.source.held_out_paths",
    "experiment.data.source.parts.*.1.patterns",
    "experiment.data.source.parts.*.1.held_out_patterns",
    "experiment.data.source.parts.*.1.paths",
    "experiment.data.source.parts.*.1.held_out_paths",
    "experiment.data.tokenizer.path",
    "experiment.data.packing",
    "experiment.data.tokenizer.add_bos",
    "experiment.data.tokenizer.add_eos",
    "experiment.data.tokenizer.chat_template",
)
"""Fields a resumed run may change. They do not change what is learned, except `health`'s reaction
to spikes of the loss: each save has the skipped batches. Where the files of the data and of the
first weights lie changes nothing: whether they are the same, their digests say. A reducer is not
one of them: compressed sums change what is learned, and `small_leaf` selects their leaves."""


def own_attention(experiment: Any) -> str:
    """Returns the name of a stored experiment's user-defined attention kernel; "" for this
    library's."""
    execution = experiment.get("execution") if isinstance(experiment, dict) else None
    kernel = execution.get("attention") if isinstance(execution, dict) else None
    name = kernel.get("class") if isinstance(kernel, dict) else kernel
    return name if isinstance(name, str) and not name.startswith("jaxtrain.") else ""


def resumable(*experiments: Any) -> tuple[str, ...]:
    """Returns the fields that may differ between stored experiments of one run: `RESUMABLE`,
    without the attention if one of them has a user's own kernel, which may compute anything."""
    own = any(map(own_attention, experiments))
    return tuple(name for name in RESUMABLE if not (own and name == ATTENTION))


def of_another(
    metadata: dict[str, Any], config: dict[str, Any], experiment: Experiment | None = None
) -> list[str]:
    """Returns why a checkpoint with this metadata is not of the experiment that `config_of` stored
    as `config`; [] if it is, or says nothing of it. experiment: as `completed` takes it; without
    it a field that one side lacks tells nothing, since it may be newer."""
    may_differ = resumable(metadata.get("experiment"), config)
    try:
        differences = _differences(metadata, config, experiment, ignore=may_differ)
    except ValueError as error:
        return [f"the experiment of the step cannot be read: {error}"]
    if experiment is None:
        differences = [d for d in differences if ABSENT not in (d.stored, d.now)]
    if not differences:
        return []
    return [f"the step is of another experiment: {'; '.join(map(str, differences))}"]


def saved_differences(metadata: dict[str, Any], experiment: Experiment) -> list[FieldDifference]:
    """Returns the fields whose values are not those in a checkpoint's metadata; [] if it says
    nothing of them, in the form of `by_object`."""
    return by_object(_differences(metadata, config_of(experiment), experiment, ignore=()))


def by_object(differences: Iterable[FieldDifference]) -> list[FieldDifference]:
    """Returns differences of stored experiments by fields of the experiment: an object in place of
    another one is one difference, of their classes."""
    found = {difference.path.removeprefix("experiment."): difference for difference in differences}
    replaced = [path.removesuffix(".class") for path in found if path.endswith(".class")]
    outermost = [p for p in replaced if not any(p.startswith(f"{other}.") for other in replaced)]
    kept = [
        difference._replace(path=path)
        for path, difference in found.items()
        if not any(path == p or path.startswith(f"{p}.") for p in outermost)
    ]

    def value(path: str, side: str) -> Any:
        sides = (getattr(found[p], side) for p in (f"{path}.class", path) if p in found)
        return next((side for side in sides if side is not ABSENT), ABSENT)

    def of_classes(path: str) -> FieldDifference:
        names = value(path, "stored"), value(path, "now")
        short = [n.rpartition(":")[2] if isinstance(n, str) else n for n in names]
        # Of equal names the modules are what differs.
        return FieldDifference(path, *(names if short[0] == short[1] else short))

    return sorted([*kept, *map(of_classes, outermost)])


def _differences(
    metadata: dict[str, Any],
    config: dict[str, Any],
    experiment: Experiment | None,
    *,
    ignore: tuple[str, ...],
) -> list[FieldDifference]:
    """Returns the differences of a checkpoint's experiment from the one that `config_of` stored as
    `config`; [] if the metadata has none. experiment: as `completed` takes it."""
    stored = metadata.get("experiment")
    if stored is None:
        return []
    in_form = partial(completed, experiment=experiment)
    return config_differences(
        {"experiment": stored},
        in_form({"experiment": config}),
        ignore=ignore,
        completed=in_form,
    )


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
    "jaxtrain.data.source:StdlibSource": "jaxtrain.sources.stdlib:StdlibSource",
    "jaxtrain.data.source:TextFiles": "jaxtrain.sources.text:TextFiles",
    "jaxtrain.data.tokenizer:BpeTokenizer": "jaxtrain.tokenizers.bpe:BpeTokenizer",
    "jaxtrain.data.tokenizer:ByteTokenizer": "jaxtrain.tokenizers.byte_values:ByteTokenizer",
    "jaxtrain.data.tokenizer:TokenizerFile": "jaxtrain.tokenizers.file:TokenizerFile",
    "jaxtrain.experiment.fields:Evaluation": "jaxtrain.experiment.evaluation:Evaluation",
    "jaxtrain.experiment.fields:Sample": "jaxtrain.experiment.evaluation:Sample",
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
"""Names of classes and functions in older runs -> their present names."""
MOVED_MODULES = {
    "jaxtrain.collectives.compressed": "jaxtrain.compression.compressed",
    "jaxtrain.collectives.compression": "jaxtrain.compression.codecs",
    "jaxtrain.collectives.powersgd": "jaxtrain.compression.powersgd",
    "jaxtrain.data.conversations": "jaxtrain.sources.conversations",
    "jaxtrain.data.records": "jaxtrain.sources.records",
    "jaxtrain.models.decoder": "jaxtrain.transformer.decoder",
    "jaxtrain.nn.quantized.delayed": "jaxtrain.quantization.delayed",
    "jaxtrain.nn.quantized.recipe": "jaxtrain.quantization.recipe",
    "jaxtrain.nn.rotary.rope": "jaxtrain.attention.rotary.rope",
    "jaxtrain.nn.rotary.scaling": "jaxtrain.attention.rotary.scaling",
} | {
    f"jaxtrain.models.transformer.{file}": f"jaxtrain.transformer.{file}"
    for file in ("attention", "block", "feed_forward", "latent", "mixture", "place")
}
"""Modules in older runs -> their present names."""


class UntrustedNames(ValueError):
    """A field has classes or functions in it that are neither of this library nor trusted."""


class ForeignField(UntrustedNames):
    """A field's value itself is a class or function that is neither of this library nor trusted,
    or an object of such a class."""


def stored_field(run_dir: str | Path, name: str, *, trust: Trust = ()) -> Any:
    """Returns one field of a run directory's experiment as a value; its default if the run is older
    than the field.

    Names in it are this library's own classes and functions, and each value has the kind of its
    field's annotation: both are checked before anything is built. trust: the caller's own modules,
    with their submodules, that may be imported.

    Raises ForeignField if the field is another module's object, UntrustedNames if it has one in it,
    and ValueError with all that is wrong: no run, a name that is not trusted or can't be imported
    (only an experiment file itself knows its classes and functions), a value of another kind.
    """
    path = Path(run_dir) / NAME
    stored = completed(read_config(Path(run_dir)) or {}).get("experiment")
    if not isinstance(stored, dict) or name not in stored:
        raise ValueError(f"{path} has no experiment; give a run directory")
    reader = Reader(trust)
    make = reader.read(stored[name], slots_of(Experiment)[name], name)
    if reader.violations:
        names = UntrustedNames if reader.foreign else ValueError
        kind = ForeignField if reader.foreign == [name] else names
        problem = "is not of this library" if reader.foreign else "cannot be read"
        raise kind(f"{path}: the run's {name} {problem}:\n  " + "\n  ".join(reader.violations))
    try:
        return make()
    except ValueError as error:
        raise ValueError(f"{path}: the run's {name} cannot be read: {error}") from error


def unreadable(config: dict[str, Any]) -> list[str]:
    """Returns violations for values of other kinds than their fields', such as `tied=1`: a run that
    stored them would train, and could not be read. The JSON form is checked: a number of NumPy's is
    a number there."""
    reader = Reader(anybody=True)
    stored = json.loads(json_text(config["experiment"], name="the experiment"))
    reader.read(stored, Slot(dataclasses=(Experiment,)), "experiment")
    return reader.violations


def refuse_unreadable(config: dict[str, Any]) -> None:
    """Raises ValueError if there are `unreadable` values."""
    if violations := unreadable(config):
        raise ValueError(
            "a run with these values could not be read again:\n  " + "\n  ".join(violations)
        )


def completed(config: dict[str, Any], experiment: Experiment | None = None) -> dict[str, Any]:
    """Returns a stored `config_of` in today's form: missing newer fields have their defaults, and
    moved names are replaced.

    experiment: its classes' defaults are used too. Other classes outside this library are not
      called.
    """
    stored = config.get("experiment")
    if not isinstance(stored, dict) or "class" not in stored:
        return config
    stored = dict(stored)
    if "sample" in stored:  # formerly a field of the experiment
        sample, evaluation = stored.pop("sample"), stored.get("evaluation")
        if isinstance(evaluation, dict):
            stored["evaluation"] = {"sample": sample, **evaluation}
    classes = CLASSES | {stored_name(kind): kind for kind in _classes_in(experiment)}
    return {**config, "experiment": _completed(stored, classes)}


def _classes_in(value: Any) -> set[type]:
    """Returns the dataclasses of a value and of all values inside it."""
    if isinstance(value, tuple):
        return {kind for item in value for kind in _classes_in(item)}
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return set()
    field_values = (getattr(value, field.name) for field in dataclasses.fields(value))
    return {type(value), *(kind for item in field_values for kind in _classes_in(item))}


def present_name(stored: str) -> str:
    """Returns a stored name of a class or a function that has moved by its present name; any other
    text unchanged."""
    module, colon, name = MOVED.get(stored, stored).partition(":")
    return f"{MOVED_MODULES.get(module, module)}{colon}{name}" if colon else stored


def _completed(stored: Any, classes: dict[str, type]) -> Any:
    if isinstance(stored, list):
        return [_completed(item, classes) for item in stored]
    if isinstance(stored, str):
        return present_name(stored)
    if not isinstance(stored, dict):
        return stored
    updated = {name: _completed(item, classes) for name, item in stored.items()}
    name = updated.get("class")
    if name == stored_name(Splash) and isinstance(size := updated.pop("block", None), int):
        # Formerly one size for all tiles.
        updated["blocks"] = config_of(SplashBlocks()) | dict.fromkeys(SplashBlocks().sizes(), size)
    if name == stored_name(BlockConfig) and updated.get("adapters", ...) is None:
        del updated["adapters"]  # formerly a field, None in every run
    for field in (
        dataclasses.fields(classes[name]) if isinstance(name, str) and name in classes else ()
    ):
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        if field.init and field.name not in updated and default is not dataclasses.MISSING:
            updated[field.name] = config_of(default)
    return updated
