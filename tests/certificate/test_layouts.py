"""Which layouts a certificate runs: nothing skipped, every pair met, the same list every time."""

from __future__ import annotations

import math
from itertools import combinations, product

import pytest

from jaxtrain.certificate.covering import covering_array, factorisation_count, factorisations
from jaxtrain.certificate.layouts import (
    EVERYWHERE,
    MESHES,
    PIPELINES,
    STAGED,
    Layout,
    _options,
    _staged_options,
    layouts,
)


@pytest.mark.parametrize(("devices", "count"), [(8, 20), (4, 10), (2, 4), (1, 1)])
def test_the_factorisations_that_acceptance_counts(devices: int, count: int) -> None:
    assert len(factorisations(devices)) == factorisation_count(devices, 4) == count


@pytest.mark.parametrize("axes", [("a",), ("a", "b"), ("a", "b", "c"), ("a", "b", "c", "d")])
@pytest.mark.parametrize("devices", [1, 2, 6, 12, 16, 30])
def test_every_ordered_product_is_there_once(devices: int, axes: tuple[str, ...]) -> None:
    found = {tuple(f[a] for a in axes) for f in factorisations(devices, axes)}
    every = product(range(1, devices + 1), repeat=len(axes) - 1)
    wanted = {
        (*lead, devices // math.prod(lead)) for lead in every if devices % math.prod(lead) == 0
    }
    assert found == wanted
    assert len(factorisations(devices, axes)) == factorisation_count(devices, len(axes))


OPTIONS = [
    {"a": [1, 2], "b": ["x", "y", "z"]},
    {"a": range(4), "b": range(3), "c": range(2), "d": range(2), "e": range(5)},
    {name: (False, True) for name in "abcdefgh"},
    _options(8, list(MESHES)),
    _staged_options(8, list(STAGED)),
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: f"{len(options)} options")
def test_a_covering_array_meets_every_pair(options: dict) -> None:
    rows = covering_array(options)
    for a, b in combinations(options, 2):
        met = {(row[a], row[b]) for row in rows}
        assert met == set(product(options[a], options[b]))


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: f"{len(options)} options")
def test_a_covering_array_is_small_and_the_same_every_time(options: dict) -> None:
    rows = covering_array(options)
    assert rows == covering_array(options)
    sizes = sorted((len(values) for values in options.values()), reverse=True)
    fewest, every = sizes[0] * sizes[1], math.prod(sizes)
    assert fewest <= len(rows) <= min(every, 2 * fewest + 4)


@pytest.mark.parametrize("devices", [8, 4, 2, 1])
def test_all_holds_every_mesh_in_both_modes_and_quick(devices: int) -> None:
    everything, count = layouts(devices, "all")
    quick, quick_count = layouts(devices, "quick")
    assert len(everything) == count == len(set(everything[: count - quick_count])) + quick_count
    assert everything[count - quick_count :] == quick
    sizes = [n for n in (8, 4, 2, 1) if n <= devices]
    every = [(f, m) for n in sizes for f in factorisations(n) for m in EVERYWHERE]
    pairs = {(tuple(f.values()), m) for f, m in every if m != "gspmd" or f["stage"] == 1}
    listed = everything[: count - quick_count]
    assert {(tuple(n for _, n in each.axes), each.mode) for each in listed} == pairs


def test_an_unknown_set_of_layouts_is_refused() -> None:
    with pytest.raises(ValueError, match="'some'; use 'quick' or 'all'"):
        layouts(8, "some")


@pytest.mark.parametrize(("dropout", "microbatches"), [(0.0, 1), (0.1, 4)])
def test_accumulation_is_held_against_one_microbatch(dropout: float, microbatches: int) -> None:
    """But for dropout, whose masks are those of a microbatch."""
    layout = Layout((("data", 8),), microbatches=4, dropout=dropout, periods=3)
    expected = Layout((("data", 1),), microbatches=microbatches, dropout=dropout, periods=3)
    assert layout.reference() == expected


def test_a_steep_activation_is_met_on_stages_that_layers_do_not_divide() -> None:
    """By every pipeline, and in padding slots, whose work is on zeros."""
    steep = [x for x in layouts(8, "quick")[0] if x.activation != "own"]
    assert {x.pipeline for x in steep} == set(PIPELINES) - {"none"}
    assert any((x.periods or 0) % dict(x.axes)["stage"] for x in steep)
