"""What an experiment leaves to the platform: the loop over layers, and options of the compiler."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import jaxtrain
from jaxtrain.mesh.compiler_options import FP8_KERNELS
from jaxtrain.mesh.hardware import CHIPS
from jaxtrain.optim.precision import bf16, fp8, int8
from jaxtrain.step.assembly import Assembly, assemble


def assembled(experiment: jaxtrain.Experiment, chip: str | None, **axes: int) -> Assembly:
    """chip: None for the mesh on simulated devices."""
    spec = jaxtrain.mesh_from_axes(**axes)
    if chip is not None:
        spec = replace(spec, chip=CHIPS[chip], simulated=False)
    return assemble(experiment, spec)


LOOPS: list[tuple[str | None, dict[str, int], bool]] = [
    ("h200", {"data": 1}, True),
    ("h200", {"data": 8}, True),
    ("h200", {"fsdp": 2}, False),
    ("h200", {"stage": 2}, False),
    ("tpu_v5e", {"data": 1}, False),
    (None, {"fsdp": 2}, True),
]


@pytest.mark.parametrize(("chip", "axes", "unrolled"), LOOPS, ids=str)
def test_layers_are_unrolled_where_they_fetch_no_weights(
    decoder: jaxtrain.Experiment, chip: str | None, axes: dict[str, int], unrolled: bool
) -> None:
    decoder = replace(decoder, precision=bf16)
    found = assembled(decoder, chip, **axes).loop
    remat = "none" if chip is None else "dots_and_attention"
    assert found == jaxtrain.LayerLoop(unroll=unrolled, remat=remat)
    asked = jaxtrain.LayerLoop(unroll=not unrolled, remat="full")
    own = replace(decoder, execution=jaxtrain.Execution(loop=asked))
    assert assembled(own, chip, **axes).loop == asked


@pytest.mark.parametrize(
    ("chip", "precision", "options"),
    [("h200", fp8, FP8_KERNELS), ("h200", int8, {}), ("h200", bf16, {}), ("tpu_v5e", fp8, {})],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:.*run(s)? as")
def test_fp8_on_gpus_is_multiplied_by_cublas(
    decoder: jaxtrain.Experiment, chip: str, precision: Any, options: dict[str, bool]
) -> None:
    made = assembled(replace(decoder, precision=precision), chip, data=1)
    assert made.compiler_options == options
    own = (("xla_gpu_enable_triton_gemm", True), ("xla_other", 1))
    asked = replace(made, spec=replace(made.spec, compiler_options=own))
    assert asked.compiler_options == dict(own), "a mesh file's choice stands"
