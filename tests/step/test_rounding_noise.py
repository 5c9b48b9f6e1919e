"""Leaves of one compressed sum are rounded apart, without a program: only keys are looked at."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.compression.codecs import Int8
from jaxtrain.compression.compressed import Compressed
from jaxtrain.compression.residuals import compressed_parts
from jaxtrain.compression.sums import Choice, CompressedSums
from jaxtrain.mesh.sharding import Leaf

NAMES = ("period.0.mlp.up", "period.0.mlp.gate", "period.1.mlp.up", "embedding")


def test_leaves_of_a_sum_round_by_noise_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal gradients, of equal leaves: their errors would add up over the model; and so would
    those of steps."""
    whole = ((), ())
    places = {
        name: Leaf(name, (16, 8), "float32", ("embed", "mlp"), whole, whole, whole)
        for name in NAMES
    }
    reducer, noise = Compressed(Int8()), []
    parts = compressed_parts(reducer, 0, places, {"data": 8})

    def one_device(sums: Any, part: Any, mean: Any, error: Any, q: Any, key: jax.Array) -> Any:
        noise.append(np.asarray(jax.random.uniform(key, mean.shape)).ravel())
        return mean, error, q

    monkeypatch.setattr(CompressedSums, "_compressed", one_device)
    sums = CompressedSums(reducer, parts, Choice(reducer.codec))
    grads = {name: jnp.ones((16, 8)) for name in NAMES}
    for step in range(2):
        sums.sum(grads, {}, jnp.float32(1), jax.random.key(step))
    assert len(noise) == 2 * len(NAMES)
    likeness = np.corrcoef(noise)
    np.fill_diagonal(likeness, 0)
    assert np.abs(likeness).max() < 0.5
