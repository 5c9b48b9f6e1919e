"""Which collectives a platform gets where the experiment asks for none."""

from __future__ import annotations

from dataclasses import replace

import pytest

import jaxtrain
from jaxtrain.collectives import Collectives, Padded, Recursive, Ring
from jaxtrain.collectives.defaults import default_collectives
from jaxtrain.mesh.mesh import load_mesh


@pytest.mark.parametrize(
    ("name", "axes", "weights"),
    [
        ("v5p_16", dict(fsdp=16), dict(fsdp=Recursive(), weight_gradients=Ring(1))),
        ("v5p_512", dict(data=16, fsdp=32), dict(fsdp=Recursive(), weight_gradients=Ring(1))),
        ("v5e_16", dict(expert=2, tensor=8), dict(fsdp=Recursive(), weight_gradients=Ring(1))),
        ("v5p_512", dict(fsdp=64, tensor=8), dict(fsdp=Recursive())),
        ("v5e_16", dict(data=2, tensor=8), {}),
        ("v5p_512", dict(fsdp=8, expert=64), dict(fsdp=Recursive(), experts=Padded())),
    ],
)
def test_tpus_get_permutes_of_ours(name, axes, weights) -> None:
    """For weights where they are split; their gradients within products as long as tiles fill a
    matrix unit. For rows of experts up to as many devices."""
    spec = replace(load_mesh(name), axes=tuple(axes.items()))
    wanted = dict(tensor=Ring(), experts=Padded(Ring())) | weights
    assert default_collectives(spec) == Collectives(**wanted)


def test_elsewhere_the_compilers_are_taken() -> None:
    assert default_collectives(load_mesh("h100_8")) == Collectives()
    assert default_collectives(jaxtrain.mesh_from_axes(fsdp=8)) == Collectives()
