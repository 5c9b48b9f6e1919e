"""Weighted mixtures of datasets, in random access.

Rows come in blocks. How many rows of a block each part gives follows from the cumulative weights
times the row number, rounded down, so the counts never drift: after any number of blocks each part
is within one row of its weight. Which rows of the block they are is a permutation by (seed, block).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, NamedTuple

import numpy as np

from jaxtrain.data.dataset import Batch, Dataset
from jaxtrain.data.permutation import permutation

WEIGHT_BITS = 30
MIN_BLOCK = 256


@dataclass(frozen=True)
class Mixture:
    """(weight, source) pairs; the weights are relative and count rows.

    parts: the pairs, such as ((0.7, TextFiles("a/*.txt")), (0.3, JsonLines("b.jsonl"))).
    """

    parts: tuple[tuple[float, Any], ...]

    def __post_init__(self) -> None:
        if not isinstance(self.parts, tuple) or not all(map(_is_pair, self.parts)):
            raise ValueError(
                f"Mixture: parts is {self.parts!r}; give a tuple of (weight, source), such as "
                "((0.7, TextFiles(...)), (0.3, StdlibSource()))"
            )
        problems = []
        if not self.parts:
            problems.append("parts is empty; give at least one (weight, source)")
        for weight, source in self.parts:
            if not 0.0 < weight < float("inf"):
                problems.append(f"weight {weight} of {source} is not positive; drop it or raise it")
            if isinstance(source, Mixture):
                problems.append("a part is itself a Mixture; multiply its weights out")
        if not problems and min(w for w, _ in self.parts) < 2**-20 * sum(w for w, _ in self.parts):
            problems.append("a weight is below a millionth of the sum; drop that part")
        if problems:
            raise ValueError("Mixture: " + "; ".join(problems))


def _is_pair(part: object) -> bool:
    if not isinstance(part, tuple) or len(part) != 2 or not isinstance(part[0], int | float):
        return False
    # Text has pieces, token files are files.
    return isinstance(part[1], Mixture) or any(hasattr(part[1], n) for n in ("pieces", "files"))


class Turn(NamedTuple):
    part: np.ndarray
    """[rows] int64: which part each row is from."""
    row: np.ndarray
    """[rows] int64: its number in that part's own order."""


class MixtureOrder:
    """The part that each row comes from. `turns` is a pure function of (weights, seed, indices).

    Exact up to 2**33 rows: weights are rounded to multiples of 2**-30.
    """

    def __init__(self, weights: Sequence[float], *, seed: int) -> None:
        self.seed = seed
        shares = np.cumsum(np.asarray(weights, dtype=np.float64))
        self.edges = np.round(shares / shares[-1] * 2**WEIGHT_BITS).astype(np.int64)
        smallest = int(np.diff(self.edges, prepend=0).min())
        # Counts stay monotone as long as each part's share of a block is one row or more.
        block = -(-(2**WEIGHT_BITS) // smallest)
        self.block = max(MIN_BLOCK, 1 << (block - 1).bit_length())

    def before(self, block: int) -> np.ndarray:
        """[parts] int64: rows each part has given in all blocks before `block`."""
        return np.diff((self.edges * (block * self.block)) >> WEIGHT_BITS, prepend=0)

    def turns(self, indices: np.ndarray) -> Turn:
        blocks, places = np.divmod(indices, self.block)
        part, row = np.empty_like(indices), np.empty_like(indices)
        for block in np.unique(blocks):
            chosen = blocks == block
            order = self._block(int(block))
            part[chosen] = order.part[places[chosen]]
            row[chosen] = order.row[places[chosen]]
        return Turn(part=part, row=row)

    def _block(self, block: int) -> Turn:
        first = self.before(block)
        counts = self.before(block + 1) - first
        places = permutation(self.block, "mixture", self.seed, block)
        part, row = np.empty_like(places), np.empty_like(places)
        for number, own in enumerate(np.split(places, np.cumsum(counts)[:-1])):
            part[own] = number
            row[np.sort(own)] = first[number] + np.arange(len(own))
        return Turn(part=part, row=row)

    def rows_within(self, lengths: np.ndarray) -> int:
        """The most leading rows in which no part gives more than its `lengths` rows."""
        low, high = 0, 1
        while (self.before(high) <= lengths).all():
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            if (self.before(middle) <= lengths).all():
                low = middle
            else:
                high = middle
        order = self._block(low)
        over = np.flatnonzero(order.row >= lengths[order.part])
        return low * self.block + int(over[0])


class MixtureDataset:
    """A `Dataset` that reads several in turn, each in its own order and through its own epochs.

    `len` is the number of rows before any part begins again: within it no row is repeated.
    """

    def __init__(self, parts: Sequence[tuple[float, Dataset]], *, seed: int) -> None:
        self.datasets = [dataset for _, dataset in parts]
        self.order = MixtureOrder([weight for weight, _ in parts], seed=seed)
        first = self.datasets[0]
        if differ := [d for d in self.datasets if (d.vocab, d.seq) != (first.vocab, first.seq)]:
            raise ValueError(
                f"a mixture has one vocab and seq; found vocab={differ[0].vocab}, "
                f"seq={differ[0].seq} beside vocab={first.vocab}, seq={first.seq}"
            )
        self.vocab, self.seq, self.token_bytes = first.vocab, first.seq, first.token_bytes
        made_of = ([d.digest for d in self.datasets], self.order.edges.tolist())
        self.digest = sha256(repr(made_of).encode()).hexdigest()
        self._rows = self.order.rows_within(np.array([len(d) for d in self.datasets]))

    def __len__(self) -> int:
        return self._rows

    def encode(self, text: str) -> list[int]:
        return self.datasets[0].encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        return self.datasets[0].decode(ids)

    def rows(self, indices: np.ndarray) -> Batch:
        indices = np.asarray(indices, dtype=np.int64)
        turn = self.order.turns(indices)
        batch: Batch = {}
        for number in np.unique(turn.part) if len(indices) else (0,):
            chosen = turn.part == number
            for name, rows in self.datasets[number].rows(turn.row[chosen]).items():
                shape = (len(indices), *rows.shape[1:])
                batch.setdefault(name, np.empty(shape, dtype=rows.dtype))[chosen] = rows
        return batch
