"""The certificate: the same experiment gives the same run on every mesh.

For each layout: initial parameters equal to the bit, losses of five steps within 1e-5 (relative),
gradients within 1e-5 (max|a-b| / max|b| per leaf), the gradient norm within 1e-5, all against one
device. The experiment's own sharding, precision, loop, reducer, pipeline and dropout give way to
those of the layout; fp16 is in none. bf16 layouts of a mixture send every token to all experts:
near a tie rounding decides which one is chosen.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.experiment import Experiment, load_experiment
from jaxtrain.mesh.mesh import mesh_from_axes
from jaxtrain.models.decoder import DecoderConfig
from jaxtrain.optim.fields import count, refuse
from jaxtrain.train.assembly import active_mesh, assemble
from jaxtrain.train.batches import PlacedRows, fields_of, numbered
from jaxtrain.train.layouts import PRECISIONS, Layout, arranged, layouts
from jaxtrain.train.natural import in_order
from jaxtrain.train.rows import open_split
from jaxtrain.train.session import CACHE_DIR, initialise
from jaxtrain.train.shrink import shrink
from jaxtrain.train.state import shardings
from jaxtrain.train.step import make_train_step

STEPS = 5
BOUNDS = {"float32": 1e-5, "bfloat16": 3e-2}
"""Relative bounds by compute dtype; bf16 rounds each product to 2^-8."""
MOST_DEVICES = 64
"""More fake devices than cores take minutes a step."""
SMALLEST_SCALE = 1e-4


class Difference(NamedTuple):
    """How far a layout is from its one-device run; `error` is set when it did not run."""

    layout: Layout
    loss_rel: float
    grad_rel: float
    norm_rel: float
    init_equal: bool
    worst_leaf: str
    error: str = ""

    def __str__(self) -> str:
        verdict = "ok    " if self.passed else "FAILED"
        if self.error:
            return f"{verdict} {self.layout}: {self.error}"
        init = "equal" if self.init_equal else "DIFFERS"
        return (
            f"{verdict} loss {self.loss_rel:.1e} grad {self.grad_rel:.1e} ({self.worst_leaf}) "
            f"norm {self.norm_rel:.1e} init {init}  {self.layout}"
        )

    @property
    def passed(self) -> bool:
        bound = BOUNDS[jnp.dtype(PRECISIONS[self.layout.precision].compute).name]
        worst = max(self.loss_rel, self.grad_rel, self.norm_rel)
        return not self.error and self.init_equal and bool(worst <= bound)


@dataclass
class Certificate:
    """differences in the order run; `closed_count` layouts were due."""

    closed_count: int
    differences: list[Difference] = field(default_factory=list)

    @property
    def failed(self) -> list[Difference]:
        return [d for d in self.differences if not d.passed]

    def worst(self, what: str, dtype: str = "fp32") -> float:
        """The largest `loss_rel` or `grad_rel` among layouts of that precision."""
        found = [getattr(d, what) for d in self.differences if d.layout.precision == dtype]
        return max(found, default=0.0)

    def summary(self) -> str:
        return (
            f"{len(self.differences)} layouts run of {self.closed_count} due, "
            f"{len(self.failed)} failed; worst fp32 loss {self.worst('loss_rel'):.1e}, gradient "
            f"{self.worst('grad_rel'):.1e} (bound {BOUNDS['float32']:.0e}); worst bf16 gradient "
            f"{self.worst('grad_rel', 'bf16'):.1e} (bound {BOUNDS['bfloat16']:.0e})"
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "layouts": len(self.differences),
            "failed": len(self.failed),
            "worst_loss_rel": self.worst("loss_rel"),
            "worst_grad_rel": self.worst("grad_rel"),
        }


def certify(
    experiment: Experiment | str | Path,
    *,
    devices: int = 8,
    which: str = "quick",
    full: bool = False,
    stop_at_failure: bool = False,
) -> Iterator[tuple[Difference, Certificate]]:
    """Each layout's difference as it is found, and the certificate so far.

    Needs `devices` (fake) devices. `full` keeps the model's own size. Raises ValueError for no
    devices, and for a model that is not built in: layouts of others are GSPMD's, whose arithmetic
    is XLA's to keep.
    """
    refuse(count("devices", devices, 1))
    if devices > MOST_DEVICES:
        raise ValueError(
            f"devices={devices}: a certificate runs every layout on fake devices of one machine; "
            f"use {MOST_DEVICES} or fewer, such as 8, on which every axis is met"
        )
    if not isinstance(experiment, Experiment):
        experiment = load_experiment(experiment)
    if not isinstance(experiment.model, DecoderConfig):
        raise ValueError("certify compares layouts of built-in models; this experiment has its own")
    if not full:
        experiment = shrink(experiment, devices=devices)
    due, closed_count = layouts(devices, which)
    certificate, references = Certificate(closed_count), {}
    for layout in due:
        reference = layout.reference()
        if reference not in references:
            references[reference] = _run(experiment, reference)
        difference = _compared(experiment, layout, references[reference])
        certificate.differences.append(difference)
        yield difference, certificate
        if stop_at_failure and not difference.passed:
            return
    assert len(certificate.differences) == closed_count, "a layout was skipped"


class _Outcome(NamedTuple):
    init: dict[str, np.ndarray]
    losses: np.ndarray
    norms: np.ndarray
    grads: dict[str, np.ndarray]


def _compared(experiment: Experiment, layout: Layout, reference: _Outcome) -> Difference:
    try:
        outcome = _run(experiment, layout)
    except (ValueError, TypeError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
        text = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
        return Difference(layout, np.inf, np.inf, np.inf, False, "", text)
    equal = all(np.array_equal(reference.init[k], v) for k, v in outcome.init.items())
    # A gradient that is zero in exact arithmetic (a key bias without RoPE: softmax ignores it) has
    # only rounding to compare: no leaf is measured on a finer scale than this share of the largest.
    floor = SMALLEST_SCALE * max(np.max(np.abs(g)) for g in reference.grads.values())
    errors = {k: _relative(g, reference.grads[k], floor=floor) for k, g in outcome.grads.items()}
    leaf = max(errors, key=lambda k: np.nan_to_num(errors[k], nan=np.inf))
    return Difference(
        layout,
        _relative(outcome.losses, reference.losses, each=True),
        errors[leaf],
        _relative(outcome.norms, reference.norms, each=True),
        equal,
        leaf,
    )


def _relative(a: np.ndarray, b: np.ndarray, *, each: bool = False, floor: float = 1e-30) -> float:
    """max|a-b| / max|b|, or max(|a-b| / |b|) where `each`. nan counts as a difference."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    scale = np.abs(b) if each else np.max(np.abs(b))
    worst = float(np.max(np.abs(a - b) / np.maximum(scale, floor)))
    return np.inf if np.isnan(worst) else worst


def _run(experiment: Experiment, layout: Layout) -> _Outcome:
    """STEPS steps on the layout. Gradients are those of the first; of leaves where that is zero (A
    of an adapter: its B begins so) those of the second."""
    e = arranged(experiment, layout)
    dataset = open_split(e, "train", CACHE_DIR.expanduser())
    assembly = assemble(e, mesh_from_axes(**dict(layout.axes)), fields_of(dataset, e.data))
    count = int(np.prod([n for _, n in layout.axes]))
    mesh = jax.sharding.Mesh(
        np.array(jax.devices()[:count]).reshape([n for _, n in layout.axes]),
        [a for a, _ in layout.axes],
        axis_types=(jax.sharding.AxisType.Auto,) * len(layout.axes),
    )
    mesh = active_mesh(mesh, assembly.sizes)
    where = shardings(assembly.abstract, assembly.splits, mesh)
    state = initialise(assembly, where)
    init = jax.tree.map(np.asarray, state.params)
    placed = PlacedRows(dataset, assembly.batch_shardings(mesh), e.microbatches)
    rows = numbered(e.batch)
    step = jax.jit(
        make_train_step(assembly, mesh, keep_gradients=True),
        in_shardings=(where, assembly.batch_shardings(mesh)),
        compiler_options=assembly.compiler_options or None,
    )
    found, grads = [], {}
    for at in range(STEPS):
        state, metrics = step(state, placed.rows(rows(at)))
        kept = metrics.pop("gradients")
        if at < 2:
            made = jax.tree.map(np.asarray, kept)
            grads = {k: grads[k] if k in grads and grads[k].any() else g for k, g in made.items()}
        found.append({k: float(v) for k, v in metrics.items()})
    losses = np.array([m["loss"] for m in found])
    norms = np.array([m["grad_norm"] for m in found])
    init, grads = (jax.tree.map(np.asarray, in_order(assembly, x)) for x in (init, grads))
    return _Outcome(init, losses, norms, grads)
