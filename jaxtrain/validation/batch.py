"""Checks a batch: its microbatches, and how a mesh splits their rows."""

from __future__ import annotations

import math

from jaxtrain.experiment import Experiment
from jaxtrain.experiment.resolve import Resolved
from jaxtrain.mesh.sharding import ways
from jaxtrain.remedies import Clash, Near, multiples_near, options


def whole_violations(experiment: Experiment) -> list[str]:
    """Returns violations if a batch size is not a multiple of `microbatches`."""
    e, violations = experiment, []
    for batch in e.batch_sizes:
        if batch < 1:
            violations.append(f"batch={batch!r}; use a whole number of sequences, at least 1")
        elif e.microbatches >= 1 and batch % e.microbatches:
            violations.append(
                Clash(
                    f"batch={batch} is not a multiple of microbatches={e.microbatches}",
                    f"use microbatches={_fitting_microbatches(e)}, or "
                    f"batch={options(multiples_near(batch, e.microbatches))}",
                    sizes={"batch": batch, "microbatches": e.microbatches},
                    ways=[(Near("microbatches", e.microbatches),), (Near("batch", batch),)],
                    joint=[(Near("microbatches", e.microbatches), Near("batch", batch))],
                )
            )
    return violations


def rows_violations(resolved: Resolved) -> list[str]:
    """Returns violations for microbatches whose rows do not split over their mesh axes."""
    rows, sizes, experiment = resolved.roles.batch, resolved.sizes, resolved.experiment
    micro, parts, violations = experiment.microbatches, ways(rows, sizes), []
    number = Near("microbatches", micro)
    for batch in divisible_batches(experiment):
        if batch // micro % parts:
            split = " x ".join(f"{a}={sizes[a]}" for a in rows)
            step = micro * parts
            violations.append(
                Clash(
                    f"batch={batch} in microbatches={micro} is {batch // micro} rows each, which "
                    f"do not split over {split} = {parts} ways",
                    f"use batch={options(multiples_near(batch, step))}",
                    sizes={"batch": batch, "microbatches": micro},
                    ways=[
                        (Near("batch", batch, step),),
                        (number,),
                        *((Near(a, sizes[a], 0),) for a in rows[::-1]),
                    ],
                    joint=[(number, Near("batch", batch))],
                )
            )
    return violations


def divisible_batches(experiment: Experiment) -> list[int]:
    """Returns the batch sizes that are multiples of `microbatches`; `whole_violations` reports
    others."""
    micro = experiment.microbatches
    if micro < 1:
        return []
    return [b for b in experiment.batch_sizes if b >= micro and b % micro == 0]


def _fitting_microbatches(experiment: Experiment) -> int:
    """Returns the number closest to `microbatches` that divides every size of the batch."""
    common_divisor = math.gcd(*experiment.batch_sizes)
    divisors = (n for n in range(1, common_divisor + 1) if common_divisor % n == 0)
    return min(divisors, key=lambda n: abs(n - experiment.microbatches))
