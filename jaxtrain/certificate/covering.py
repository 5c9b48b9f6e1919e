"""Builds all factorisations of a mesh, and pairwise covering arrays."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

from jaxtrain.mesh.axes import MESH_AXES

AXES = tuple(axis for axis in MESH_AXES if axis != "replica")
"""Mesh axes of the factorisations. A step does over `replica` what it does over `data`: only the
pairwise layouts of eight devices have it."""


def factorisations(devices: int, axes: Sequence[str] = AXES) -> list[dict[str, int]]:
    """Returns every way to write `devices` as an ordered product over the axes, each factor >=
    1."""
    divisors = [n for n in range(1, devices + 1) if devices % n == 0]
    meshes = [
        dict(zip(axes, sizes, strict=True))
        for sizes in product(divisors, repeat=len(axes))
        if math.prod(sizes) == devices
    ]
    assert len(meshes) == factorisation_count(devices, len(axes)), "a factorisation was lost"
    return meshes


def factorisation_count(devices: int, axes: int) -> int:
    """The closed form: the product over primes p^k of C(k + axes - 1, axes - 1)."""
    count, n, p = 1, devices, 2
    while n > 1:
        k = 0
        while n % p == 0:
            n, k = n // p, k + 1
        count *= math.comb(k + axes - 1, axes - 1)
        p += 1
    return count


CoveringRow = dict[str, Any]
TURNS = 16
"""Number of ways to break ties that are tried."""


def covering_array(
    options: Mapping[str, Sequence[Any]],
    cost: Callable[[list[CoveringRow]], Any] = len,
    usual: Sequence[str] = (),
) -> list[CoveringRow]:
    """Returns rows that contain every pair of values of every two options at least once.

    Greedy, one row at a time (Cohen et al. 1997, AETG), without randomness: a row starts from the
    first uncovered pair and gives each further option the value that covers most. In a tie the
    first value wins, counted from another value in each row. Several ways to count are tried, and
    the rows with the lowest `cost` are returned. usual: options whose first value is used where no
    pair needs another.
    """
    arrays = (_rows(options, turn) for turn in range(TURNS))
    return min((_with_usual(rows, options, usual) for rows in arrays), key=cost)


def _rows(options: Mapping[str, Sequence[Any]], turn: int) -> list[CoveringRow]:
    """Returns rows with every pair of values, by one way to break ties: each row prefers values
    `turn` places later than the previous row."""
    names = list(options)
    index = {name: range(len(options[name])) for name in names}
    uncovered = {
        ((a, i), (b, j)) for a, b in combinations(names, 2) for i in index[a] for j in index[b]
    }
    order = {name: number for number, name in enumerate(names)}
    rows: list[CoveringRow] = []
    while uncovered:
        begin = turn * len(rows)

        def rank(name: str, i: int, begin: int = begin) -> int:
            return (i - begin) % len(index[name])

        first = min(uncovered, key=lambda pair: [(order[n], rank(n, i)) for n, i in pair])
        row = dict(first)
        for name in names:
            if name not in row:
                gains = [_covers({**row, name: i}, name, order, uncovered) for i in index[name]]
                best = [i for i in index[name] if gains[i] == max(gains)]
                row[name] = min(best, key=lambda i: rank(name, i - turn))
        cells = sorted(row.items(), key=lambda cell: order[cell[0]])
        uncovered -= set(combinations(cells, 2))
        rows.append({name: options[name][row[name]] for name in names})
    return rows


def _with_usual(
    rows: list[CoveringRow], options: Mapping[str, Sequence[Any]], usual: Sequence[str]
) -> list[CoveringRow]:
    """Sets options of `usual` to their first value where other rows have every pair of the present
    value."""

    def pairs(row: CoveringRow, name: str) -> list[tuple[str, int, str, int]]:
        other_cells = [(n, options[n].index(v)) for n, v in row.items() if n != name]
        return [(name, options[name].index(row[name]), *other) for other in other_cells]

    for name in usual:
        occurrences = Counter(pair for row in rows for pair in pairs(row, name))
        for row in rows:
            row_pairs = pairs(row, name)
            if min(occurrences[pair] for pair in row_pairs) > 1:
                occurrences.subtract(row_pairs)
                row[name] = options[name][0]
                occurrences.update(pairs(row, name))
    return rows


def _covers(
    row: dict[str, int], name: str, order: dict[str, int], uncovered: set[tuple[Any, Any]]
) -> int:
    """Returns the number of uncovered pairs that `name` makes with the other cells of the row."""
    cell = (name, row[name])
    pairs = (
        (cell, other) if order[name] < order[other[0]] else (other, cell)
        for other in row.items()
        if other[0] != name
    )
    return sum(pair in uncovered for pair in pairs)
