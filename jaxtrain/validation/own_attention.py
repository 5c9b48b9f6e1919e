"""Checks a user's own attention kernel. It is refused where the result depends on an undeclared
property.

Two attributes declare a kernel's properties. `standard = True`: it computes the softmax attention
of `jaxtrain.attention.attention`, as a faster kernel does. `heads_alike = True`: it treats every
head the same, which ALiBi does not. All kernels of jaxtrain are standard.
"""

from __future__ import annotations

from typing import Any

from jaxtrain.experiment.resolve import Resolved
from jaxtrain.operations.block import attentions

SAMPLES = "continues text by jaxtrain's own attention"


def is_standard(kernel: Any) -> bool:
    """Returns True for jaxtrain's kernels, and for those with `standard = True`."""
    return bool(getattr(kernel, "standard", False)) or not is_own(kernel)


def is_own(kernel: Any) -> bool:
    """Returns True if a kernel is a user's own; None is the platform's."""
    return kernel is not None and kernel_kind(kernel).__module__.split(".")[0] != "jaxtrain"


def kernel_kind(kernel: Any) -> Any:
    """Returns a kernel that is a function, and the class of any other kernel. config.json has the
    name of the returned object."""
    return kernel if hasattr(kernel, "__qualname__") else type(kernel)


def kernel_name(kernel: Any) -> str:
    """Returns the name of a kernel's function, or a kernel's value as it is written."""
    return getattr(kernel, "__qualname__", None) or repr(kernel)


def own_attention_violations(resolved: Resolved) -> list[str]:
    """Returns violations of a user's own attention kernel on this mesh: devices with some of the
    heads or a part of a row, and a sample of text."""
    experiment, sizes, roles = resolved.experiment, resolved.sizes, resolved.roles
    kernel = experiment.execution.attention
    name = kernel_name(kernel)
    prefix = f"execution.attention={name} is a kernel of your own"
    if is_own(kernel) and _has_functions_of_scores(resolved):
        return [
            f"{prefix}, and AttentionConfig.scores is computed by those of jaxtrain.attention "
            "alone; use execution.attention=None, or scores=None and a kernel that has the function"
        ]
    if is_standard(kernel):
        return []
    standard = f"say that it computes softmax attention as jaxtrain.attention has it ({name}"
    standard += ".standard = True)"
    widest = roles.outside_stack() if _attends_outside_the_stack(resolved) else roles
    heads, rows = widest.heads, roles.seq
    if _gets_whole_rows(resolved):
        heads, rows = (*heads, *rows), ()
    violations = []
    if heads and not getattr(kernel, "heads_alike", False):
        cut = " x ".join(f"{axis}={sizes[axis]}" for axis in heads)
        violations.append(
            f"{prefix}, and {cut} gives each device some of the heads, of which it is not told "
            f"which; use {' and '.join(f'{axis}=1' for axis in heads)}, say that it does the same "
            f"to every head ({name}.heads_alike = True), or {standard}"
        )
    if rows:
        cut = " x ".join(f"{axis}={sizes[axis]}" for axis in rows)
        violations.append(
            f"{prefix}, and {cut} gives each device a part of a row, of which it is not told where "
            f"it begins; use {' and '.join(f'{axis}=1' for axis in rows)}, for a kernel that does "
            f"the same to every head execution.context=Ulysses(), which gives it whole rows, and "
            f"{name}.heads_alike = True, or {standard}"
        )
    if experiment.sample is not None:
        violations.append(
            f"{prefix}, and evaluation.sample {SAMPLES}, which is another model; use "
            f"evaluation.sample=None, or {standard}"
        )
    return violations


def _gets_whole_rows(resolved: Resolved) -> bool:
    """Returns True if devices that split rows trade tokens for heads before attention, all of them
    together: a kernel sees whole rows, and some of the heads."""
    row_ways, method = resolved.row_ways, resolved.experiment.execution.context
    return row_ways > 1 and method is not None and method.trading(row_ways) == row_ways


def _has_functions_of_scores(resolved: Resolved) -> bool:
    model = resolved.description
    blocks = () if model is None else model.layers
    return any(call.scores is not None for block in blocks for call in attentions(block))


def _attends_outside_the_stack(resolved: Resolved) -> bool:
    """Returns True if a layer before or after the stack has attention. In a pipeline its heads are
    split over all stages."""
    model = resolved.description
    if model is None:
        return False
    outside = (*model.prefix.values(), *model.suffix.values())
    return any(True for block in outside for _ in attentions(block))
