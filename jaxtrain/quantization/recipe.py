"""Recipes of products in 8 bits, as values of an experiment: number formats and scales."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from jaxtrain.quantization.delayed import Delayed
from jaxtrain.quantization.formats import E4M3, E5M2, INT8, Format

PRODUCT = "quantized_product"
"""Name under which remat policies save the outputs of products in 8 bits, into which they do not
look."""


@dataclass(frozen=True)
class Fp8Products:
    """Products in 8-bit floats: activations and weights as e4m3, the gradients of outputs as e5m2
    (Micikevicius et al. 2022), each tensor with one scale, a power of two (`formats.Format.scale`).

    scaling: None takes the scale from the tensor's current greatest magnitude, for which devices
    wait for each other in every product. `Delayed()` takes it from the steps before.
    """

    scaling: Delayed | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.scaling, Delayed | None):
            raise ValueError(
                f"scaling={self.scaling!r} must say where scales come from; use Delayed(), or None "
                "for those of the moment"
            )

    rate: ClassVar[str] = "fp8"
    """Name of the rate of such products in `mesh.hardware.Chip`."""

    @property
    def forward(self) -> Format:
        """Format of x and w."""
        return E4M3

    @property
    def backward(self) -> Format:
        """Format of dy."""
        return E5M2


@dataclass(frozen=True)
class Int8Products:
    """Products of integers from -127 to 127, each tensor with one scale, its greatest magnitude /
    127, rounded to nearest. dy is int8 too, so that all three products are of 8 bits (as AQT
    trains: Abdolrashidi et al. 2021, "Pareto-optimal quantized ResNet is mostly 4-bit")."""

    rate: ClassVar[str] = "int8"
    """Name of the rate of such products in `mesh.hardware.Chip`."""
    scaling: ClassVar[None] = None
    """Scales are current ones."""

    @property
    def forward(self) -> Format:
        """Format of x and w."""
        return INT8

    @property
    def backward(self) -> Format:
        """Format of dy."""
        return INT8


Products = Fp8Products | Int8Products
