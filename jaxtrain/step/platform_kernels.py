"""The kernels of a step where the experiment leaves them to the platform, and what they refuse."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from jaxtrain.attention.kernels import AttentionKernel, PlatformKernel, choose
from jaxtrain.attention.splash import Splash
from jaxtrain.attention.triton import Triton
from jaxtrain.collectives.rows import Ragged
from jaxtrain.experiment import Execution, Experiment
from jaxtrain.models.description import AttentionCall, ExpertCall, Operation
from jaxtrain.moe.kernels import PlatformGroupedMatmul
from jaxtrain.moe.megablox import Megablox


def with_kernels(
    experiment: Experiment, platform: str, capability: int | None
) -> tuple[Experiment, list[str]]:
    """The platform's choice where the experiment has none of its own, and which of its own are
    another platform's."""
    execution = experiment.execution
    found = _of_others(execution, platform)
    if execution.attention is None:
        execution = replace(execution, attention=PlatformKernel(platform, capability))
    if execution.grouped_matmul is None:
        execution = replace(execution, grouped_matmul=PlatformGroupedMatmul(platform))
    return replace(experiment, execution=execution), found


def _of_others(execution: Execution, platform: str) -> list[str]:
    found, collectives = [], execution.collectives
    if platform == "cpu" and collectives is not None and isinstance(collectives.experts, Ragged):
        found.append(
            "execution.collectives.experts=Ragged() is XLA's ragged all-to-all, which XLA:CPU has "
            "not; use experts=Padded()"
        )
    for name in ("attention", "grouped_matmul"):
        kernel = getattr(execution, name)
        meant = getattr(kernel, "runs_on", platform)
        if meant != platform and not getattr(kernel, "interpret", False):
            found.append(
                f"execution.{name}={kernel!r} is for {meant.upper()}s, and the mesh is of "
                f"{platform.upper()}s; use {name}=None, the platform's own"
            )
    return found


class Sequences(NamedTuple):
    """What attention is of on a device. seq: tokens of a row; documents: whether rows are packed;
    dtype: of queries, keys and values."""

    seq: int
    documents: bool
    dtype: np.dtype


def attention_of(
    kernel: PlatformKernel, call: AttentionCall, sequences: Sequences, *, checked: bool
) -> AttentionKernel:
    """What the platform's choice is for a layer. checked: whether in a shard_map with
    `check_vma=True`."""
    return choose(
        kernel.platform,
        **sequences._asdict(),
        head_dim=call.head_dim,
        window=call.window,
        softcap=call.softcap,
        checked=checked,
        capability=kernel.capability,
    )


def types_checked(
    execution: Execution, layers: Iterable[Operation], sequences: Sequences | None
) -> bool:
    """`check_vma` of the step: off, unless asked for, where a Pallas kernel refuses it: megablox,
    and what attention is given where types are not checked. layers: what they do. sequences: None
    where a batch has no tokens."""
    kernel, grouped, each = execution.attention, execution.grouped_matmul, list(layers)
    if execution.check_vma is not None:
        return execution.check_vma
    experts = any(isinstance(call, ExpertCall) for call in each)
    platforms = isinstance(grouped, PlatformGroupedMatmul) and grouped.platform == "tpu" and experts
    if isinstance(grouped, Megablox) or platforms:
        return False
    if not isinstance(kernel, PlatformKernel):
        return not isinstance(kernel, Splash | Triton)
    if sequences is None:
        return True
    return all(
        attention_of(kernel, call, sequences, checked=True)
        == attention_of(kernel, call, sequences, checked=False)
        for call in each
        if isinstance(call, AttentionCall)
    )
