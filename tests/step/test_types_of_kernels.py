"""Types of what varies over mesh axes are off just where a kernel refuses them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import jaxtrain
from jaxtrain.attention import Blockwise, Cudnn, Splash, Triton
from jaxtrain.mesh.hardware import CHIPS
from jaxtrain.moe import Megablox, MosaicBlocks, TritonBlocks
from jaxtrain.optim.precision import bf16, fp32
from jaxtrain.step.assembly import assemble

SEQ = 128

CASES = [
    ("tpu_v5e", True, 64, bf16, None, False),
    ("tpu_v5e", True, 64, fp32, None, True),
    ("tpu_v5e", True, 64, bf16, Blockwise(), True),
    ("h100_sxm", True, 64, bf16, None, True),
    ("h100_sxm", True, 256, bf16, None, False),
    ("h100_sxm", False, 256, bf16, None, False),
    ("h100_sxm", True, 64, bf16, Triton(block=128), False),
    ("a100_80g", True, 64, bf16, None, False),
    ("a100_80g", False, 64, bf16, None, True),
    ("a100_80g", True, 64, fp32, None, True),
    ("a100_80g", True, 64, bf16, Cudnn(), True),
    ("tpu_v5e", True, 64, bf16, Splash(), False),
]
"""(chip, whether rows are packed, head_dim, precision, kernel, whether types are checked)"""


@pytest.mark.parametrize(
    ("chip", "documents", "head_dim", "precision", "kernel", "expected"), CASES, ids=str
)
def test_they_are_off_for_pallas(
    chip: str,
    documents: bool,
    head_dim: int,
    precision: Any,
    kernel: Any,
    expected: bool,
    decoder: jaxtrain.Experiment,
) -> None:
    (block,) = decoder.model.period
    block = replace(block, attention=replace(block.attention, head_dim=head_dim))
    decoder = replace(decoder, model=replace(decoder.model, period=(block,)), precision=precision)
    data = replace(decoder.data, isolate_documents=documents, seq=SEQ)
    spec = replace(jaxtrain.mesh_from_axes(data=2), chip=CHIPS[chip], simulated=False)
    for asked in (None, True, False):
        execution = jaxtrain.Execution(attention=kernel, check_vma=asked)
        made = assemble(
            replace(decoder, data=data, execution=execution), spec, fields_of(documents)
        )
        assert made.check_vma == (expected if asked is None else asked)


@pytest.mark.parametrize(
    ("chip", "kernel", "expected"),
    [
        ("h100_sxm", None, True),
        ("h100_sxm", TritonBlocks(), True),
        ("h100_sxm", MosaicBlocks(), True),
        ("tpu_v5e", Megablox(), False),
    ],
    ids=str,
)
def test_of_grouped_matmuls_megablox_refuses_them(
    chip: str, kernel: Any, expected: bool, decoder: jaxtrain.Experiment
) -> None:
    spec = replace(jaxtrain.mesh_from_axes(data=2), chip=CHIPS[chip], simulated=False)
    execution = jaxtrain.Execution(grouped_matmul=kernel)
    made = assemble(replace(decoder, execution=execution), spec, fields_of(True))
    assert made.check_vma == expected


def fields_of(documents: bool) -> Any:
    names = ("tokens", "targets", "weights", *(("segments", "positions") if documents else ()))
    return {name: ((SEQ,), "float32" if name == "weights" else "int32") for name in names}


OF_OTHERS = [
    ((Splash(), None), "h100_sxm", "execution.attention=Splash.*TPUs.*of GPUs"),
    ((Cudnn(), None), None, "execution.attention=Cudnn.*GPUs.*of CPUs; use attention=None"),
    ((Triton(), TritonBlocks()), "tpu_v5e", r"Triton.*\n.*Blocks"),
    (
        (None, MosaicBlocks()),
        "a100_80g",
        "MosaicBlocks.*compute capability 9, and the mesh's have 8; use grouped_matmul=None",
    ),
    ((None, MosaicBlocks()), None, "MosaicBlocks.*GPUs.*of CPUs"),
    ((None, MosaicBlocks()), "h100_sxm", ""),
    ((None, MosaicBlocks(interpret=True)), "a100_80g", ""),
    ((None, Megablox()), "h100_sxm", "execution.grouped_matmul=Megablox.*TPUs"),
    ((Triton(interpret=True), Megablox(interpret=True)), None, ""),
]


@pytest.mark.parametrize(("kernels", "chip", "told"), OF_OTHERS, ids=str)
def test_a_kernel_of_another_platform_is_refused(
    kernels: tuple[Any, Any], chip: str | None, told: str, decoder: jaxtrain.Experiment
) -> None:
    spec, (attention, grouped) = jaxtrain.mesh_from_axes(data=2), kernels
    if chip is not None:
        spec = replace(spec, chip=CHIPS[chip], simulated=False)
    execution = jaxtrain.Execution(attention=attention, grouped_matmul=grouped)
    asked = replace(decoder, execution=execution)
    if not told:
        assemble(asked, spec, fields_of(True))
        return
    with pytest.raises(ValueError, match=told):
        assemble(asked, spec, fields_of(True))
