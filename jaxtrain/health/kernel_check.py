"""Holds the kernels of a run against the portable ones, before its first step.

A kernel that a platform chooses is a program of others, or of ours for a machine that few have: it
may be wrong for some sizes alone, and in one head or expert of many. A loss shows that late.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import jax
import numpy as np

from jaxtrain.cluster.agreement import share_failure
from jaxtrain.health.attention_case import attention_cases
from jaxtrain.health.expert_case import expert_cases
from jaxtrain.health.kernel_case import KernelCase
from jaxtrain.step.assembly import Assembly
from jaxtrain.validation.own_attention import is_standard, kernel_name
from jaxtrain.violations import raise_violations


def is_checked(wanted: bool | None, assembly: Assembly) -> bool:
    """True if the kernels of this run are checked: on accelerators, where `Health.kernels` is
    None."""
    return assembly.spec.platform != "cpu" if wanted is None else wanted


def check_kernels(
    assembly: Assembly, tell: Callable[[str], None], *, wanted: bool | None = None
) -> None:
    """Compares each kernel with the portable one, on the first device of this process, and tells
    how far they are apart. wanted: `Health.kernels`; True also compares an attention kernel of the
    user's own that does not say that it is standard. Raises ValueError, on all processes, if a
    kernel is wrong on one."""
    violations, notes = [], []
    for case in cases_of(assembly, every=wanted is True):
        try:
            distances = _distances(case, assembly)
        except Exception as error:  # the step has compiled: what fails is of the check alone
            reason = str(error).partition("\n")[0]
            notes.append(f"{case.setting} was not compared for {case.problem}: {reason}")
            continue
        if wrong := _violations(case, distances):
            violations += wrong
            continue
        greatest = max(float(np.max(values)) for values in distances.values())
        notes.append(
            f"{case.setting} is within {greatest:.1e} of {case.portable} in fp32, for "
            f"{case.problem}"
        )
    if wanted and not notes and not violations:
        notes.append("none to compare: attention and experts run the portable ones")
    for note in notes:
        tell(f"NOTE kernels: {note}")
    share_failure(partial(raise_violations, violations, "kernels"))


def cases_of(assembly: Assembly, *, every: bool = True) -> Iterator[KernelCase]:
    """Yields the distinct kernels and problems of the layers, without portable kernels. None for a
    model without a description. every: an attention kernel that need not be standard too."""
    if assembly.description is None or assembly.description.tokens is None:
        return
    own = assembly.experiment.execution.attention
    if every or is_standard(own):
        yield from attention_cases(assembly, kernel_name)
    yield from expert_cases(assembly)


def _distances(case: KernelCase, assembly: Assembly) -> Mapping[str, np.ndarray]:
    run = jax.jit(assembly.with_matmul_precision(case.distances))
    return jax.device_get(run(*case.inputs))


def _violations(case: KernelCase, distances: Mapping[str, np.ndarray]) -> list[str]:
    """Returns the greatest distance of the first result that is wrong, of which others may follow;
    [] if all are within the bound."""
    for result, labels in case.labels.items():
        values = distances[result]
        worst, count = int(np.argmax(values)), int(np.sum(values > case.bound))
        if count:
            return [
                f"{case.setting} computes {result} of {labels[worst]} wrongly ({count} of "
                f"{len(values)}), {float(values[worst]):.1e} from {case.portable} in fp32, at most "
                f"{case.bound:.1e}, for {case.problem}; nothing was trained: use {case.fix}, or "
                "execution.health=Health(kernels=False) if it is meant to compute something else"
            ]
    return []
