"""Axis names of parameters: one for each dim, stacks named by who stacks."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jaxtrain.nn.module import STACKED, build, take_apart

NAMES = ("embed", "mlp")


class Kernels(nnx.Module):
    """Two kernels [*lead, 4, 8], one in each spelling, and a bias without names."""

    def __init__(self, number: jax.Array, lead: tuple[int, ...] = ()) -> None:
        self.ours = nnx.Param(jnp.ones((*lead, 4, 8)) * number, axes=NAMES)
        self.flax = nnx.Param(jnp.ones((*lead, 4, 8)) * number, out_sharding=NAMES)
        self.bias = nnx.Param(jnp.zeros(8))


def test_a_missing_name_is_refused_and_not_taken_for_a_stack() -> None:
    model = build(lambda key: Kernels(jnp.float32(1), lead=(3,)), jax.random.key(0))
    with pytest.raises(ValueError, match="name one logical axis") as error:
        take_apart(model)
    lines = str(error.value).splitlines()
    assert len(lines) == 2, "every parameter at once"
    for line, name in zip(sorted(lines), ("flax", "ours"), strict=True):
        assert f"parameter {name} has shape (3, 4, 8) and 2 axis names" in line
        assert "(None, 'embed', 'mlp'), or ('layers', 'embed', 'mlp') for stacked" in line
        assert "transform_metadata={nnx.PARTITION_NAME: 'layers'}" in line


def test_names_too_many_are_refused() -> None:
    model = build(lambda key: nnx.Dict(w=nnx.Param(jnp.ones(3), axes=NAMES)), jax.random.key(0))
    with pytest.raises(ValueError, match=r"w has shape \(3,\) and 2 axis names .*for each dim$"):
        take_apart(model)


def vmapped(metadata: dict[str, str]) -> nnx.Module:
    return nnx.vmap(Kernels, transform_metadata=metadata)(jnp.arange(3.0))


def scanned(metadata: dict[str, str]) -> nnx.Module:
    @nnx.scan(length=3, in_axes=(nnx.Carry,), transform_metadata=metadata)
    def layers(carry: jax.Array) -> tuple[jax.Array, Kernels]:
        return carry + 1, Kernels(carry)

    return layers(jnp.float32(0))[1]


@pytest.mark.parametrize("stack", [vmapped, scanned])
def test_a_transform_that_is_told_so_names_its_stack(stack) -> None:
    axes = take_apart(build(lambda key: stack(STACKED), jax.random.key(0))).axes
    assert axes == {"ours": ("layers", *NAMES), "flax": ("layers", *NAMES), "bias": (None, None)}
    with pytest.raises(ValueError, match="ours has shape"):
        take_apart(build(lambda key: stack({nnx.PARTITION_NAME: "layers"}), jax.random.key(0)))
