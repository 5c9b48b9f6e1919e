"""Parameters into a folder that `transformers` loads as it is."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jaxtrain.cluster.agreement import share_failure
from jaxtrain.files.pointer import StoreFailed, given_place
from jaxtrain.files.store import AnyPath
from jaxtrain.huggingface import config as config_file
from jaxtrain.huggingface.folder import INDEX, SINGLE
from jaxtrain.huggingface.layout import StoredTensor, leaf_shapes, stored_tensors
from jaxtrain.huggingface.target import Target, in_the_way
from jaxtrain.mesh.sharding import named_sharding
from jaxtrain.transformer.decoder import DecoderConfig

DTYPES = ("float32", "bfloat16", "float16")

Params = Mapping[str, jax.Array]
Position = tuple[int, ...]


def write_folder(
    folder: str | AnyPath,
    config: DecoderConfig,
    params: Params,
    *,
    dtype: Any = None,
    shard_bytes: int = 5_000_000_000,
    max_seq: int | None = None,
    bos: int | None = None,
    eos: int | Sequence[int] | None = None,
    texts: Mapping[str, str] | None = None,
) -> None:
    """Writes `config` and its parameters, in natural layer order with any sharding, as a folder
    for `transformers.AutoModelForCausalLM.from_pretrained`.

    dtype: of the files, None that of the parameters. shard_bytes: of one file at most, unless a
    tensor is larger; the host holds one file at a time. max_seq, bos, eos: written
    as max_position_embeddings (models with learned positions or dynamic NTK scaling have their
    own), bos_token_id and eos_token_id; they change no logits. texts: other files to put there, by
    their names.
    folder: or an address in a store. It is written completely or not at all. All processes call
    this, process 0 writes, and every device holds one tensor at a time.

    Raises:
        ValueError: before anything is written: no family has this model, the parameters are not
            its own, or `folder` is there already and not empty. After that, with nothing left
            behind: process 0 could not write, or a weight is beyond float16.
    """
    place = given_place("folder", folder)
    family, fields = config_file.family_and_fields(config)
    leaves = leaf_shapes(config)
    tensors = stored_tensors(config, family.tensors, leaves)
    if problems := params_problems(params, {k: v.shape for k, v in leaves.items()}, dtype):
        raise ValueError("\n".join(problems))
    leaf_dtype = next(iter(params.values())).dtype if dtype is None else dtype
    name = str(jnp.dtype(leaf_dtype))
    fields |= {"torch_dtype": name, "bos_token_id": bos, "eos_token_id": eos}
    if max_seq is not None and config.learned_positions is None:
        fields.setdefault("max_position_embeddings", max_seq)
    files = _files(tensors, jnp.dtype(name).itemsize, shard_bytes)
    write_tensors(place, files, params, name, {**(texts or {}), **_texts(files, fields, name)})


def write_tensors(
    folder: AnyPath,
    files: Mapping[str, Sequence[StoredTensor]],
    params: Params,
    dtype: str,
    texts: Mapping[str, str],
) -> None:
    """Writes a folder of safetensors files, with the tensors of each, and small files, completely
    or not at all. texts: the last is that without which the folder is none. Raises ValueError on
    every process where process 0 could not write."""
    sizes = [_bytes({file: part}, dtype) for file, part in files.items()]
    with Target(folder) as target:
        target.attempt(partial(target.begin, sizes))
        target.agree()
        for file, part in files.items():
            _write_file(target, file, part, params, dtype)
        target.attempt(partial(target.commit, texts))
        target.agree()


def refuse_unwritable(folder: str | AnyPath, config: DecoderConfig, dtype: Any) -> None:
    """Raises ValueError, on every process and with all that is wrong, for what `write_folder` would
    refuse for any parameters, before they are read."""

    def refuse() -> None:
        problems = _dtype_problems([dtype])
        try:
            config_file.family_and_fields(config)
        except ValueError as error:
            problems.append(str(error))
        if jax.process_index() == 0:
            place = given_place("folder", folder)
            try:
                problems += in_the_way(place)
            except OSError as error:
                raise StoreFailed(f"{place} cannot be read", error, "give another") from error
        if problems:
            raise ValueError("\n".join(problems))

    share_failure(refuse)


def params_problems(params: Params, leaves: Mapping[str, tuple[int, ...]], dtype: Any) -> list[str]:
    """Returns how parameters differ from those expected, leaf -> shape, and why they cannot be
    written in this dtype (None for their own)."""
    problems = [f"parameter {path} is missing" for path in leaves if path not in params]
    for path, leaf in params.items():
        if path not in leaves:
            problems.append(f"{path} is no parameter of this model")
        elif tuple(leaf.shape) != leaves[path]:
            problems.append(f"{path} is {leaf.shape}, and {leaves[path]} in the model")
        elif not isinstance(leaf.sharding, NamedSharding) and not leaf.is_fully_addressable:
            problems.append(f"{path} is on other processes too, without a NamedSharding")
    dtypes = [leaf.dtype for leaf in params.values()] if dtype is None else [dtype]
    return problems + _dtype_problems(dtypes)


def _dtype_problems(dtypes: Sequence[Any]) -> list[str]:
    names = set()
    for dtype in dtypes:
        try:
            names.add(str(jnp.dtype(dtype)))
        except TypeError:  # no dtype at all
            names.add(repr(dtype))
    if len(names) <= 1 and names <= {*DTYPES}:
        return []
    return [f"dtype is {' and '.join(sorted(names))}; give one of {', '.join(DTYPES)}"]


def _files(tensors: list[StoredTensor], itemsize: int, limit: int) -> dict[str, list[StoredTensor]]:
    """Returns the tensors of each file, in order; a new file where one would exceed the limit."""
    parts: list[list[StoredTensor]] = []
    room = -1
    for tensor in tensors:
        size = _elements(tensor) * itemsize
        if not parts or size > room:
            parts.append([])
            room = limit
        parts[-1].append(tensor)
        room -= size
    if len(parts) == 1:
        return {SINGLE: parts[0]}
    stem, n = SINGLE.removesuffix(".safetensors"), len(parts)
    return {f"{stem}-{i:05}-of-{n:05}.safetensors": part for i, part in enumerate(parts, 1)}


def _elements(tensor: StoredTensor) -> int:
    return math.prod(tensor.shape)


def _bytes(files: Mapping[str, Sequence[StoredTensor]], dtype: str) -> int:
    return sum(_elements(t) for part in files.values() for t in part) * jnp.dtype(dtype).itemsize


def _texts(
    files: Mapping[str, list[StoredTensor]], fields: dict[str, Any], dtype: str
) -> dict[str, str]:
    """Returns the JSON files that accompany the weights."""
    objects: dict[str, Any] = {}
    if len(files) > 1:
        weight_map = {tensor.name: file for file, part in files.items() for tensor in part}
        objects[INDEX] = {
            "metadata": {"total_size": _bytes(files, dtype)},
            "weight_map": weight_map,
        }
    objects[config_file.NAME] = fields
    return {
        name: json.dumps(content, indent=2, sort_keys=True) + "\n"
        for name, content in objects.items()
    }


def _write_file(
    target: Target, file: str, tensors: Sequence[StoredTensor], params: Params, dtype: str
) -> None:
    """Gathers a file's tensors, in which all processes take part, and writes them."""
    arrays: dict[str, np.ndarray] = {}
    for tensor in tensors:
        sources = [
            _addressable(params[piece.leaf], piece.stack_index, dtype) for piece in tensor.pieces
        ]
        target.attempt(partial(_keep, arrays, tensor, sources, dtype))
    target.attempt(partial(target.save, file, arrays))


def _addressable(leaf: jax.Array, index: Position, dtype: str) -> tuple[jax.Array, Position]:
    """Returns a fully addressable array and the index of leaf[index] in it: the leaf itself, or
    leaf[index] gathered onto every device of its mesh. Waits for it, since simulated devices hang
    when the collectives of two programs run side by side."""
    if leaf.is_fully_addressable:
        return leaf, index
    assert isinstance(leaf.sharding, NamedSharding), "others are refused"
    return jax.block_until_ready(_jitted_index(leaf.sharding.mesh, dtype)(leaf, index)), ()


@lru_cache(maxsize=4)
def _jitted_index(mesh: Any, dtype: str) -> Any:
    """Returns (array, index) -> array[index] in `dtype`: one program for every index. Replicated on
    `mesh`, if given."""

    def indexed(array: jax.Array, index: Position) -> jax.Array:
        return array[index].astype(dtype)

    return jax.jit(indexed, out_shardings=None if mesh is None else named_sharding(mesh, ()))


def _keep(
    arrays: dict[str, np.ndarray],
    tensor: StoredTensor,
    sources: list[tuple[jax.Array, Position]],
    dtype: str,
) -> None:
    """Adds a tensor to the arrays in the folder's layout, without padded rows."""
    parts = [
        _on_host(array, index, dtype)[tuple(slice(n) for n in piece.shape)]
        for (array, index), piece in zip(sources, tensor.pieces, strict=True)
    ]
    values = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-1)
    values = values if tensor.order is None else values[..., tensor.order]
    if dtype == "float16" and not np.isfinite(values).all():
        raise ValueError(f"{tensor.name} has weights beyond float16; use bfloat16 or float32")
    # The library writes memory as it lies.
    arrays[tensor.name] = np.ascontiguousarray(
        np.swapaxes(values, -1, -2) if tensor.transposed else values
    )


def _on_host(array: jax.Array, index: Position, dtype: str) -> np.ndarray:
    """Returns array[index] on the host, each part from one of the devices that have it."""
    out = np.empty(array.shape[len(index) :], dtype)
    seen = set()
    for shard in array.addressable_shards:
        dims = zip(shard.index, array.shape, strict=True)
        box = [dim.indices(size)[:2] for dim, size in dims]
        stacked, inner = box[: len(index)], tuple(slice(*dim) for dim in box[len(index) :])
        is_inside = all(a <= i < b for i, (a, b) in zip(index, stacked, strict=True))
        if is_inside and str(box) not in seen:
            seen.add(str(box))
            local = tuple(i - a for i, (a, _) in zip(index, stacked, strict=True))
            out[inner] = np.asarray(_jitted_index(None, dtype)(shard.data, local))
    return out
