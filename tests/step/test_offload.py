"""What lies in the host's memory between two uses: the same run to the bit, wherever that may be.

XLA:CPU leaves values of a program where they are; what an accelerator's program saves by it is read
from one that was compiled for absent chips (experiments/LOG.md)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

import jaxtrain
from jaxtrain.session.session import Session

Opened = Callable[..., Session]
Stepped = Callable[[Session], dict[str, float]]


def deep(decoder: jaxtrain.Experiment, **execution: object) -> jaxtrain.Experiment:
    """Two layers, so that a loop of them stays one."""
    model = replace(decoder.model, layers=2)
    return replace(decoder, model=model, execution=jaxtrain.Execution(**execution))


@pytest.mark.usefixtures("optimising_compiler")
@pytest.mark.parametrize("mode", ["explicit", pytest.param("gspmd", marks=pytest.mark.exhaustive)])
def test_offloaded_residuals_change_no_bit(
    decoder: jaxtrain.Experiment, opened: Opened, stepped: Stepped, mode: str
) -> None:
    kept = jaxtrain.LayerLoop(remat="dots_and_attention", prefetch=False)
    found = []
    for offload in ((), ("input", "attention", "dots")):
        loop = replace(kept, offload=offload)
        session = opened(deep(decoder, mode=mode, loop=loop), fsdp=2, tensor=2)
        found.append([stepped(session) for _ in range(3)])
    assert found[0] == found[1]


def test_a_pipeline_keeps_its_residuals_on_the_device(decoder: jaxtrain.Experiment) -> None:
    loop = jaxtrain.LayerLoop(remat="full", offload=("input",))
    with pytest.raises(ValueError, match="a pipeline of stage=2 holds what its layers save"):
        jaxtrain.check(deep(decoder, loop=loop), jaxtrain.mesh_from_axes(stage=2))
    with pytest.raises(ValueError, match="remat='full' does not save; use remat='dots'"):
        jaxtrain.check(
            deep(decoder, loop=replace(loop, offload=("dots",))), jaxtrain.mesh_from_axes(data=2)
        )
