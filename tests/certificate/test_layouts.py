"""Which layouts a certificate runs: nothing skipped, every pair met, the same list every time."""

from __future__ import annotations

import math
from collections import Counter
from itertools import chain, combinations, permutations, product

import pytest

from jaxtrain.certificate.covering import (
    AXES,
    covering_array,
    factorisation_count,
    factorisations,
)
from jaxtrain.certificate.layouts import (
    CUT,
    EVERYWHERE,
    EXPERTS,
    MESHES,
    PIPELINES,
    STAGED,
    STAGED_EXPERTS,
    Layout,
    _cut_options,
    _options,
    _staged_options,
    layouts,
)


@pytest.mark.parametrize(("devices", "count"), [(8, 56), (4, 21), (2, 6), (1, 1)])
@pytest.mark.parametrize("experts", [False, True])
def test_all_holds_the_factorisations_that_acceptance_counts(
    devices: int, count: int, experts: bool
) -> None:
    """56 of 8 devices over data, fsdp, stage, expert, context and tensor, whatever the model."""
    assert len(factorisations(devices)) == factorisation_count(devices, len(AXES)) == count
    meshes = {tuple(each.items()) for each in factorisations(devices)}
    for mode in EVERYWHERE:
        held = {m for m in meshes if mode != "gspmd" or dict(m)["stage"] == 1}
        found = [x.axes for x in layouts(devices, "all", experts=experts)[0] if x.mode == mode]
        assert held <= set(found)


@pytest.mark.parametrize("axes", [("a",), ("a", "b"), ("a", "b", "c"), ("a", "b", "c", "d", "e")])
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
    _options(list(MESHES)),
    _options(list(EXPERTS)),
    _staged_options(list(STAGED)),
    _staged_options(list(STAGED_EXPERTS)),
    _cut_options(list(CUT)),
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


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: f"{len(options)} options")
def test_usual_values_stand_where_no_pair_needs_another(options: dict) -> None:
    """In as many rows as can be, and every pair is still met."""
    usual = list(options)[1:3]
    rows = covering_array(options, usual=usual)
    pairs = [{(a, row[a], b, row[b]) for a, b in permutations(options, 2)} for row in rows]
    met = Counter(chain(*pairs))
    assert len(met) == sum(len(options[a]) * len(options[b]) for a, b in permutations(options, 2))
    for row, mine in zip(rows, pairs, strict=True):
        for name in usual:
            others = [met[pair] for pair in mine if pair[0] == name]
            assert row[name] == options[name][0] or min(others) == 1


@pytest.mark.parametrize("experts", [False, True])
def test_each_two_mesh_axes_stand_together_in_quick(experts: bool) -> None:
    axes = AXES if experts else tuple(axis for axis in AXES if axis != "expert")
    cut = [{a for a, n in x.axes if n > 1} for x in layouts(8, "quick", experts=experts)[0]]
    assert all(any({a, b} <= mesh for mesh in cut) for a, b in combinations(axes, 2))
    assert any("replica" in mesh and len(mesh) > 1 for mesh in cut)


def test_of_arrays_that_break_ties_otherwise_the_cheapest_is_taken() -> None:
    options = {"a": range(5), "b": range(5), "c": range(2), "d": range(2), "e": range(4)}
    assert len(covering_array(options)) == 25, "a pair of a and b in each"
    dear = lambda rows: sum(row["c"] == row["d"] == 0 for row in rows)  # noqa: E731
    assert dear(covering_array(options, dear)) < dear(covering_array(options))


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


def test_models_with_experts_are_cut_along_their_axis_too() -> None:
    every, count = layouts(8, "all", experts=True)
    assert len(every) == count
    meshes = {each.axes for each in every if dict(each.axes).get("expert", 1) > 1}
    assert {tuple(f.items()) for f in factorisations(8) if f["expert"] > 1} <= meshes
    quick = layouts(8, "quick", experts=True)[0]
    cut = [each for each in quick if dict(each.axes).get("expert", 1) > 1]
    assert {each.pipeline for each in cut} >= {"none", "1F1B", "zero bubble"}
    assert {each.mode for each in cut} >= {"explicit", "gspmd"}
    layout = Layout((("expert", 8),), microbatches=4)
    assert layout.reference(balanced=True).microbatches == 4
    assert layout.reference().microbatches == 1


@pytest.mark.parametrize("devices", [8, 6, 1])
def test_of_a_model_whose_rows_cannot_be_cut_no_layout_cuts_them(devices: int) -> None:
    """And each pair of its choices is met all the same."""
    every, count = layouts(devices, "all", context=False)
    assert len(every) == count and all("context" not in dict(each.axes) for each in every)
    quick = [
        each for each in layouts(devices, "quick", context=False)[0] if each.pipeline == "none"
    ]
    met = {(each.mode, each.sharding, each.loop) for each in quick}
    for a, b in ((0, 1), (0, 2), (1, 2)):
        pairs = {(each[a], each[b]) for each in met}
        assert len(pairs) == len({p for p, _ in pairs}) * len({p for _, p in pairs})


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
