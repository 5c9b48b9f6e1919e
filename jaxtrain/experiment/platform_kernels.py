"""The kernels that a platform chooses for a step, and their violations."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import numpy as np

from jaxtrain.attention.fused import FusedKernel
from jaxtrain.attention.kernels import AttentionKernel, PlatformKernel, choose
from jaxtrain.attention.online_softmax import AttentionMask, Scoring
from jaxtrain.attention.splash import Splash
from jaxtrain.attention.triton import Triton
from jaxtrain.collectives.rows import Ragged
from jaxtrain.experiment import Execution, Experiment
from jaxtrain.moe.kernels import PlatformGroupedMatmul
from jaxtrain.moe.megablox import Megablox
from jaxtrain.operations.attention import AttentionCall
from jaxtrain.operations.block import Block, attentions, mixtures


def with_kernels(experiment: Experiment, platform: str, capability: int | None) -> Experiment:
    """Fills in the platform's kernels where the experiment has none."""
    execution = experiment.execution
    if execution.attention is None:
        execution = replace(execution, attention=PlatformKernel(platform, capability))
    if execution.grouped_matmul is None:
        execution = replace(execution, grouped_matmul=PlatformGroupedMatmul(platform, capability))
    return replace(experiment, execution=execution)


def platform_violations(execution: Execution, platform: str, capability: int | None) -> list[str]:
    """Returns violations of kernels and collectives of another platform."""
    violations, collectives = [], execution.collectives
    if platform == "cpu" and collectives is not None and isinstance(collectives.experts, Ragged):
        violations.append(
            "execution.collectives.experts=Ragged() is XLA's ragged all-to-all, which XLA:CPU has "
            "not; use experts=Padded()"
        )
    for name in ("attention", "grouped_matmul"):
        kernel = getattr(execution, name)
        target = getattr(kernel, "runs_on", platform)
        needed = getattr(kernel, "gpu_capability", None)
        if getattr(kernel, "interpret", False):
            continue
        if target != platform:
            violations.append(
                f"execution.{name}={kernel!r} is for {target.upper()}s, and the mesh is of "
                f"{platform.upper()}s; use {name}=None, the platform's own"
            )
        elif needed is not None and capability is not None and needed != capability:
            violations.append(
                f"execution.{name}={kernel!r} is for GPUs of compute capability {needed}, and the "
                f"mesh's have {capability}; use {name}=None, the platform's own"
            )
    return violations


class Sequences(NamedTuple):
    """Sequences of attention on a device. seq: tokens of a row. documents: True if rows are packed.
    dtype: of queries, keys and values."""

    seq: int
    documents: bool
    dtype: np.dtype


def platform_attention(
    kernel: PlatformKernel, call: AttentionCall, sequences: Sequences, *, checked: bool
) -> AttentionKernel:
    """The platform's kernel for a layer. checked: True inside a shard_map with `check_vma=True`."""
    return choose(
        kernel.platform,
        **sequences._asdict(),
        head_dim=call.head_dim,
        window=call.window,
        softcap=call.softcap,
        function=call.scores is not None,
        checked=checked,
        capability=kernel.capability,
    )


def kernel_refusals(kernel: object, blocks: Iterable[Block], sequences: Sequences) -> list[str]:
    """Returns the reasons why a fused kernel that the experiment names cannot compute the attention
    of these blocks."""
    if not isinstance(kernel, FusedKernel):
        return []
    reasons: list[str] = []
    for call in dict.fromkeys(call for block in blocks for call in attentions(block)):
        mask = AttentionMask(call.causal, call.window)
        scoring = Scoring(mask, 1.0, call.softcap, call.scores)
        refusals = partial(
            kernel.refusals, scoring=scoring, documents=sequences.documents, between=False
        )
        shape = (1, sequences.seq, call.heads, call.head_dim)
        # Traced, since a kernel asks for the type of its queries.
        jax.eval_shape(
            lambda q, refusals=refusals: reasons.extend(refusals(q)),
            jax.ShapeDtypeStruct(shape, sequences.dtype),
        )
    return [
        f"execution.attention={kernel!r}: {reason}; use attention=None, the platform's own"
        for reason in dict.fromkeys(reasons)
    ]


def types_checked(
    execution: Execution, blocks: Iterable[Block], sequences: Sequences | None
) -> bool:
    """`check_vma` of the step: the configured value, else False if a Pallas kernel refuses it:
    megablox, or an attention kernel that is chosen only without checks. blocks: of all layers.
    sequences: None if a batch has no tokens."""
    kernel, grouped, blocks = execution.attention, execution.grouped_matmul, list(blocks)
    if execution.check_vma is not None:
        return execution.check_vma
    experts = any(True for block in blocks for _ in mixtures(block))
    platforms = isinstance(grouped, PlatformGroupedMatmul) and grouped.platform == "tpu" and experts
    if isinstance(grouped, Megablox) or platforms:
        return False
    if not isinstance(kernel, PlatformKernel):
        return not isinstance(kernel, Splash | Triton)
    if sequences is None:
        return True
    return all(
        platform_attention(kernel, call, sequences, checked=True)
        == platform_attention(kernel, call, sequences, checked=False)
        for block in blocks
        for call in attentions(block)
    )
