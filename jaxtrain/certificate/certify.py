"""The certificate: the same experiment gives the same run on every mesh.

Each layout is compared with one device. Initial parameters are equal to the bit. In fp32:

- loss and gradient norm of each of five steps, and one evaluation, within 1e-5: |a-b| / |b|;
- the gradient of each leaf, within 1e-5: max|a-b| / max|b|. With SGD in each step, else in the
first;
- each leaf after five steps, within 1e-4: sum|a-b| / sum|b-first| for parameters and their
averages, sum|a-b| / sum|b| for the optimizer's state.

The last two are wider and use sums because Adam and similar optimizers divide a gradient by its own
size: rounding of an element near zero becomes a full step, and changes later gradients. In bf16 all
bounds are wider, and gradients are those of the first step.

With products in 8 bits (`precision.products`) a sum in another order may flip a number to its
neighbour, a quarter away at the most (two bits of fraction). So at equal parameters, in the first
step, the loss in fp32 is held to 1e-5, losses after it to the bounds of bf16, norms to twice those,
gradients to 0.25 and state to 0.4. Each microbatch has scales of its own: the one-device run has as
many.

B of adapters is drawn: at B = 0, as a run begins, A has no gradient.

For a mixture, the experts of each token are compared first (`routing.py`). Flips with margins below
the bound of its precision are counted, and the layout runs again with the reference's routing; a
flip with a larger margin fails.

The layout replaces the experiment's own sharding, compute dtype, loop, reducer, pipeline and
dropout, and in half of the layouts its optimizer; no layout uses fp16.
"""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxtrain.certificate.layouts import Layout, layouts
from jaxtrain.certificate.outcome import (
    STEPS,
    HostArrays,
    InitialPrograms,
    Outcome,
    Program,
    program,
)
from jaxtrain.certificate.routing import Flips, flips
from jaxtrain.certificate.shrink import shrink
from jaxtrain.experiment import Experiment, load_experiment
from jaxtrain.experiment.tuning import adapters_of
from jaxtrain.models.layered import description_of
from jaxtrain.optim.precision import BOUNDS
from jaxtrain.violations import count, raise_violations

FLIP_BOUNDS = {"float32": BOUNDS["float32"], "bfloat16": 2 * BOUNDS["bfloat16"]}
"""Bounds of a flip's margin. In bf16 each of the two logits may be a bound away: 2.4e-2 were seen,
of logits up to 3, and a margin of 3.2e-2."""
STATE_BOUNDS = {"float32": 1e-4, "bfloat16": 1e-1}
"""Bounds of parameters, averages and optimizer state after the last step."""
NARROW_BOUND, NARROW_STATE_BOUND = 0.25, 0.4
"""Bounds of gradients and state with products in 8 bits: a step of the floats that have two bits of
fraction; and what it comes to in five steps."""
MOST_DEVICES = 64
"""More fake devices than cores take minutes a step."""
SMALLEST_SCALE = 1e-4
"""Share of the largest gradient: the finest scale on which a leaf's gradient is measured. A
gradient that is zero in exact arithmetic (a key bias without RoPE: softmax ignores it) contains
rounding alone. Optimizer results of smaller gradients are not compared."""
ROUNDING = STEPS * 2.0**-24
"""Each step rounds a parameter once: a difference up to this share of its value is ignored."""


class Difference(NamedTuple):
    """Distance of a layout from its one-device run. `error` is set if it did not run. grad_rel
    belongs to `worst_leaf`, state_rel (parameters, averages, optimizer state) to `worst_state`;
    first_loss_rel is that of the first step, at equal parameters."""

    layout: Layout
    loss_rel: float
    grad_rel: float
    norm_rel: float
    init_equal: bool
    worst_leaf: str
    eval_rel: float = np.inf
    state_rel: float = np.inf
    worst_state: str = ""
    error: str = ""
    flips: Flips = Flips()
    first_loss_rel: float = 0.0

    def __str__(self) -> str:
        verdict = "ok    " if self.passed else "FAILED"
        if self.error:
            return f"{verdict} {self.layout}: {self.error}"
        init = "equal" if self.init_equal else "DIFFERS"
        if not self.explained:
            margin = f"a margin of {self.flips.margin:.1e} (bound {FLIP_BOUNDS[self.dtype]:.0e})"
            return f"{verdict} {self.flips.location}, {margin}  {self.layout}"
        flips = f"flips {self.flips.count} ({self.flips.margin:.1e}) " if self.flips.count else ""
        first = f"first loss {self.first_loss_rel:.1e} " * self.layout.narrow
        return (
            f"{verdict} {first}loss {self.loss_rel:.1e} "
            f"grad {self.grad_rel:.1e} ({self.worst_leaf}) norm {self.norm_rel:.1e} "
            f"eval {self.eval_rel:.1e} state {self.state_rel:.1e} "
            f"({self.worst_state}) init {init} {flips} {self.layout}"
        )

    @property
    def dtype(self) -> str:
        """Dtype by whose rounding runs may be apart."""
        return "bfloat16" if self.layout.narrow else self.layout.dtype

    @property
    def flip_margin(self) -> float:
        return self.flips.margin

    @property
    def explained(self) -> bool:
        """True if rounding explains the choice of experts."""
        return self.flips.margin < FLIP_BOUNDS[self.dtype]

    @property
    def passed(self) -> bool:
        grads, state = self.leaf_bounds
        near = (
            max(self.loss_rel, self.eval_rel) <= BOUNDS[self.dtype]
            and self.norm_rel <= BOUNDS[self.dtype] * (1 + self.layout.narrow)
            and self.first_loss_rel <= BOUNDS[self.layout.dtype]
            and self.grad_rel <= grads
            and self.state_rel <= state
        )
        return not self.error and self.init_equal and self.explained and bool(near)

    @property
    def leaf_bounds(self) -> tuple[float, float]:
        """Upper bounds of `grad_rel`, for gradients, and of `state_rel`, for the state after the
        last step."""
        if self.layout.narrow:
            return NARROW_BOUND, NARROW_STATE_BOUND
        return BOUNDS[self.dtype], STATE_BOUNDS[self.dtype]


@dataclass
class Certificate:
    """differences: in the order run. closed_count: number of layouts to run."""

    closed_count: int
    differences: list[Difference] = field(default_factory=list)

    @property
    def failed(self) -> list[Difference]:
        return [d for d in self.differences if not d.passed]

    def worst(self, field_name: str, dtype: str = "float32") -> float:
        """Returns the largest value of a field, such as "loss_rel", among the layouts with this
        compute dtype; 0 if there are none."""
        values = [getattr(d, field_name) for d in self.differences if d.layout.dtype == dtype]
        return max(values, default=0.0)

    def summary(self) -> str:
        narrow = any(d.layout.narrow for d in self.differences)
        grads = [NARROW_BOUND] * 2 if narrow else [BOUNDS["float32"], BOUNDS["bfloat16"]]
        state = NARROW_STATE_BOUND if narrow else STATE_BOUNDS["float32"]
        products = " with products in 8 bits" * narrow
        worst, bound = self.worst("first_loss_rel"), BOUNDS["float32"]
        first = f"first loss {worst:.1e} (bound {bound:.0e}), " * narrow
        return (
            f"{len(self.differences)} layouts run of {self.closed_count} due, "
            f"{len(self.failed)} failed; worst fp32{products} {first}loss "
            f"{self.worst('loss_rel'):.1e}, gradient {self.worst('grad_rel'):.1e} (bound "
            f"{grads[0]:.2g}), state after {STEPS} steps {self.worst('state_rel'):.1e} "
            f"(bound {state:.2g}); worst bf16 gradient "
            f"{self.worst('grad_rel', 'bfloat16'):.1e} (bound {grads[1]:.2g}){self._flips()}"
        )

    def _flips(self) -> str:
        """Describes in words the flips of each compute dtype."""
        text = ""
        for name, dtype in (("fp32", "float32"), ("bf16", "bfloat16")):
            of_precision = [d.flips for d in self.differences if d.layout.dtype == dtype]
            if count := sum(flip.count for flip in of_precision):
                worst = max(flip.margin for flip in of_precision)
                text += f"; {count} {name} flips of experts, margins up to {worst:.1e}"
        return text

    def as_json(self) -> dict[str, Any]:
        return {
            "layouts": len(self.differences),
            "failed": len(self.failed),
            "worst_loss_rel": self.worst("loss_rel"),
            "worst_first_loss_rel": self.worst("first_loss_rel"),
            "worst_grad_rel": self.worst("grad_rel"),
            "worst_eval_rel": self.worst("eval_rel"),
            "worst_state_rel": self.worst("state_rel"),
            "flips": sum(d.flips.count for d in self.differences),
            "worst_flip_margin": self.worst("flip_margin"),
        }


def certify(
    experiment: Experiment | str | Path,
    *,
    devices: int = 8,
    which: str = "quick",
    full: bool = False,
    stop_at_failure: bool = False,
) -> Generator[tuple[Difference, Certificate], None, None]:
    """Yields each layout's difference as it is computed, and the certificate so far.

    Needs `devices` (fake) devices. full: keep the model's own size. Raises ValueError for no
    devices, and for a model without a description: layouts of others are GSPMD's, and XLA chooses
    their arithmetic.
    """
    raise_violations(count("devices", devices, 1))
    if devices > MOST_DEVICES:
        raise ValueError(
            f"devices={devices}: a certificate runs every layout on fake devices of one machine; "
            f"use {MOST_DEVICES} or fewer, such as 8, on which every axis is met"
        )
    if not isinstance(experiment, Experiment):
        experiment = load_experiment(experiment)
    described = description_of(experiment.model)
    if described is None or "explicit" not in described.can:
        lacks = "does not" if described is None else 'says that it cannot run in mode "explicit"'
        raise ValueError(
            f"certify compares layouts of models that describe themselves, and a "
            f"{type(experiment.model).__name__} {lacks}; give it describe(), as docs/models.md says"
        )
    if not full:
        experiment = shrink(experiment, devices=devices)
    due, closed_count = layouts(
        devices,
        which,
        experts=bool(described.expert_calls),
        context="context" in described.can,
        narrow=experiment.precision.products is not None,
        adapters=adapters_of(experiment.lora, described)[0] is not None,
    )
    reference_of = partial(Layout.reference, balanced=described.balances_microbatches)
    due = [layout._replace(**_unvaried(experiment)) for layout in due]
    # Programs compiled ahead are lost if a failure ends the certificate.
    ahead = 0 if stop_at_failure else os.cpu_count() or 1
    certificate, references = Certificate(closed_count), {}
    remaining = Counter(map(reference_of, due))
    with closing(_programs(experiment, due, reference_of, ahead)) as programs:
        for layout in due:
            reference = reference_of(layout)
            if reference not in references:
                references[reference] = next(programs).result()()
            difference = _compare(layout, next(programs), references[reference])
            remaining[reference] -= 1
            if not remaining[reference]:
                del references[reference]
            certificate.differences.append(difference)
            yield difference, certificate
            if stop_at_failure and not difference.passed:
                return
    assert len(certificate.differences) == closed_count, "a layout was skipped"


def _unvaried(experiment: Experiment) -> dict[str, Any]:
    """Returns the options of a layout that the experiment cannot vary, with their values."""
    unvaried: dict[str, Any] = {}
    if not hasattr(experiment.model, "varied"):
        unvaried = {"dropout": 0.0, "activation": "own", "periods": None}
    return unvaried if experiment.objective is None else unvaried | {"packing": True}


def _programs(
    experiment: Experiment, due: list[Layout], reference_of: Callable[[Layout], Layout], ahead: int
) -> Generator[Future[Program], None, None]:
    """Yields the program of each layout; a reference's comes before the first layout that needs it.

    XLA compiles outside Python's lock, so `ahead` programs are compiled while one runs. Only one
    runs at a time: the collectives of two hang simulated devices.
    """
    references = {reference_of(layout): number for number, layout in reversed([*enumerate(due)])}
    pending: deque[Layout] = deque()
    for number, layout in enumerate(due):
        reference = reference_of(layout)
        pending.extend([reference, layout] if references[reference] == number else [layout])
    compiling: deque[Future[Program]] = deque()
    initial_programs = InitialPrograms()
    with ThreadPoolExecutor(max(ahead, 1)) as pool:
        try:
            while pending or compiling:
                while pending and len(compiling) <= ahead:
                    submitted = (experiment, pending.popleft(), initial_programs)
                    compiling.append(pool.submit(program, *submitted))
                yield compiling.popleft()
        finally:
            for future in compiling:
                future.cancel()


def _compare(
    layout: Layout,
    compiled: Future[Program],
    reference: Outcome,
) -> Difference:
    try:
        run = compiled.result()
        # If products are rounded to 16 bits, some token always goes to another expert.
        outcome = run(None if layout.precision == "fp32" else reference.routing)
        if layout.precision == "fp32" and flips(outcome.routing, reference.routing).count:
            outcome = run(reference.routing)
    except Exception as error:  # whatever it is, other layouts are compared
        lines = takewhile(lambda line: not line.startswith("---"), str(error).splitlines())
        text = f"{type(error).__name__}: {' '.join(line.strip() for line in lines)[:400]}"
        return Difference(layout, np.inf, np.inf, np.inf, False, "", error=text)
    return difference(layout, outcome, reference)


def difference(layout: Layout, outcome: Outcome, reference: Outcome) -> Difference:
    """Returns the distance of `outcome` from the run that it must equal."""
    grads, state = _gradients(outcome, reference), _state(outcome, reference)
    leaf, part = (max(errors, key=errors.__getitem__) for errors in (grads, state))
    return Difference(
        layout,
        _relative(outcome.losses, reference.losses, elementwise=True),
        grads[leaf],
        _relative(outcome.norms, reference.norms, elementwise=True),
        all(np.array_equal(reference.init[k], v) for k, v in outcome.init.items()),
        leaf,
        _relative(outcome.eval_loss, reference.eval_loss, elementwise=True),
        state[part],
        part,
        flips=flips(outcome.routing, reference.routing),
        first_loss_rel=_relative(outcome.losses[:1], reference.losses[:1], elementwise=True),
    )


def _gradients(outcome: Outcome, reference: Outcome) -> dict[str, float]:
    """Returns the error of each leaf, the largest of all compared steps."""
    errors: dict[str, float] = {}
    for grads, expected in zip(outcome.grads, reference.grads, strict=True):
        floor = SMALLEST_SCALE * _largest(expected)
        for k, g in grads.items():
            errors[k] = max(errors.get(k, 0.0), _relative(g, expected[k], floor=floor))
    return errors


def _state(outcome: Outcome, reference: Outcome) -> dict[str, float]:
    """Returns the errors of parameters, averages and an optimizer's leaves, by name. Leaves whose
    first gradient was rounding alone are left out."""
    first, zero = reference.grads[0], np.zeros(())
    floor = SMALLEST_SCALE * _largest(first)
    rounding = {k for k, g in first.items() if np.max(np.abs(g)) < floor}
    errors = {}
    for kind in ("params", "averages", "optimizer"):
        expected = getattr(reference, kind)
        for k, leaf in getattr(outcome, kind).items():
            if not any(k == name or k.endswith(f"['{name}']") for name in rounding):
                start = zero if kind == "optimizer" else reference.init[k]
                errors[f"{kind} {k}"] = _moved_apart(leaf, expected[k], start)
    return errors


def _largest(leaves: HostArrays) -> float:
    return max(float(np.max(np.abs(leaf))) for leaf in leaves.values())


def _relative(a: Any, b: Any, *, elementwise: bool = False, floor: float = 1e-30) -> float:
    """Returns max|a-b| / max|b|, or max(|a-b| / |b|) if `elementwise`. nan counts as a
    difference."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    scale = np.abs(b) if elementwise else np.max(np.abs(b))
    worst = float(np.max(np.abs(a - b) / np.maximum(scale, floor)))
    return np.inf if np.isnan(worst) else worst


def _moved_apart(a: Any, b: Any, start: Any) -> float:
    """Returns sum|a-b| / sum|b-start|, without differences of one rounding a step."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    apart = np.abs(a - b)
    apart = np.where(apart <= ROUNDING * np.abs(b), 0.0, apart)
    share = float(np.sum(apart) / np.maximum(np.sum(np.abs(b - start)), 1e-30))
    return np.inf if np.isnan(share) else share
