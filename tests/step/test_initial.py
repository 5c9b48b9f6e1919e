"""The weights that a run begins with are the same to the bit on every mesh."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from tiny import at_rest

import jaxtrain
from jaxtrain.session.session import initialise
from jaxtrain.step.layer_order import params_in_natural_order


class Drawn(nnx.Module):
    """Weights of several distributions, [rows, 8], of which a device may have 4 columns."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        draws = (jax.random.truncated_normal, jax.random.exponential, jax.random.gumbel)
        for name, draw in zip("abc", draws, strict=True):
            more = (-2.0, 2.0) if draw is jax.random.truncated_normal else ()
            drawn = draw(rngs.params(), *more, shape=(16, 8)) / 50
            setattr(self, name, nnx.Param(drawn, axes=("embed", "mlp")))

    def loss(self, batch: dict[str, jax.Array], *, key: Any) -> tuple[jax.Array, jax.Array]:
        scale = sum(getattr(self, name)[...].sum() for name in "abc")
        return (batch["tokens"] * scale).sum(), batch["weights"].sum()


MESHES = (dict(tensor=2), dict(fsdp=2), dict(data=2, fsdp=2, tensor=2))


@pytest.mark.usefixtures("optimising_compiler")
@pytest.mark.parametrize("model", [None, Drawn], ids=["decoder", "module"])
def test_as_users_compile_it(model: Any, decoder: jaxtrain.Experiment) -> None:
    """Other tests compile without LLVM's optimisations, in which rows of 4 and of 8 numbers differ
    in the last bit."""
    experiment = replace(decoder, model=model) if model else decoder
    found = []
    for axes in ({}, *MESHES):
        rest = at_rest(experiment, **axes)
        params = initialise(rest.assembly, rest.shardings).params
        natural = params_in_natural_order(rest.assembly, params)
        found.append({name: np.asarray(leaf) for name, leaf in natural.items()})
    for axes, params in zip(MESHES, found[1:], strict=True):
        differ = [
            name for name, leaf in params.items() if leaf.tobytes() != found[0][name].tobytes()
        ]
        assert not differ, axes
