"""Parameters from a folder. Each device's shard is read from the slices it needs, and no more."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.families.family import Family
from jaxtrain.files.opened import FolderOrPath, open_folder
from jaxtrain.huggingface.config import family_of
from jaxtrain.huggingface.folder import FLOATS, Folder, TensorBox
from jaxtrain.huggingface.layout import (
    LeafShape,
    StoredTensor,
    TensorPiece,
    leaf_shapes,
    stored_tensors,
    transpose_last,
)
from jaxtrain.state_format import chunks
from jaxtrain.state_format.leaves import stored_shape
from jaxtrain.state_format.slots import AS_THEY_REST, AllSlots, part_of
from jaxtrain.transformer.decoder import DecoderConfig

Template = Mapping[str, jax.ShapeDtypeStruct]


def read_params(
    folder: FolderOrPath,
    config: DecoderConfig,
    template: Template,
    slots: AllSlots = AS_THEY_REST,
) -> dict[str, jax.Array]:
    """Returns the parameters of `config` from a folder.

    template: shape, dtype and at-rest sharding of every leaf. slots: of leaves that are not in
    natural layer order at rest; their padding is zero. Each device's shard is read, cast and sent
    before the next, once if several devices share it; each process reads its own. Padded rows of
    the vocabulary are zero.

    Before a weight is read, raises ValueError where the template is not of this model, or tensors
    are missing, extra, of another shape or no floats: with the names of all. While reading, where a
    tied folder's lm_head differs from its embedding.
    """
    opened = open_folder("folder", folder)
    family, leaves = family_of(opened), leaf_shapes(config)
    with Folder(opened) as files:
        problems = _template_problems(template, leaves, slots)
        reader = _reader(files, config, family, leaves, problems)
        if reader.left_out:
            warnings.warn(
                f"{files.place}: {len(reader.left_out)} tensors of layers behind the model's, for "
                "multi-token prediction, are left out",
                stacklevel=2,
            )
        return {path: reader.leaf(path, spec, slots) for path, spec in template.items()}


def refuse_unfit(folder: FolderOrPath, config: DecoderConfig) -> None:
    """Raises ValueError as `read_params` does before it reads a weight; needs no device."""
    opened = open_folder("folder", folder)
    family, leaves = family_of(opened), leaf_shapes(config)
    with Folder(opened) as files:
        _reader(files, config, family, leaves, [])


def _reader(
    files: Folder,
    config: DecoderConfig,
    family: Family,
    leaves: dict[str, LeafShape],
    problems: list[str],
) -> LeafReader:
    """Returns the reader of a folder with this model. Raises ValueError with all that is wrong,
    `problems` first."""
    find_base(files, family)
    tensors = _spelling(files, config, family, leaves)
    copy = _tied_copy(files, config, family)
    beyond = _layers_beyond(files, config) if family.layers_beyond else []
    files.leave_out(beyond)
    problems = problems + files.problems + _tensor_problems(files, tensors, family, copy)
    if problems:
        raise ValueError("\n- ".join([f"{files.place} has not this model's weights:", *problems]))
    return LeafReader(files, tensors, copy, beyond)


def _template_problems(
    template: Template, leaves: Mapping[str, LeafShape], slots: AllSlots
) -> list[str]:
    problems = [f"template: {path} is missing" for path in leaves if path not in template]
    for path, spec in template.items():
        if path not in leaves:
            problems.append(f"template: {path} is no parameter of this model")
            continue
        if (shape := stored_shape(path, spec, slots)) != leaves[path].shape:
            problems.append(f"template: {path} is {shape}, and {leaves[path].shape} in the model")
        if not jnp.issubdtype(spec.dtype, jnp.floating):
            problems.append(f"template: {path} is {spec.dtype}; use a float")
        if spec.sharding is None:
            problems.append(f"template: {path} has no sharding; say where it goes")
    return problems


def _spelling(
    files: Folder, config: DecoderConfig, family: Family, leaves: dict[str, LeafShape]
) -> list[StoredTensor]:
    """Returns the model's tensors under the names of the folder, by the rules of the family that
    match most of them."""
    rules = [rules for rules in (family.tensors, family.alternatives) if rules]
    candidates = [stored_tensors(config, spelling, leaves) for spelling in rules]
    return max(
        candidates, key=lambda tensors: sum(tensor.name in files.tensors for tensor in tensors)
    )


def find_base(files: Folder, family: Family, before: str = "") -> None:
    """Renames tensors to the names of the class with a head: a folder that was saved from the class
    without one lacks the prefix `model.`. before: what stands before that prefix."""
    base = before + family.base
    if not any(name.startswith(base) for name in files.tensors):
        others = files.tensors.keys() - {before + family.name_of("head")}
        files.rename({name: base + name.removeprefix(before) for name in others})


def _layers_beyond(files: Folder, config: DecoderConfig) -> list[str]:
    """Returns the tensors of layers behind the model's that predict further tokens. Such layers
    have a matrix that joins a token's embedding to the hidden state."""
    names = ((name, re.match(r"model\.layers\.(\d+)\.", name)) for name in files.tensors)
    beyond = [(name, int(no[1])) for name, no in names if no and int(no[1]) >= config.layers]
    return [k for k, layer in beyond if f"model.layers.{layer}.eh_proj.weight" in files.tensors]


def _tied_copy(files: Folder, config: DecoderConfig, family: Family) -> str | None:
    """Returns the name of a second copy of a tied table. A single copy is renamed to the first."""
    head, embedding = family.name_of("head"), family.name_of("embedding")
    if not config.tied or head not in files.tensors:
        return None
    if embedding not in files.tensors:
        files.rename({head: embedding})
        return None
    return head


def _tensor_problems(
    files: Folder, tensors: list[StoredTensor], family: Family, copy: str | None
) -> list[str]:
    expected = {tensor.name: tensor.shape for tensor in tensors}
    if copy is not None:
        expected[copy] = expected[family.name_of("embedding")]
    extra = (k for k in files.tensors if k not in expected and not family.buffers.fullmatch(k))
    return shape_problems(files, expected) + [
        f"{name} {list(files.tensors[name].shape)} is not in this model" for name in extra
    ]


def shape_problems(files: Folder, expected: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Returns which of the `expected` tensors, name -> shape, a folder lacks, or has in another
    shape or as no floats."""
    problems = []
    for name, shape in expected.items():
        info = files.tensors.get(name)
        if info is None:
            problems.append(f"{name} {list(shape)} is missing")
        elif info.shape != shape:
            problems.append(f"{name} is {list(info.shape)}, and {list(shape)} in this model")
        elif info.dtype not in FLOATS:
            problems.append(f"{name} is {info.dtype}; the dtypes read are {', '.join(FLOATS)}")
    return problems


class LeafReader:
    """Reads leaves from an open folder that has all of them. copy: a second copy of a tied table,
    if any."""

    def __init__(
        self,
        files: Folder,
        tensors: Sequence[StoredTensor],
        copy: str | None = None,
        left_out: Sequence[str] = (),
    ) -> None:
        self.files, self.copy, self.left_out = files, copy, left_out
        self.parts: dict[str, list[tuple[StoredTensor, TensorPiece]]] = {}
        for tensor in tensors:
            for piece in tensor.pieces:
                self.parts.setdefault(piece.leaf, []).append((tensor, piece))

    def leaf(self, path: str, spec: jax.ShapeDtypeStruct, slots: AllSlots) -> jax.Array:
        """Returns one leaf. The host holds one shard of it at a time."""
        sharding: Any = spec.sharding
        parts = chunks.boxes_of(sharding.addressable_devices_indices_map(spec.shape), spec.shape)

        def read(part: chunks.Box) -> np.ndarray:
            spans = zip(*part, strict=True)
            return self.shard(path, tuple((start, start + n) for start, n in spans), spec.dtype)

        shards = []
        for part, devices in parts.items():
            values = part_of(slots.get(path), part, spec.dtype, read)
            # A copy: what a step donates must not be numpy's memory.
            copies = [jax.device_put(values, device, may_alias=False) for device in devices]
            shards += jax.block_until_ready(copies)
        return jax.make_array_from_single_device_arrays(
            spec.shape, sharding, shards, dtype=spec.dtype
        )

    def shard(self, path: str, box: TensorBox, dtype: Any) -> np.ndarray:
        """Returns part `box` of a leaf, zero where no tensor overlaps."""
        out = np.zeros([stop - start for start, stop in box], dtype)
        for tensor, index, tensor_box in self.overlaps(path, box):
            if tensor.order is not None:
                out[index] = self.reordered(tensor, tensor_box)
                continue
            values = self.files.read(tensor.name, _as_stored(tensor, tensor_box))
            if self.copy is not None and path == "embedding":
                self.compare(tensor.name, values, tensor_box)
            out[index] = np.swapaxes(values, -1, -2) if tensor.transposed else values
        return out

    def reordered(self, tensor: StoredTensor, box: TensorBox) -> np.ndarray:
        """Returns part `box` of a tensor whose columns are in another order than ours. Reads all
        columns between the first and the last of them."""
        assert tensor.order is not None, "a tensor with an order"
        *rows, (a, b) = box
        columns = np.argsort(tensor.order)[a:b]
        first, last = int(columns.min()), int(columns.max()) + 1
        values = self.files.read(tensor.name, _as_stored(tensor, (*rows, (first, last))))
        values = np.swapaxes(values, -1, -2) if tensor.transposed else values
        return values[..., columns - first]

    def compare(self, name: str, values: np.ndarray, box: TensorBox) -> None:
        """Raises ValueError if two tied tables differ: `transformers` then unties them, whatever
        config.json says."""
        if not np.array_equal(values, self.files.read(str(self.copy), box)):
            raise ValueError(
                f"{self.files.place}: {self.copy} differs from {name}, and config.json says that "
                "they are tied; set tie_word_embeddings to false there"
            )

    def overlaps(
        self, path: str, box: TensorBox
    ) -> Iterator[tuple[StoredTensor, tuple[Any, ...], TensorBox]]:
        """Yields the tensors that overlap `box`: (tensor, index within `box`, box of the tensor in
        our [in, out] layout)."""
        for tensor, piece in self.parts[path]:
            stacked, inner = box[: len(piece.stack_index)], box[len(piece.stack_index) :]
            if not all(a <= i < b for i, (a, b) in zip(piece.stack_index, stacked, strict=True)):
                continue
            part = [(a, min(b, n)) for (a, b), n in zip(inner, piece.shape, strict=True)]
            if any(a >= b for a, b in part):
                continue
            index = [i - a for i, (a, _) in zip(piece.stack_index, stacked, strict=True)]
            target = (*index, *(slice(0, b - a) for a, b in part))
            a, b = part.pop()
            yield tensor, target, (*part, (a + piece.offset, b + piece.offset))


def _as_stored(tensor: StoredTensor, box: TensorBox) -> TensorBox:
    return transpose_last(box) if tensor.transposed else box
