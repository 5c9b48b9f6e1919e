"""Which collectives a platform gets where the experiment asks for none."""

from __future__ import annotations

from dataclasses import replace

import pytest

import jaxtrain
from jaxtrain.collectives import Collectives, Ring
from jaxtrain.mesh.mesh import load_mesh
from jaxtrain.step.defaults import default_collectives


@pytest.mark.parametrize(
    ("name", "axes", "weight_gradients"),
    [
        ("v5p_16", dict(fsdp=16), Ring(1)),
        ("v5e_16", dict(fsdp=4, expert=2, tensor=2), Ring(1)),
        ("v5p_512", dict(fsdp=64, tensor=8), None),
        ("v5e_16", dict(data=2, tensor=8), None),
    ],
)
def test_tpus_scatter_gradients_within_products(name, axes, weight_gradients) -> None:
    """Unless nothing is split, or tiles would not fill a matrix unit."""
    spec = replace(load_mesh(name), axes=tuple(axes.items()))
    assert default_collectives(spec) == Collectives(
        tensor=Ring(), weight_gradients=weight_gradients
    )


def test_elsewhere_the_compilers_are_taken() -> None:
    assert default_collectives(load_mesh("h100_8")) == Collectives()
    assert default_collectives(jaxtrain.mesh_from_axes(fsdp=8)) == Collectives()
