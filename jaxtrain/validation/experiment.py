"""Checks an experiment, by itself and on a mesh. Each violation has a remedy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from jaxtrain.collectives.lax_form import Lax
from jaxtrain.compression.compressed import Compressed
from jaxtrain.compression.residuals import CompressedLeaf
from jaxtrain.data import BigramChain, ByteTokenizer
from jaxtrain.experiment import Experiment, Sample
from jaxtrain.experiment.evaluation import length_violations
from jaxtrain.experiment.platform_kernels import platform_violations
from jaxtrain.experiment.resolve import Resolved
from jaxtrain.mesh.axes import EXPERT_AXES, MODES, ROWS, STAGE
from jaxtrain.mesh.mesh import MeshSpec
from jaxtrain.models.check import positions_of, vocab_of
from jaxtrain.models.layered import ModelConfig
from jaxtrain.moe.grouped import GroupedMatmul
from jaxtrain.moe.kernels import PlatformGroupedMatmul
from jaxtrain.nn.remat import remat_violations
from jaxtrain.remedies import Clash, Near
from jaxtrain.validation.batch import rows_violations, whole_violations
from jaxtrain.validation.experts import group_violations, narrow_violations
from jaxtrain.validation.model import model_violations
from jaxtrain.validation.own_attention import own_attention_violations
from jaxtrain.validation.own_data import beyond_vocabulary
from jaxtrain.validation.preferences import preference_violations
from jaxtrain.validation.sequence import cut_violations, tokens_violations
from jaxtrain.validation.split import unsplit

METRICS = ("eval_loss", "bits_per_byte")
"""Metrics of an evaluation. bits_per_byte needs tokens that stand for bytes."""


def violations_of(resolved: Resolved, unbuildable: list[str]) -> list[str]:
    """Returns every violation that is known before the model is built. unbuildable: those that
    `resolve` returned."""
    e, spec, violations = resolved.experiment, resolved.spec, field_violations(resolved)
    if isinstance(e.model, ModelConfig):
        violations += platform_violations(e.execution, spec.platform, spec.chip.capability)
    violations += mode_violations(resolved)
    violations += unbuildable or model_violations(resolved)
    violations += mesh_violations(resolved)
    return violations if unbuildable else violations + resolved.adapter_violations


def mode_violations(resolved: Resolved) -> list[str]:
    """Returns violations of the requested mode, of settings that it does not have, and of sums that
    do not go together."""
    execution, mode, violations = resolved.experiment.execution, resolved.mode, []
    if mode not in MODES:
        violations.append(f"execution.mode={mode!r}; the modes are {' and '.join(MODES)}")
    if mode == "explicit" and not resolved.can("explicit"):
        violations.append(
            "execution.mode='explicit' runs models that describe themselves: inside it every "
            "collective is stated by the model through its Communicator, and this model states "
            "none; use mode='gspmd' (or None)"
        )
    if mode == "gspmd" and execution.collectives is not None:
        violations.append(
            f"execution.collectives={execution.collectives!r} is for mode='explicit'; "
            f"under gspmd XLA chooses them: use collectives=None"
        )
    if mode == "gspmd" and execution.reducer != Lax():
        violations.append(
            f"execution.reducer={execution.reducer!r} is for mode='explicit'; under "
            f"gspmd XLA sums the gradients: use reducer=Lax()"
        )
    if execution.reduce_layers and isinstance(execution.reducer, Compressed):
        violations.append(
            "execution.reduce_layers=True sums in every microbatch, and a compressed reducer "
            "carries its errors from step to step; use reduce_layers=False or an exact reducer"
        )
    if mode == "gspmd" and execution.reduce_layers:
        violations.append(
            "execution.reduce_layers=True is for mode='explicit'; under gspmd XLA chooses when it "
            "sums: use reduce_layers=False"
        )
    return violations


def unused_reducer(reducer: Any, parts: Mapping[str, CompressedLeaf], small_leaf: int) -> list[str]:
    """Returns a violation if a compressed reducer would compress no leaf. parts: the leaves that
    are large enough. On one device there is no sum, and any reducer is accepted."""
    if not isinstance(reducer, Compressed):
        return []
    rule = f"execution.reducer={reducer!r} compresses no leaf"
    if not parts:
        return [
            f"{rule}: none its codec takes has more than execution.small_leaf={small_leaf} "
            f"elements; use a lower small_leaf, or reducer=Lax()"
        ]
    sizes = next(iter(parts.values())).sizes
    if not sizes or any(part.takes(reducer.codec) for part in parts.values()):
        return []
    summed = [part.matrices for part in parts.values() if part.summed]
    if not summed:
        axes = " x ".join(f"{axis}={n}" for axis, n in sizes.items())
        fixes = ["reducer=Lax()"]
        if any(ROWS[axis].parameters or ROWS[axis].optimizer for axis in sizes):
            fixes.insert(0, f"sharding=data_parallel(){' | tensor()' * ('tensor' in sizes)}")
        if "data" not in sizes:
            fixes.insert(0, "a mesh axis data > 1")
        return [
            f"{rule}: the optimizer state of every large one is split over all of {axes}, so its "
            f"gradients are scattered and no sum of whole ones is left; use {', or '.join(fixes)}"
        ]
    most = max(min(part.rows, part.cols) for part in summed)
    return [
        f"{rule}: a device's matrices have at most {most} rows and columns, and the rank must not "
        f"be higher; use rank={most} or lower, or reducer=Lax()"
    ]


def _warmup_violations(reducer: Any, steps: int) -> list[str]:
    """Returns a violation if a compressed reducer's exact steps fill the run."""
    if not isinstance(reducer, Compressed) or not 1 <= steps <= reducer.warmup_steps:
        return []
    return [
        f"execution.reducer.warmup_steps={reducer.warmup_steps} leaves none of the {steps} steps "
        f"to be compressed; use warmup_steps={round(0.15 * steps)} (15%), or reducer=Lax()"
    ]


def field_violations(resolved: Resolved) -> list[str]:
    """Returns violations that do not depend on the mesh."""
    e, violations = resolved.experiment, []
    for name in ("steps", "microbatches"):
        if getattr(e, name) < 1:
            violations.append(f"{name}={getattr(e, name)!r}; use a whole number of at least 1")
    if e.clip_norm is not None and not 0.0 < e.clip_norm < math.inf:
        violations.append(f"clip_norm={e.clip_norm!r}; use a positive bound, or None for none")
    if e.ema_decay is not None and not 0.0 < e.ema_decay < 1.0:
        violations.append(f"ema_decay={e.ema_decay!r}; use a decay in (0, 1), or None for none")
    loop = e.execution.loop
    if loop is not None:
        violations += remat_violations(loop.remat, loop.offload)
    violations += whole_violations(e)
    if hasattr(e.optimizer, "violations"):
        violations += e.optimizer.violations(e.steps)
    positions, seq = positions_of(resolved.description), getattr(e.data, "seq", None)
    if isinstance(positions, int) and isinstance(seq, int) and seq > positions:
        violations.append(
            Clash(
                f"data.seq={seq} is longer than learned_positions={positions}",
                f"use seq={positions} or more positions",
                sizes={"learned_positions": positions},
                ways=[(Near("seq", positions),), (Near("learned_positions", seq),)],
            )
        )
    kernel = e.execution.attention
    if kernel is not None and (isinstance(kernel, type) or not callable(kernel)):
        violations.append(
            f"execution.attention={kernel!r} is no kernel; use one such as "
            f"{_kernel_like(kernel)}, or None for the platform's own"
        )
    grouped = e.execution.grouped_matmul
    kinds = PlatformGroupedMatmul | GroupedMatmul | None
    if isinstance(grouped, type) or not isinstance(grouped, kinds):
        violations.append(
            f"execution.grouped_matmul={grouped!r} is no kernel; use a value of jaxtrain.moe such "
            f"as BlockLoop(), or None for the platform's own"
        )
    profile = e.logging.profile
    if profile is not None and profile.first >= e.steps:
        violations.append(
            f"logging.profile={profile} begins after the last step, {e.steps - 1}; use "
            f"first={max(e.steps - 1, 0)} or less, or more steps"
        )
    violations += _product_violations(e) + preference_violations(resolved)
    violations += _warmup_violations(e.execution.reducer, e.steps) + _vocabulary_violations(
        resolved
    )
    return violations + _sample_violations(resolved) + _best_violations(e)


def _product_violations(experiment: Experiment) -> list[str]:
    """Returns a violation for products in 8 bits if the model does not name their matrices."""
    products = experiment.precision.products
    if products is None or isinstance(experiment.model, ModelConfig):
        return []
    return [
        f"precision.products={products!r} multiplies by the matrices that a model names in "
        f"describe(), and this one does not describe itself; use products=None"
    ]


def _kernel_like(kernel: Any) -> str:
    """Returns the kernel that was probably meant by a kernel's name or class."""
    name = str(getattr(kernel, "__name__", kernel)).lower()
    kernels = ("Reference()", "Blockwise()", "Cudnn()", "Triton()", "Splash()", "FlashAttention()")
    call = next((call for call in kernels if call[:-2].lower() in name), kernels[1])
    return f"jaxtrain.{'hopper' if call == kernels[-1] else 'attention'}.{call}"


def is_of_task(metric: str) -> bool:
    """Returns True for the name of a metric that is of no held-out rows."""
    name, _, task = metric.partition("/")
    return bool(task) and name not in METRICS


def _best_violations(experiment: Experiment) -> list[str]:
    policy = experiment.checkpoints
    best = policy.keeping.best if policy is not None else None
    if best is None:
        return []
    if experiment.evaluation is None:
        return [f"checkpoints.keep.best={best!r} goes by an evaluation; give one, or best=None"]
    ends = ("", *(f"/{name}" for name in experiment.evaluation.named_sets))
    values = [f"{metric}{end}" for end in ends for metric in METRICS]
    if best.metric not in values:
        if experiment.evaluation.tasks is not None:
            if is_of_task(best.metric):
                return []  # which ones there are the harness says
            values.append("a task's, such as acc/hellaswag")
        metrics = " or ".join(values)
        return [f"checkpoints.keep.best.metric={best.metric!r}; an evaluation has {metrics}"]
    without_bytes = {"tokens of a BigramChain stand": isinstance(experiment.data, BigramChain)}
    without_bytes["pairs of answers stand"] = experiment.objective is not None
    return [
        f"checkpoints.keep.best.metric={best.metric!r}: {they_stand} for no bytes; use eval_loss"
        for they_stand, is_so in without_bytes.items()
        if is_so and best.metric.startswith("bits_per_byte")
    ]


def _vocabulary_violations(resolved: Resolved) -> list[str]:
    """Returns a violation for token ids that have no row in the model, if the unopened data says
    how many ids it has. A trained tokenizer may come out smaller than requested."""
    data = resolved.experiment.data
    vocab = vocab_of(resolved.experiment.model, resolved.description)
    tokenizer = getattr(data, "tokenizer", None)
    ids = getattr(data, "vocab", None) if tokenizer is None else getattr(tokenizer, "size", None)
    if not isinstance(vocab, int) or not isinstance(ids, int):
        return []
    return beyond_vocabulary(ids, vocab)


def _sample_violations(resolved: Resolved) -> list[str]:
    """Returns a violation for a sample longer than the limit, or than the learned positions. A
    prompt whose tokens are unknown until the tokenizer is built counts as one token."""
    e, positions = resolved.experiment, positions_of(resolved.description)
    if e.sample is None:
        return []
    too_long = [f"evaluation.sample: {v}" for v in length_violations(e.sample.tokens)]
    if too_long or not isinstance(positions, int):
        return too_long
    tokenizer, prompt = getattr(e.data, "tokenizer", None), 1
    if isinstance(tokenizer, ByteTokenizer):
        prompt = len(tokenizer.encode(e.sample.prompt))
    return sample_length_violations(e.sample, positions, prompt, "a prompt of at least")


def sample_length_violations(
    sample: Sample, positions: int | None, prompt: int, begins: str
) -> list[str]:
    """Returns a violation for a sample that passes the learned positions, None without. prompt: its
    tokens. begins: the violation."""
    if positions is None or prompt + sample.tokens <= positions:
        return []
    room = positions - prompt
    remedy = f"tokens={room} or less" if room > 0 else "a shorter prompt"
    return [
        f"evaluation.sample: {begins} {prompt} tokens and tokens={sample.tokens} pass "
        f"learned_positions={positions}; use {remedy}, or more positions"
    ]


def mesh_violations(resolved: Resolved) -> list[str]:
    """Returns violations of batch, mesh axes and the model's fields that do not fit together."""
    violations = cut_violations(resolved) + own_attention_violations(resolved)
    violations += rows_violations(resolved) + _idle_axes(resolved) + _axis_violations(resolved)
    violations += _pipeline_violations(resolved)
    if resolved.description is None:
        return violations
    explicit, sharding = resolved.mode == "explicit", resolved.experiment.sharding
    violations += narrow_violations(resolved)
    violations += unsplit(resolved.description, sharding, resolved.sizes, explicit=explicit)
    seq = getattr(resolved.experiment.data, "seq", None)
    if seq is not None and not violations:
        violations += group_violations(resolved, seq)
    if explicit and seq is not None and not violations:
        violations += tokens_violations(resolved, seq)
    return violations


def _axis_violations(resolved: Resolved) -> list[str]:
    """Returns violations of mesh axes that the mode does not run, for a model that another runs."""
    described, mode = resolved.description, resolved.mode
    if described is None or "explicit" not in described.can:
        return []
    return [
        f"mesh axis {axis}={size} and execution.mode={mode!r}: that mode does not run {axis}; use "
        f"mode={ROWS[axis].modes[0]!r} (or None), or {axis}=1"
        for axis, size in resolved.sizes.items()
        if mode in MODES and mode not in ROWS[axis].modes
    ]


def _pipeline_violations(resolved: Resolved) -> list[str]:
    """Returns violations that hold for every pipeline. A schedule's own violations are reported
    when its table is built."""
    stages, execution = resolved.sizes.get(STAGE, 1), resolved.experiment.execution
    if stages == 1:
        return []
    if not resolved.can("pipeline"):
        return [
            f"mesh axis stage={stages} cuts models that describe themselves, and say that they can "
            f"be: it must know what a layer is; set stage=1"
        ]
    violations = []
    if execution.loop is not None and execution.loop.offload:
        violations.append(
            f"execution.loop.offload={execution.loop.offload}: a pipeline of stage={stages} holds "
            f"what its layers save in buffers on the device; use offload=(), or stage=1"
        )
    if execution.reduce_layers:
        violations.append(
            f"execution.reduce_layers=True sums in every tick of a pipeline of stage={stages}, "
            f"idle ones too; use reduce_layers=False, which sums once a step"
        )
    return violations


def _idle_axes(resolved: Resolved) -> list[str]:
    """Returns violations of mesh axes over which nothing is split: their devices would all do the
    same. Layers and experts are split without a rule."""
    rules, described = resolved.experiment.sharding, resolved.description
    tables = (rules.params, rules.optimizer_table, rules.activations)
    used = {STAGE, *(axis for table in tables for _, axes in table for axis in axes)}
    if described is not None and described.expert_calls:
        used |= {*EXPERT_AXES}
    return [
        f"mesh axis {axis}={size} splits nothing under these sharding rules; "
        f"{_rule_for(axis)}, or set {axis}=1 in {resolved.spec.where}"
        for axis, size in resolved.sizes.items()
        if axis not in used
    ]


def _rule_for(axis: str) -> str:
    """Returns how to have a mesh axis split something."""
    row = ROWS[axis]
    if row.preset is not None:
        return f"add the {row.preset} preset"
    return f"split {row.splits[0]} over it in sharding.activations"


def format_violations(violations: list[str], spec: MeshSpec) -> str:
    """Returns the message of the one error that lists all violations."""
    count = len(violations)
    head = f"{count} thing{'s' if count > 1 else ''} to mend before this can run on {spec.where}:"
    return "\n".join([head, *(f"  - {violation}" for violation in violations)])
