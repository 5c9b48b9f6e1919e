"""Low-rank adapters out of folders as Hugging Face `peft` writes them.

Such a folder has adapter_config.json and adapter_model.safetensors: for each adapted matrix
A [rank, in] and B [out, rank], under the matrix's name in the folder of the base model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import NamedTuple

import jax

from jaxtrain.experiment.fine_tuning import LoRA
from jaxtrain.files.opened import FolderOrPath, OpenedFolder, open_folder
from jaxtrain.huggingface.config import family_and_fields, require_decoder
from jaxtrain.huggingface.folder import Folder
from jaxtrain.huggingface.layout import StoredTensor, TensorPiece, leaf_shapes, stored_tensors
from jaxtrain.huggingface.peft_config import MERGE, read_settings, refusal
from jaxtrain.huggingface.read import LeafReader, Template, find_base, shape_problems
from jaxtrain.models.adapters import adapter_places
from jaxtrain.models.description import ADAPTER_A, ADAPTER_B
from jaxtrain.state_format.slots import AS_THEY_REST, AllSlots
from jaxtrain.transformer.decoder import DecoderConfig

WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
"""Of every tensor: `peft` wraps the model."""
PARTS = (".lora_A.weight", ".lora_B.weight")


def huggingface_lora(folder: FolderOrPath, model: DecoderConfig) -> LoRA:
    """Returns the adapters of a folder as `peft` writes it, for `FineTuning(lora=...)`: their rank,
    their alpha, and the model's matrices that have one.

    Raises ValueError where there is no such folder, or it adds something else to the model: with
    all that is in the way.
    """
    opened = open_folder("folder", folder)
    require_decoder(model, "huggingface_lora(folder, model)")
    rank, alpha = read_settings(opened)
    with _opened(opened, model) as adapters:
        adapted = (leaf for module, leaf in adapters.leaves.items() if module in adapters.modules)
        targets = tuple(dict.fromkeys(adapted))
        problems = adapters.problems(dict.fromkeys(targets, rank))
        if not targets:
            problems.append(f"{WEIGHTS} has no adapter of a matrix of this model")
        adapters.refuse(problems)
    return LoRA(rank, alpha, targets)


def refuse_unfit_adapters(
    folder: FolderOrPath, model: DecoderConfig, lora: LoRA | None, adapted: Set[str]
) -> None:
    """Raises ValueError if a folder has not the adapters of `lora` in this model. adapted: the
    matrices that its targets choose. Reads no weight."""
    opened = open_folder("adapters", folder)
    theirs = huggingface_lora(opened, model)
    use = f'use lora=huggingface_lora("{opened.place}", model), which is {theirs}'
    if lora is None:
        raise ValueError(
            f"{opened.place} has adapters, and fine_tuning.lora=None trains none; {use}"
        )
    problems = []
    if lora.rank != theirs.rank:
        problems.append(f"rank={lora.rank}, there {theirs.rank}")
    if lora.alpha / lora.rank != theirs.alpha / theirs.rank:
        problems.append(
            f"alpha / rank is {lora.alpha / lora.rank:g}, there {theirs.alpha / theirs.rank:g}"
        )
    if more := sorted(adapted - {*theirs.targets}):
        problems.append(f"targets choose {', '.join(more)} too")
    if less := sorted({*theirs.targets} - adapted):
        problems.append(f"targets do not choose {', '.join(less)}")
    if problems:
        raise ValueError(f"fine_tuning.lora: {'; '.join(problems)}; {use}")


def read_adapters(
    folder: FolderOrPath, model: DecoderConfig, template: Template, slots: AllSlots = AS_THEY_REST
) -> dict[str, jax.Array]:
    """Returns the adapters' leaves from a folder as `peft` writes it.

    template: shape, dtype and at-rest sharding of every leaf of an adapter. slots: as for
    `read_params`. Raises ValueError where the folder lacks one of them, has it in another shape, or
    has others.
    """
    opened = open_folder("folder", folder)
    ranks = ranks_of({path: leaf.shape for path, leaf in template.items()})
    read_settings(opened)
    with _opened(opened, model) as adapters:
        adapters.refuse(adapters.problems(ranks))
        reader = LeafReader(adapters.files, adapter_tensors(adapters.base, ranks))
        return {path: reader.leaf(path, spec, slots) for path, spec in template.items()}


def ranks_of(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """Returns matrix -> rank of the adapters among these leaves."""
    return {k.removesuffix(ADAPTER_A): v[-1] for k, v in shapes.items() if k.endswith(ADAPTER_A)}


def base_tensors(model: DecoderConfig) -> list[StoredTensor]:
    """Returns the tensors of a model's own folder. Raises ValueError if no family has the model."""
    return stored_tensors(model, family_and_fields(model)[0].tensors, leaf_shapes(model))


def leaf_of(tensor: StoredTensor) -> str | None:
    """Returns the matrix that has this tensor of the base model alone; None if several share it."""
    return tensor.pieces[0].leaf if len(tensor.pieces) == 1 else None


def module_of(tensor: StoredTensor) -> str:
    """Returns the module that has this tensor of the base model."""
    return tensor.name.removesuffix(".weight")


def adapter_tensors(base: Sequence[StoredTensor], ranks: Mapping[str, int]) -> list[StoredTensor]:
    """Returns the tensors of the adapters of these matrices: leaf -> rank."""
    tensors = []
    for tensor in base:
        path = leaf_of(tensor)
        if path is None or path not in ranks:
            continue
        (piece,), rank, module = tensor.pieces, ranks[path], PREFIX + module_of(tensor)
        rows, columns = piece.shape
        a = TensorPiece(path + ADAPTER_A, piece.stack_index, (rows, rank), 0)
        b = TensorPiece(path + ADAPTER_B, piece.stack_index, (rank, columns), 0)
        tensors += [
            StoredTensor(module + PARTS[0], (rank, rows), True, (a,)),
            StoredTensor(module + PARTS[1], (columns, rank), True, (b,), tensor.order),
        ]
    return tensors


class _Adapters(NamedTuple):
    """An open folder of adapters, beside the model.

    base: tensors of the model's own folder. leaves: module -> matrix, for each module that is one
    matrix and can have an adapter, in order. modules: those with an adapter, each once.
    """

    files: Folder
    model: DecoderConfig
    base: list[StoredTensor]
    leaves: dict[str, str]
    modules: dict[str, None]

    def problems(self, ranks: Mapping[str, int]) -> list[str]:
        """Returns which adapters of these matrices the folder lacks, or has in addition."""
        expected = {t.name: t.shape for t in adapter_tensors(self.base, ranks)}
        several = {module_of(t): t.pieces for t in self.base}
        problems = self.files.problems + shape_problems(self.files, expected)
        for name, info in self.files.tensors.items():
            if name in expected:
                continue
            module, found, _ = name.removeprefix(PREFIX).rpartition(".lora_")
            pieces = several.get(module, ())
            if not found:
                why = "is no adapter: a whole tensor (resized vocabulary, modules_to_save)"
            elif not info.name.startswith(PREFIX):
                why = f"does not begin with {PREFIX}, as `peft` writes it"
            elif module in self.leaves:
                why = "is not trained by these targets"
            elif len(pieces) > 1:
                leaves = ", ".join(piece.leaf for piece in pieces)
                why = f"is of several matrices here, in one: {leaves}"
            elif pieces:
                why = f"is of {pieces[0].leaf}, which can have no adapter here"
            else:
                why = "is of no matrix of this model"
            problems.append(f"{info.name} {why}")
        return problems

    def refuse(self, problems: Sequence[str]) -> None:
        """Raises ValueError if there are problems."""
        if not problems:
            return
        apart = ""
        if self.model.periods > 1 and any(problem.endswith(" is missing") for problem in problems):
            apart = (
                "where some layers alone have adapters, give every layer a place of its own: "
                f"dataclasses.replace(model, period=model.period * {self.model.periods})"
            )
        raise refusal(self.files.place, problems, apart, MERGE)


@contextmanager
def _opened(folder: OpenedFolder, model: DecoderConfig) -> Iterator[_Adapters]:
    family, base = family_and_fields(model)[0], base_tensors(model)
    places = adapter_places(model.describe())
    spelled = {module_of(tensor): leaf_of(tensor) for tensor in base}
    leaves = {module: leaf for module, leaf in spelled.items() if leaf in places}
    with Folder(folder, WEIGHTS, index=None) as files:
        find_base(files, family, PREFIX)
        modules = dict.fromkeys(
            name.removeprefix(PREFIX).removesuffix(part)
            for name in files.tensors
            for part in PARTS
            if name.endswith(part)
        )
        yield _Adapters(files, model, base, leaves, modules)
