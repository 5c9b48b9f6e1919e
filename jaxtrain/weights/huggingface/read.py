"""Parameters out of a folder: every device's shard from the slices it needs, and no more."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.files.stores import local_path
from jaxtrain.models.decoder import DecoderConfig
from jaxtrain.state_format import chunks
from jaxtrain.state_format.leaves import stored_shape
from jaxtrain.state_format.slots import AS_THEY_REST, AllSlots, part_of
from jaxtrain.weights.huggingface.config import family_of
from jaxtrain.weights.huggingface.family import Family
from jaxtrain.weights.huggingface.folder import FLOATS, Box, Folder
from jaxtrain.weights.huggingface.layout import (
    LeafShape,
    Piece,
    Stored,
    leaf_shapes,
    stored_tensors,
    transpose_last,
)

Template = Mapping[str, jax.ShapeDtypeStruct]


def read_params(
    folder: str | Path,
    config: DecoderConfig,
    template: Template,
    slots: AllSlots = AS_THEY_REST,
) -> dict[str, jax.Array]:
    """The parameters of `config` out of a folder.

    template: for every leaf its shape, dtype and sharding, as parameters rest. slots: of those that
    do not rest in natural layer order; what is padding there is zero. Each device's shard is read,
    cast and sent before the next, once where devices share it; with several processes each reads
    its own. Padded rows of the vocabulary are zero.

    Raises:
        ValueError: before a weight is read: the template is not of this model; a tensor is missing,
            extra, of another shape or no float: all of them, by name. While reading: a tied
            folder's lm_head differs from its embedding.
    """
    folder = local_path("folder", folder)
    family, leaves = family_of(folder), leaf_shapes(config)
    with Folder(folder) as files:
        problems = _template_problems(template, leaves, slots)
        reader = _reader(files, config, family, leaves, problems)
        if reader.left_out:
            warnings.warn(
                f"{folder}: {len(reader.left_out)} tensors of layers behind the model's, for "
                "multi-token prediction, are left out",
                stacklevel=2,
            )
        return {path: reader.leaf(path, spec, slots) for path, spec in template.items()}


def refuse_unfit(folder: str | Path, config: DecoderConfig) -> None:
    """Raise ValueError as `read_params` does before it reads a weight; needs no device."""
    folder = local_path("folder", folder)
    family, leaves = family_of(folder), leaf_shapes(config)
    with Folder(folder) as files:
        _reader(files, config, family, leaves, [])


def _reader(
    files: Folder,
    config: DecoderConfig,
    family: Family,
    leaves: dict[str, LeafShape],
    problems: list[str],
) -> _Reader:
    """Of a folder with this model. Raises ValueError with all that is wrong, `problems` first."""
    _find_base(files, family)
    tensors = _spelling(files, config, family, leaves)
    copy = _tied_copy(files, config, family)
    beyond = _layers_beyond(files, config) if family.layers_beyond else []
    files.leave_out(beyond)
    problems = problems + files.problems + _tensor_problems(files, tensors, family, copy)
    if problems:
        raise ValueError("\n- ".join([f"{files.path} has not this model's weights:", *problems]))
    return _Reader(files, tensors, copy, beyond)


def _template_problems(
    template: Template, leaves: Mapping[str, LeafShape], slots: AllSlots
) -> list[str]:
    found = [f"template: {path} is missing" for path in leaves if path not in template]
    for path, spec in template.items():
        if path not in leaves:
            found.append(f"template: {path} is no parameter of this model")
            continue
        if (shape := stored_shape(path, spec, slots)) != leaves[path].shape:
            found.append(f"template: {path} is {shape}, and {leaves[path].shape} in the model")
        if not jnp.issubdtype(spec.dtype, jnp.floating):
            found.append(f"template: {path} is {spec.dtype}; use a float")
        if spec.sharding is None:
            found.append(f"template: {path} has no sharding; say where it goes")
    return found


def _spelling(
    files: Folder, config: DecoderConfig, family: Family, leaves: dict[str, LeafShape]
) -> list[Stored]:
    """The model's tensors as the folder has them: as the family's rules that name the most."""
    rules = [rules for rules in (family.tensors, family.others) if rules]
    spelled = [stored_tensors(config, each, leaves) for each in rules]
    return max(spelled, key=lambda some: sum(tensor.name in files.tensors for tensor in some))


def _find_base(files: Folder, family: Family) -> None:
    """Gives tensors the names they have in the class with a head: a folder that was saved from the
    class without it has no `model.` before them."""
    if not any(name.startswith(family.base) for name in files.tensors):
        head = family.name_of("head")
        names = {name: name if name == head else family.base + name for name in files.tensors}
        files.rename(names)


def _layers_beyond(files: Folder, config: DecoderConfig) -> list[str]:
    """The tensors of layers behind the model's that predict further tokens: those with a matrix
    that joins a token's embedding to what the model has made so far."""
    found = ((name, re.match(r"model\.layers\.(\d+)\.", name)) for name in files.tensors)
    beyond = [(name, int(at[1])) for name, at in found if at and int(at[1]) >= config.layers]
    return [n for n, at in beyond if f"model.layers.{at}.eh_proj.weight" in files.tensors]


def _tied_copy(files: Folder, config: DecoderConfig, family: Family) -> str | None:
    """The name of a second copy of a tied table. Where it is the only one it becomes the first."""
    head, embedding = family.name_of("head"), family.name_of("embedding")
    if not config.tied or head not in files.tensors:
        return None
    if embedding not in files.tensors:
        files.rename({head: embedding})
        return None
    return head


def _tensor_problems(
    files: Folder, tensors: list[Stored], family: Family, copy: str | None
) -> list[str]:
    expected = {tensor.name: tensor.shape for tensor in tensors}
    if copy is not None:
        expected[copy] = expected[family.name_of("embedding")]
    found = []
    for name, shape in expected.items():
        there = files.tensors.get(name)
        if there is None:
            found.append(f"{name} {list(shape)} is missing")
        elif there.shape != shape:
            found.append(f"{name} is {list(there.shape)}, and {list(shape)} in this model")
        elif there.dtype not in FLOATS:
            found.append(f"{name} is {there.dtype}; the dtypes read are {', '.join(FLOATS)}")
    for name in files.tensors:
        if name not in expected and not family.buffers.fullmatch(name):
            found.append(f"{name} {list(files.tensors[name].shape)} is not in this model")
    return found


class _Reader:
    """Leaves out of an open folder that has them all."""

    def __init__(
        self, files: Folder, tensors: list[Stored], copy: str | None, left_out: list[str]
    ) -> None:
        self.files, self.copy, self.left_out = files, copy, left_out
        self.parts: dict[str, list[tuple[Stored, Piece]]] = {}
        for tensor in tensors:
            for piece in tensor.pieces:
                self.parts.setdefault(piece.leaf, []).append((tensor, piece))

    def leaf(self, path: str, spec: jax.ShapeDtypeStruct, slots: AllSlots) -> jax.Array:
        """One leaf. The host holds one shard of it at a time."""
        sharding: Any = spec.sharding
        wanted = chunks.boxes_of(sharding.addressable_devices_indices_map(spec.shape), spec.shape)

        def read(part: chunks.Box) -> np.ndarray:
            spans = zip(*part, strict=True)
            return self.shard(path, tuple((start, start + n) for start, n in spans), spec.dtype)

        shards = []
        for part, devices in wanted.items():
            values = part_of(slots.get(path), part, spec.dtype, read)
            # A copy: what a step donates must not be numpy's memory.
            sent = [jax.device_put(values, device, may_alias=False) for device in devices]
            shards += jax.block_until_ready(sent)
        return jax.make_array_from_single_device_arrays(
            spec.shape, sharding, shards, dtype=spec.dtype
        )

    def shard(self, path: str, box: Box, dtype: Any) -> np.ndarray:
        """Part `box` of a leaf; zeros where no tensor has any of it."""
        out = np.zeros([stop - start for start, stop in box], dtype)
        for tensor, where, theirs in self.overlaps(path, box):
            if tensor.order is not None:
                out[where] = self.reordered(tensor, theirs)
                continue
            values = self.files.read(tensor.name, _as_stored(tensor, theirs))
            if self.copy is not None and path == "embedding":
                self.compare(tensor.name, values, theirs)
            out[where] = np.swapaxes(values, -1, -2) if tensor.transposed else values
        return out

    def reordered(self, tensor: Stored, box: Box) -> np.ndarray:
        """That part of a tensor whose columns are in another order than ours: all between the first
        and the last of them are read."""
        assert tensor.order is not None, "a tensor with an order"
        *rows, (a, b) = box
        columns = np.argsort(tensor.order)[a:b]
        first, last = int(columns.min()), int(columns.max()) + 1
        values = self.files.read(tensor.name, _as_stored(tensor, (*rows, (first, last))))
        values = np.swapaxes(values, -1, -2) if tensor.transposed else values
        return values[..., columns - first]

    def compare(self, name: str, values: np.ndarray, box: Box) -> None:
        """`transformers` unties two tables that differ, whatever config.json says."""
        if not np.array_equal(values, self.files.read(str(self.copy), box)):
            raise ValueError(
                f"{self.files.path}: {self.copy} differs from {name}, and config.json says that "
                "they are tied; set tie_word_embeddings to false there"
            )

    def overlaps(self, path: str, box: Box) -> Iterator[tuple[Stored, tuple[Any, ...], Box]]:
        """The tensors that meet `box`: where each goes in it, and which part of the tensor it
        is, the way round we keep it."""
        for tensor, piece in self.parts[path]:
            stacked, rest = box[: len(piece.at)], box[len(piece.at) :]
            if not all(a <= i < b for i, (a, b) in zip(piece.at, stacked, strict=True)):
                continue
            part = [(a, min(b, n)) for (a, b), n in zip(rest, piece.shape, strict=True)]
            if any(a >= b for a, b in part):
                continue
            index = [i - a for i, (a, _) in zip(piece.at, stacked, strict=True)]
            where = (*index, *(slice(0, b - a) for a, b in part))
            a, b = part.pop()
            yield tensor, where, (*part, (a + piece.offset, b + piece.offset))


def _as_stored(tensor: Stored, box: Box) -> Box:
    return transpose_last(box) if tensor.transposed else box
