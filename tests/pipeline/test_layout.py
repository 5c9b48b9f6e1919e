"""Where layers lie on a pipeline, against lists dealt out by hand."""

from __future__ import annotations

from itertools import product

import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.pipeline.layout import StageLayout

EVERY = list(product(range(1, 14), range(1, 5), range(1, 4)))


def dealt(layers: int, stages: int, chunks: int) -> list[list[int]]:
    """The layers of each position, in the pipeline's order: the first ones have one more."""
    positions = stages * chunks
    counts = [layers // positions + (p < layers % positions) for p in range(positions)]
    order = iter(range(layers))
    return [[next(order) for _ in range(count)] for count in counts]


def test_positions_have_the_layers_in_order_and_the_first_have_the_extra() -> None:
    for size in EVERY:
        layers, stages, chunks = size
        layout, hands = StageLayout(*size), dealt(*size)
        depth = max(len(hand) for hand in hands)
        assert (layout.positions, layout.depth) == (stages * chunks, depth)
        assert layout.padding == sum(depth - len(hand) for hand in hands)
        # A device holds [chunks, depth] of a leaf whose second dim is split over stages.
        of_device = layout.layer_of.reshape(chunks, stages, depth)
        for position, hand in enumerate(hands):
            chunk, stage = divmod(position, stages)
            wanted = hand + [-1] * (depth - len(hand))
            assert of_device[chunk, stage].tolist() == wanted, size
        flat = layout.layer_of.reshape(-1)
        assert flat[layout.slot_of].tolist() == list(range(layers))


def inverse(sizes: list[tuple[int, int, int]]) -> None:
    for size in sizes:
        layout = StageLayout(*size)
        leaf = jnp.arange(1.0, size[0] + 1)
        laid = layout.to_slots(leaf)
        assert laid.shape == layout.shape((size[0],))
        np.testing.assert_array_equal(laid.reshape(-1), layout.layer_of.reshape(-1) + 1.0)
        np.testing.assert_array_equal(layout.from_slots(laid), leaf)
        if layout.natural:
            assert laid is leaf and layout.from_slots(leaf) is leaf


def test_laid_and_ordered_are_inverse_and_padding_is_zero() -> None:
    inverse([(n, *rest) for n in (1, 4, 7) for rest in ((1, 1), (2, 1), (3, 1), (1, 2), (2, 3))])


@pytest.mark.slow
def test_laid_and_ordered_are_inverse_for_every_size() -> None:
    inverse(EVERY)


def test_natural_is_where_laying_changes_nothing() -> None:
    for size in EVERY:
        layout, layers = StageLayout(*size), size[0]
        same = layout.layer_of.reshape(-1).tolist() == list(range(layers))
        assert layout.natural == (same and layout.shape((layers, 3)) == (layers, 3))


@pytest.mark.parametrize("size", [(4, 2, 1), (5, 2, 1), (4, 2, 2), (5, 2, 2), (2, 3, 2)])
@pytest.mark.parametrize(("dim", "dtype"), [(0, jnp.bfloat16), (1, jnp.float32), (2, jnp.int8)])
def test_other_dims_and_dtypes(size, dim, dtype) -> None:
    layout = StageLayout(*size)
    leaf = np.random.default_rng(0).integers(1, 9, (size[0], 2, 3)).astype(dtype)
    leaf = jnp.asarray(np.moveaxis(leaf, 0, dim))
    laid = layout.to_slots(leaf, dim)
    assert laid.dtype == leaf.dtype
    lead = (size[2],) * (size[2] > 1) + (size[1] * layout.depth,)
    assert laid.shape == (*leaf.shape[:dim], *lead, *leaf.shape[dim + 1 :])
    assert laid.shape == layout.shape(leaf.shape, dim)
    np.testing.assert_array_equal(layout.from_slots(laid, dim), leaf)
    first = jnp.moveaxis(laid.reshape(*leaf.shape[:dim], -1, *leaf.shape[dim + 1 :]), dim, 0)
    of_layer = jnp.moveaxis(leaf, dim, 0)
    for slot, layer in enumerate(layout.layer_of.reshape(-1)):
        wanted = of_layer[layer] if layer >= 0 else jnp.zeros_like(of_layer[0])
        np.testing.assert_array_equal(first[slot], wanted)


def test_what_is_not_a_number_stays_out_of_the_padding() -> None:
    layout = StageLayout(3, 2, 1)
    laid = layout.to_slots(jnp.full((3, 2), jnp.nan))
    assert np.isnan(laid[:3]).all() and (laid[3] == 0).all()


def test_axes_are_those_of_the_laid_leaf() -> None:
    plain, chunked = StageLayout(5, 2), StageLayout(5, 2, 2)
    for axes in (("layers", "embed"), ("embed", "layers", "mlp"), ("embed", "mlp"), ()):
        assert plain.axes(axes) == axes
        leaf = tuple(5 if axis == "layers" else 3 for axis in axes)
        found = chunked.axes(axes)
        if "layers" not in axes:
            assert found == axes
            continue
        dim = axes.index("layers")
        assert found[dim : dim + 2] == ("chunks", "layers")
        assert found[:dim] + found[dim + 2 :] == axes[:dim] + axes[dim + 1 :]
        assert len(found) == len(chunked.shape(leaf, dim))
