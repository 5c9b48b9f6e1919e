"""Precision as a value: what weights rest in, what is computed in, what is reduced in.

Steps whose gradients are not finite are skipped and counted in every precision; with a loss scale
they also lower it. The state is replicated and its input is a global fact, so it is the same on
every device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32, PyTree

from jaxtrain.quantization.recipe import Fp8Products, Int8Products, Products
from jaxtrain.reprs import short_repr
from jaxtrain.violations import at_least, count, positive, raise_violations

Tree = TypeVar("Tree")
MATMUL_PRECISIONS = ("default", "high", "highest")

BOUNDS = {"float32": 1e-5, "bfloat16": 3e-2}
"""How far losses, gradients and their norm may be apart, relatively, where the same steps are
computed in two ways; by compute dtype. bf16 rounds each product to 2^-8."""


class LossScaleState(NamedTuple):
    """good_steps: finite steps since the scale last changed."""

    scale: Float32[Array, ""]
    good_steps: Int32[Array, ""]


@dataclass(frozen=True)
class LossScale:
    """Dynamic loss scaling (Micikevicius et al. 2018, sec. 3.2): multiply after `window` finite
    steps, divide at an overflow; within [minimum, maximum] (Apex's bounds).

    initial: the first scale. factor: what it is multiplied or divided by.
    minimum, maximum: its bounds.
    """

    initial: float = 2.0**15
    window: int = 2000
    factor: float = 2.0
    minimum: float = 1.0
    maximum: float = 2.0**24

    def __post_init__(self) -> None:
        violations = count("window", self.window, 1) + positive("minimum", self.minimum)
        violations += positive("initial", self.initial) + positive("maximum", self.maximum)
        violations += at_least("factor", self.factor, 1)
        if not violations and not self.minimum <= self.initial <= self.maximum:
            violations.append(
                f"initial={self.initial} must lie in [minimum={self.minimum}, "
                f"maximum={self.maximum}]; use initial={self.minimum} or another within"
            )
        raise_violations(violations)

    def init(self) -> LossScaleState:
        return LossScaleState(jnp.float32(self.initial), jnp.int32(0))

    def update(self, state: LossScaleState, finite: Bool[Array, ""]) -> LossScaleState:
        """The state after a step whose gradients were `finite` (the same on the whole mesh)."""
        good = jnp.where(finite, state.good_steps + 1, 0)
        grow = good >= self.window
        grown = jnp.minimum(state.scale * self.factor, self.maximum)
        shrunk = jnp.maximum(state.scale / self.factor, self.minimum)
        scale = jnp.where(finite, jnp.where(grow, grown, state.scale), shrunk)
        return LossScaleState(scale, jnp.where(grow, 0, good))


def _is_floating(dtype: jax.typing.DTypeLike) -> bool:
    try:
        return jnp.issubdtype(dtype, jnp.floating)
    except TypeError:  # no dtype at all, such as "bf16"
        return False


@dataclass(frozen=True)
class Precision:
    """dtypes of a run.

    params: master weights and optimizer state. compute: activations, and weights as they are
    gathered; also the sums over tensor-parallel devices of activations and their gradients, as in
    Megatron. reduce: matrices' gradients as they are reduce-scattered over fsdp in the explicit
    mode (over data they are summed in fp32), and as XLA sums them over all devices in gspmd mode,
    there never narrower than `compute`. A user's own model is summed in the dtype of its own
    operations, `compute` unless it asks for more. Sums over microbatches are fp32.
    matmul: `jax.default_matmul_precision` of the program; accelerators take "default" to mean TF32
    or bfloat16 passes, "highest" is true fp32. loss_scale: what keeps gradients in the range of
    float16, None for none. products: how layers multiply by their matrices, `Fp8Products()` or
    `Int8Products()`; None: in the compute dtype. Those by which tokens are multiplied in
    `Communicator.column`, `row` and `experts` (attention's and feed-forward ones) are rounded to 8
    bits, with x and the gradients; not embedding, head, norms, routers and shared experts.
    """

    params: jax.typing.DTypeLike = jnp.float32
    compute: jax.typing.DTypeLike = jnp.float32
    reduce: jax.typing.DTypeLike = jnp.float32
    matmul: str = "highest"
    loss_scale: LossScale | None = None
    products: Products | None = None

    def __post_init__(self) -> None:
        violations = []
        for name in ("params", "compute", "reduce"):
            if not _is_floating(getattr(self, name)):
                violations.append(
                    f"{name}={getattr(self, name)!r} must be a floating type; use jnp.float32"
                )
        if self.matmul not in MATMUL_PRECISIONS:
            violations.append(
                f"matmul={self.matmul!r} is unknown; use {', '.join(MATMUL_PRECISIONS)}"
            )
        if self.products is not None and not isinstance(self.products, Products):
            violations.append(
                f"products={self.products!r} must be a value that says how to multiply; use "
                f"{_products_like(self.products)}, or None for the compute dtype"
            )
        if not violations and jnp.dtype(self.compute) == jnp.float16 and self.loss_scale is None:
            violations.append(
                "compute=float16 loses gradients below 6e-8; use loss_scale=LossScale(), or "
                "compute=jnp.bfloat16"
            )
        raise_violations(violations)

    def __repr__(self) -> str:
        """Returns the name of a preset, else the call."""
        presets = {"fp32": fp32, "bf16": bf16, "fp16": fp16, "fp8": fp8, "int8": int8}
        return next((name for name, value in presets.items() if value == self), short_repr(self))


def searched(scale: LossScale | None) -> LossScale | None:
    """Returns a loss scale that skipped steps lower; None for a constant one, and for none."""
    return None if scale is None or scale.factor == 1 else scale


def _products_like(value: Any) -> str:
    """Returns the products that were probably meant by a name or by a class."""
    name = str(getattr(value, "__name__", value)).lower()
    return "Int8Products()" if "int" in name else "Fp8Products()"


fp32 = Precision()
"""True fp32 everywhere, on accelerators too."""

bf16 = Precision(compute=jnp.bfloat16, matmul="default")
"""bf16 compute, fp32 master weights and reductions of weight gradients."""

fp16 = Precision(compute=jnp.float16, matmul="default", loss_scale=LossScale())
"""fp16 compute with dynamic loss scaling, fp32 master weights and reductions of weight
gradients."""

fp8 = Precision(compute=jnp.bfloat16, matmul="default", products=Fp8Products())
"""As bf16, and the products of dense layers and experts in 8-bit floats."""

int8 = Precision(compute=jnp.bfloat16, matmul="default", products=Int8Products())
"""As bf16, and the products of dense layers and experts in 8-bit whole numbers."""


def select_if_finite(finite: Bool[Array, ""], new: Tree, old: PyTree) -> Tree:
    """`new` where `finite`, else `old`, leaf by leaf: how a step is skipped.

    A `where` and not a branch, so that no collective ever stands in a branch.
    """
    return jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, old)
