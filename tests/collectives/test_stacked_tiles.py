"""Tiles of a dim on a new first dim, copied one by one as XLA:CPU likes it, or transposed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.collectives import tiles
from jaxtrain.collectives.tiles import stack_tiles

CASES = [((8, 3), 0, 4), ((3, 8), 1, 4), ((2, 6, 5), 1, 3), ((2, 3, 4), 2, 4), ((2, 64), 1, 64)]


@pytest.mark.parametrize("shape, dim, count", CASES)
@pytest.mark.parametrize("most", [tiles.MOST_SLICES, 0], ids=["copied", "transposed"])
def test_tile_i_is_the_i_th_part_of_the_dim(monkeypatch, shape, dim, count, most):
    monkeypatch.setattr(tiles, "MOST_SLICES", most)
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    found = jax.jit(lambda x: stack_tiles(x, dim, count))(x)
    np.testing.assert_array_equal(found, np.stack(np.split(x, count, axis=dim)))


def test_what_a_cpu_copies_is_transposed_elsewhere():
    traced = jax.jit(lambda x: stack_tiles(x, 1, 4)).trace(np.zeros((3, 8), np.float32))
    assert "transpose" not in traced.lower(lowering_platforms=("cpu",)).as_text()
    assert "concatenate" not in traced.lower(lowering_platforms=("tpu",)).as_text()


def test_nothing_has_tiles_of_nothing():
    assert stack_tiles(jnp.zeros((0, 8)), 1, 4).shape == (4, 0, 2)
