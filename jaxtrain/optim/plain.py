"""Optimizers of optax's own, taken as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import optax
from jax.extend.core import ClosedJaxpr, Jaxpr

from jaxtrain.optim.leaves import AxesTree
from jaxtrain.violations import raise_violations

MIXING = ("reduce_", "cum", "sort", "arg", "top_k", "conv_", "fft", "dot_general")
MIXING_WHOLE = {"cholesky", "eigh", "householder_product", "lu", "qr", "svd", "triangular_solve"}
"""Operations of JAX in which one number of an array has a say in another (by how they begin, and
by their whole names); `reduce_precision` is not one."""


@dataclass(frozen=True)
class Optax:
    """An optax transformation as an optimizer; an experiment makes one of what stands in
    `optimizer`.

    given: `optax.adamw(3e-4)`, or a function of no arguments that returns such a transformation.
    The function can be stored in a run's config.json, by its name, and a resumed run is held to
    that: what stands in the function may have changed. A transformation itself is closures, and
    trains in memory only.

    It sees the parameters as the train state holds them: leaves of a block are stacked over layers,
    [layers, embed, ...]. Whatever moves each number by itself (`optax.adamw`, `sgd`, `lion`) does
    the same there. What is computed of a whole leaf is computed of the stack: LAMB's and LARS's
    ratios, Muon's and Shampoo's matrices, Adafactor's means, clipping by a block's RMS; and masks
    that look at `ndim` take a stack of vectors for a matrix. For those there are `Lamb`, `Lars`,
    `Muon`, `Adafactor` and the field `decay`. State is split over devices as the parameters are
    whose tree it mirrors; in other trees it may hold scalars only. The learning rate is logged
    where `optax.inject_hyperparams` puts it into the state. `Experiment.clip_norm` clips before it.
    """

    given: optax.GradientTransformation | Callable[[], optax.GradientTransformation]

    def violations(self, steps: int) -> list[str]:
        """Returns the violations of the user's function, which is called."""
        del steps
        if isinstance(self.given, optax.GradientTransformation):
            return []
        name = getattr(self.given, "__name__", repr(self.given))
        try:
            transform = self.given()
        except Exception as error:  # whatever the user's function raises
            return [f"optimizer={name} failed ({type(error).__name__}: {error}); mend it"]
        if isinstance(transform, optax.GradientTransformation):
            return []
        return [
            f"optimizer={name} gives {transform!r}; return an optax transformation, such as "
            "optax.adamw(3e-4)"
        ]

    def build(self, axes: AxesTree, *, steps: int, batch: int) -> optax.GradientTransformation:
        """The transformation, whatever the logical axes. Raises ValueError with all violations, and
        in `update` where that asks for more than gradients, state and parameters."""
        del axes, batch
        raise_violations(self.violations(steps))
        transform = self.given
        if not isinstance(transform, optax.GradientTransformation):
            transform = transform()

        def update(updates: Any, state: Any, params: Any = None) -> Any:
            try:
                return transform.update(updates, state, params)
            except TypeError as error:
                if "required keyword-only argument" not in str(error):
                    raise
                raise ValueError(
                    f"optimizer: {error}; a step gives an optax transformation gradients, state "
                    "and parameters, and nothing else"
                ) from error

        return optax.GradientTransformation(transform.init, update)


def mixing(transform: optax.GradientTransformation, params: Any, state: Any) -> list[str]:
    """The operations of an update in which numbers of one leaf meet, by JAX's names, sorted; []
    where each number moves by its own gradient alone. All may be abstract."""
    traced = jax.make_jaxpr(transform.update)(params, state, params)
    return sorted(set(_mixing(traced.jaxpr)))


def _mixing(jaxpr: Jaxpr) -> Iterator[str]:
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        large = any(getattr(var.aval, "size", 1) > 1 for var in equation.invars)
        mixes = name.startswith(MIXING) and name != "reduce_precision"
        if large and (mixes or name in MIXING_WHOLE):
            yield name
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                if isinstance(inner, ClosedJaxpr):
                    yield from _mixing(inner.jaxpr)
                elif isinstance(inner, Jaxpr):
                    yield from _mixing(inner)
