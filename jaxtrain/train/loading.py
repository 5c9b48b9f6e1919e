"""A model that is there already: a run's, or a folder's, with its weights and its tokenizer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from jaxtrain.checkpoint.huggingface import read_config, read_params
from jaxtrain.checkpoint.run_config import CHECKPOINTS, NAME, write_config
from jaxtrain.data import ByteTokenizer
from jaxtrain.data.tokenizer import HuggingFaceVocabulary, Vocabulary
from jaxtrain.experiment import FromRun
from jaxtrain.experiment.stored import stored_field
from jaxtrain.mesh.hardware import refuse
from jaxtrain.mesh.mesh import MeshSpec, make_mesh, mesh_from_axes
from jaxtrain.mesh.sharding import fsdp, named_sharding, place, tensor
from jaxtrain.models.adapters import INTO, OUT_OF, is_adapter, merged, with_adapters
from jaxtrain.models.decoder import DecoderConfig
from jaxtrain.nn.module import Split, build, take_apart
from jaxtrain.optim.precision import Precision, fp32
from jaxtrain.train.session import CACHE_DIR
from jaxtrain.train.start import PARAMS, manifest_of, read_stored, stored_params

TOKENIZER = "tokenizer.json"
BEGINS_TEXT = ("LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM")
"""Architectures of which a text begins with bos."""


@dataclass(frozen=True)
class Loaded:
    """config and params: without adapters, which are in the matrices; in natural layer order.
    bos: what a text begins with, if anything."""

    config: DecoderConfig
    params: dict[str, jax.Array]
    precision: Precision
    vocabulary: Vocabulary | None
    bos: int | None = None


def is_run(path: Path) -> bool:
    """Whether a directory is a run's; a folder of weights has a config.json too."""
    return (path / CHECKPOINTS).is_dir()


def load(
    path: str | Path,
    *,
    step: int | None = None,
    averaged: bool | None = None,
    mesh: MeshSpec | None = None,
    cache_dir: str | Path = CACHE_DIR,
) -> Loaded:
    """The model of a run directory, or of a folder as `transformers` writes it.

    step: of a run, None for the newest. averaged: its averaged weights; None where it keeps any.
    mesh: over which the parameters are split; None puts all on one device.
    Raises ValueError where nothing of the kind is there, and DamagedCheckpoint.
    """
    path, spec = Path(path), mesh_from_axes(data=1) if mesh is None else mesh
    if is_run(path):
        return _of_run(path, step, averaged, spec, Path(cache_dir).expanduser())
    if step is not None or averaged:
        raise ValueError(
            f"{path} is no run directory; a folder of weights has no steps or averages"
        )
    config = read_config(path)
    params = read_params(path, config, _template(_abstract(config), spec))
    vocabulary = _folder_vocabulary(path)
    return Loaded(config, params, fp32, vocabulary, _bos(path, vocabulary))


def _of_run(
    path: Path, step: int | None, averaged: bool | None, spec: MeshSpec, cache_dir: Path
) -> Loaded:
    config, precision = stored_field(path, "model"), stored_field(path, "precision")
    if not isinstance(config, DecoderConfig):
        raise ValueError(f"{path}: a model of one's own has its own way; this takes DecoderConfigs")
    lora = getattr(stored_field(path, "fine_tuning"), "lora", None)
    kept = stored_field(path, "ema_decay") is not None if averaged is None else averaged
    step, manifest = manifest_of(path, step)
    stored, scale = config, 1.0
    if lora is not None:
        scale = lora.alpha / lora.rank
        names = (k.removeprefix(PARAMS) for k in manifest.leaves if k.startswith(PARAMS))
        targets = tuple(k.removesuffix(INTO) for k in names if k.endswith(INTO))
        stored = with_adapters(config, targets, lora.rank, scale)
    wanted = _template(_abstract(stored), spec, precision.params)
    params = read_stored(stored_params(FromRun(path, step, averaged=kept), wanted), wanted)
    return Loaded(config, _merged(params, scale), precision, _run_vocabulary(path, cache_dir))


def _abstract(config: DecoderConfig) -> Split:
    return take_apart(nnx.eval_shape(lambda: build(config.build, jax.random.key(0))))


def static_of(config: DecoderConfig) -> Any:
    """The model's static form, for `put_together`."""
    return _abstract(config).static


def _template(split: Split, spec: MeshSpec, dtype: Any = "float32") -> dict[str, Any]:
    """The leaves of a model as they rest on a mesh. Raises ValueError where they do not split."""
    mesh = make_mesh(spec)
    sizes = {axis: n for axis, n in mesh.shape.items() if n > 1}
    places, violations = place(split.params, split.axes, fsdp() | tensor(), sizes=sizes)
    refuse(spec.where, violations)
    return {
        k: jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=named_sharding(mesh, places[k].params))
        for k, leaf in split.params.items()
    }


def _merged(params: dict[str, jax.Array], scale: float) -> dict[str, jax.Array]:
    """Without adapters: in their matrices, one after the other."""
    out = {k: v for k, v in params.items() if not is_adapter(k)}
    for name in (k.removesuffix(INTO) for k in params if k.endswith(INTO)):
        mine = {k: params[k] for k in (name, name + INTO, name + OUT_OF)}
        with jax.default_matmul_precision("highest"):
            run = jax.jit(partial(merged, scale=scale), out_shardings=_places(mine))
            out[name] = jax.block_until_ready(run(mine))[name]
    return out


def _places(arrays: dict[str, jax.Array]) -> dict[str, Any]:
    return {k: v.sharding for k, v in arrays.items()}


def record_run(run: Path, config: dict[str, Any], dataset: Any) -> None:
    """Write into a run's directory what made it: config.json, and the tokenizer of its data where
    that is a file's or was trained, for what it came from may be gone when the run is used. Raises
    ValueError as `write_config` does."""
    write_config(run, config)
    first = getattr(dataset, "datasets", [dataset])[0]  # those of a mixture share it
    vocabulary = getattr(first, "vocabulary", None)
    if isinstance(vocabulary, HuggingFaceVocabulary):
        vocabulary.save(run)


def _run_vocabulary(path: Path, cache_dir: Path) -> Vocabulary | None:
    """The tokenizer a run keeps; or its data's, None where that has no text."""
    tokenizer = getattr(stored_field(path, "data"), "tokenizer", None)
    if tokenizer is not None and (path / TOKENIZER).is_file():
        content = (path / TOKENIZER).read_text(encoding="utf-8")
        return HuggingFaceVocabulary(content, eos=tokenizer.eos)
    if tokenizer is None or isinstance(tokenizer, ByteTokenizer):
        return tokenizer
    return stored_field(path, "data").vocabulary(cache_dir)


def _folder_vocabulary(folder: Path) -> Vocabulary | None:
    """The tokenizer of a folder, None where it has none. Raises ValueError where nothing says which
    token ends a text."""
    if not (folder / TOKENIZER).is_file():
        return None
    content = (folder / TOKENIZER).read_text(encoding="utf-8")
    said = _json(folder / "tokenizer_config.json").get("eos_token")
    eos = said.get("content") if isinstance(said, dict) else said
    if eos is None:
        number = _json(folder / NAME).get("eos_token_id")
        number = number[0] if isinstance(number, list) and number else number
        eos = None if number is None else _token_of(content, number)
    if eos is None:
        raise ValueError(
            f"{folder}: neither eos_token in tokenizer_config.json nor eos_token_id in {NAME} "
            f"names a token of {TOKENIZER}; add one of them"
        )
    return HuggingFaceVocabulary(content, eos=eos)


def _token_of(content: str, number: int) -> str | None:
    from tokenizers import Tokenizer

    return Tokenizer.from_str(content).id_to_token(number)


def _bos(folder: Path, vocabulary: Vocabulary | None) -> int | None:
    """What a text begins with: what the tokenizer's own post-processor puts there, or the
    bos_token_id of families that have one, unless add_bos_token is false."""
    if not isinstance(vocabulary, HuggingFaceVocabulary):
        return None
    if (first := vocabulary.begins_with()) is not None:
        return first
    raw = _json(folder / NAME)
    told = _json(folder / "tokenizer_config.json").get("add_bos_token", True)
    named = any(name in BEGINS_TEXT for name in raw.get("architectures") or ())
    return raw.get("bos_token_id") if named and told else None


def _json(path: Path) -> dict[str, Any]:
    """An object of a file; {} where there is no such file. Raises ValueError."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    return found if isinstance(found, dict) else {}
