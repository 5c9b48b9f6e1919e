"""Choice of algorithms for the collectives of the explicit step."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtrain.collectives.lax_form import Lax
from jaxtrain.collectives.recursive import Recursive
from jaxtrain.collectives.ring import Ring
from jaxtrain.collectives.rows import Padded, Ragged
from jaxtrain.violations import raise_violations

Exact = Lax | Ring | Recursive
"""The algorithms by name: a choice is a value of one of these."""


@dataclass(frozen=True)
class Collectives:
    """Algorithms of the explicit step, by what they move; they change no result beyond rounding.

    fsdp: weights gathered for use; and parameters that were updated in parts, gathered to be whole
      again (ZeRO-1 and 2). Permutes of `Ring` and `Recursive` are tied to products of the layer
      that runs meanwhile (`overlap.alongside`).
    tensor: activations between sequence-split and column-split. Sums
      travel in the compute dtype. A `Ring` here is a collective matmul (`matmul.py`). What the
      embedding and the head of a pipeline do over (tensor, stage) is `Lax`'s always.
    weight_gradients: gradients of gathered weights, scattered back to the shards that rest. None:
      by `fsdp`, once all of a layer are made. A `Ring` here is a collective matmul where a product
      makes the gradient, each hop behind a tile of it; the others go by it once they are made.
    experts: rows of tokens to the devices of their experts and back: `Padded()`, or `Ragged()` for
      no more than there are, on GPUs and TPUs. Permutes, as of `Padded(Ring())`, are tied to
      products of the chunks before and after (`Execution.expert_chunk`).

    Raises ValueError for a field that holds no algorithm.
    """

    fsdp: Exact = Lax()  # noqa: RUF009 (frozen)
    tensor: Exact = Lax()  # noqa: RUF009 (frozen)
    weight_gradients: Exact | None = None
    experts: Padded | Ragged = Padded()  # noqa: RUF009 (frozen)

    @property
    def scatters(self) -> Exact:
        """Algorithm that scatters gradients of gathered weights."""
        return self.fsdp if self.weight_gradients is None else self.weight_gradients

    def __post_init__(self) -> None:
        violations = algorithm("fsdp", self.fsdp) + algorithm("tensor", self.tensor)
        if self.weight_gradients is not None:
            violations += algorithm("weight_gradients", self.weight_gradients)
        if not isinstance(self.experts, Padded | Ragged):
            violations.append(
                f"experts={self.experts!r} must say how rows travel; use Padded(), or Ragged()"
            )
        raise_violations(violations)


def algorithm(name: str, value: object) -> list[str]:
    """A violation unless `value` is one of `Exact`."""
    if isinstance(value, Exact):
        return []
    meant = value if isinstance(value, str) else getattr(value, "__name__", "")
    near = [kind for kind in ("Lax", "Ring", "Recursive") if kind.lower() in meant.lower()]
    use = f"{near[0]}()" if near else "Lax(), Ring() or Recursive()"
    return [f"{name}={value!r} must be an algorithm's value; use {name}={use}"]
