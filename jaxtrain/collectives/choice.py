"""Which algorithm moves what, in the explicit step."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtrain.collectives.lax_form import Lax
from jaxtrain.collectives.recursive import Recursive
from jaxtrain.collectives.ring import Ring


@dataclass(frozen=True)
class Collectives:
    """Algorithms of the explicit step, by what they move; they change no result beyond rounding.

    fsdp: weights gathered for use, their gradients scattered back to the shards that rest.
    tensor: activations between sequence-split and column-split. A `Ring` here
      is a collective matmul (`matmul.py`), whose sums of 16-bit activations travel in fp32; `Lax`'s
      travel in the compute dtype.
    """

    fsdp: Lax | Ring | Recursive = Lax()  # noqa: RUF009 (frozen)
    tensor: Lax | Ring | Recursive = Lax()  # noqa: RUF009 (frozen)
