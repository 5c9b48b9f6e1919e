"""The kernels of a step where the experiment leaves them to the platform, and what they refuse."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace

from jaxtrain.attention.kernels import PlatformKernel
from jaxtrain.attention.splash import Splash
from jaxtrain.attention.triton import Triton
from jaxtrain.experiment import Execution, Experiment
from jaxtrain.moe.kernels import PlatformGroupedMatmul
from jaxtrain.moe.megablox import Megablox


def with_kernels(experiment: Experiment, platform: str, capability: int | None) -> Experiment:
    """The platform's choice where the experiment has none of its own."""
    execution = experiment.execution
    if execution.attention is None:
        execution = replace(execution, attention=PlatformKernel(platform, capability))
    if execution.grouped_matmul is None:
        execution = replace(execution, grouped_matmul=PlatformGroupedMatmul(platform))
    return replace(experiment, execution=execution)


def types_checked(execution: Execution, fields: Container[str]) -> bool:
    """`check_vma` of the step: off, unless asked for, where a Pallas kernel of JAX's refuses it:
    attention's on TPUs, and for documents on GPUs before Hopper, and megablox. fields: of a batch.
    """
    kernel = execution.attention
    if execution.check_vma is not None:
        return execution.check_vma
    if isinstance(execution.grouped_matmul, Megablox):
        return False
    if not isinstance(kernel, PlatformKernel):
        return not isinstance(kernel, Splash | Triton)
    before_hopper = kernel.capability is not None and kernel.capability < 9
    packed = kernel.platform == "gpu" and before_hopper and "segments" in fields
    return kernel.platform != "tpu" and not packed
