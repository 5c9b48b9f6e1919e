"""Types of what varies over mesh axes are off just where a kernel refuses them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import jaxtrain
from jaxtrain.attention import Blockwise, Cudnn, Splash, Triton
from jaxtrain.mesh.hardware import CHIPS
from jaxtrain.moe import Megablox, TritonBlocks
from jaxtrain.step.assembly import assemble

CASES = [
    ("tpu_v5e", True, None, False),
    ("tpu_v5e", True, Blockwise(), True),
    ("h100_sxm", True, None, True),
    ("h100_sxm", True, Triton(), False),
    ("a100_80g", True, None, False),
    ("a100_80g", False, None, True),
    ("a100_80g", True, Cudnn(), True),
    ("tpu_v5e", True, Splash(), False),
]


@pytest.mark.parametrize(("chip", "documents", "kernel", "expected"), CASES, ids=str)
def test_they_are_off_for_pallas(
    chip: str, documents: bool, kernel: Any, expected: bool, decoder: jaxtrain.Experiment
) -> None:
    data = replace(decoder.data, isolate_documents=documents)
    spec = replace(jaxtrain.mesh_from_axes(data=2), chip=CHIPS[chip], simulated=False)
    for asked in (None, True, False):
        execution = jaxtrain.Execution(attention=kernel, check_vma=asked)
        made = assemble(
            replace(decoder, data=data, execution=execution), spec, fields_of(documents)
        )
        assert made.check_vma == (expected if asked is None else asked)


@pytest.mark.parametrize(
    ("kernel", "expected"), [(None, True), (TritonBlocks(), True), (Megablox(), False)], ids=str
)
def test_of_grouped_matmuls_megablox_refuses_them(
    kernel: Any, expected: bool, decoder: jaxtrain.Experiment
) -> None:
    spec = replace(jaxtrain.mesh_from_axes(data=2), chip=CHIPS["h100_sxm"], simulated=False)
    execution = jaxtrain.Execution(grouped_matmul=kernel)
    made = assemble(replace(decoder, execution=execution), spec, fields_of(True))
    assert made.check_vma == expected


def fields_of(documents: bool) -> Any:
    names = ("tokens", "targets", "weights", *(("segments", "positions") if documents else ()))
    return {name: ((8,), "float32" if name == "weights" else "int32") for name in names}
