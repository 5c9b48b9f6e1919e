"""Documents packed whole into rows: none is cut at a row's end, so that each answer has its prompt.

Rows are filled by best fit, the longest documents first (Ding et al. 2024, "Fewer truncations
improve language modeling"). Which documents share a row is the same in every epoch; the order of
the rows is not.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxtrain.data.dataset import Batch
from jaxtrain.data.permutation import shuffle
from jaxtrain.data.token_file import TokenStore
from jaxtrain.data.token_rows import TokenRows
from jaxtrain.tokenizers import Vocabulary

log = logging.getLogger(__name__)

TOO_LONG = ("shorten", "drop")


@dataclass(frozen=True)
class DocumentStream:
    """Rows are cut from one stream of all documents: none has padding, and a document may end in
    the next row."""


@dataclass(frozen=True)
class WholeDocuments:
    """No document is cut at a row's end; the rest of a row is padding.

    too_long: what becomes of a document of more than seq + 1 tokens: `shorten` keeps its first
    seq + 1, `drop` leaves it out. One that would then have no token with a loss is left out.
    """

    too_long: str = "shorten"

    def __post_init__(self) -> None:
        if self.too_long not in TOO_LONG:
            raise ValueError(f"too_long={self.too_long!r}; use {' or '.join(TOO_LONG)}")


Packing = DocumentStream | WholeDocuments


class RowPlan(NamedTuple):
    documents: np.ndarray
    """[documents of all rows] int64: their numbers, row by row."""
    begins: np.ndarray
    """[documents of all rows] int64: where each begins, in row * seq + place."""
    lengths: np.ndarray
    """[documents of all rows] int64: the places it takes, one fewer than its tokens."""
    rows: int


class RowPlaces(NamedTuple):
    """The token at each place of some rows, all [rows, seq]. number: of its document in the plan.
    offset: in the document. address: in the token store. inside: False for padding."""

    number: np.ndarray
    offset: np.ndarray
    address: np.ndarray
    inside: np.ndarray


def plan_rows(places: np.ndarray, *, seq: int) -> RowPlan:
    """Returns rows of `seq` places for documents that take `places`, from 1 to seq; 0 leaves a
    document out. Best fit: each goes, the longest first, into the fullest row that has the room."""
    order = np.argsort(-places, kind="stable")
    order = order[places[order] > 0]
    row_of, begin_of = np.zeros(len(order), np.int64), np.zeros(len(order), np.int64)
    with_room: dict[int, list[int]] = defaultdict(list)
    rooms, rows = 0, 0  # rooms: bit n is set if a row has room for n
    for number, need in enumerate(places[order].tolist()):
        fitting = rooms >> need
        if fitting:
            room = need + (fitting & -fitting).bit_length() - 1
            row = with_room[room].pop()
            if not with_room[room]:
                rooms &= ~(1 << room)
        else:
            room, row, rows = seq, rows, rows + 1
        row_of[number], begin_of[number] = row, seq - room
        if rest := room - need:
            with_room[rest].append(row)
            rooms |= 1 << rest
    begins = row_of * seq + begin_of
    by_row = np.argsort(begins, kind="stable")
    documents = order[by_row]
    return RowPlan(documents, begins[by_row], places[documents], rows)


class WholeDataset(TokenRows):
    """A `Dataset` of whole documents.

    Laws: in each epoch every document that is not left out is in one row, once, from its first
    token to its last, or to token `seq` (from 0) if it is longer. Each of these tokens that has a
    loss, unless it is the first, is a weighted target exactly once. Padding is in segment 0.
    """

    def __init__(
        self,
        store: TokenStore,
        vocabulary: Vocabulary,
        *,
        seq: int,
        seed: int,
        cache_dir: Path,
        packing: WholeDocuments,
    ) -> None:
        super().__init__(
            store,
            vocabulary,
            seq=seq,
            isolate_documents=True,
            seed=seed,
            cache_dir=cache_dir,
            packing=f"whole documents, {packing.too_long}",
        )
        self.plan = self._plan(packing)

    def _plan(self, packing: WholeDocuments) -> RowPlan:
        """Returns which documents share a row. Raises ValueError if none has a token to learn."""
        store, seq = self.store, self.seq
        places = _places(store, seq, packing.too_long)
        if not places.any():
            raise ValueError(
                f"no document has a token to learn in its first seq + 1 = {seq + 1} tokens; use a "
                f"larger seq (the first such token is at {int(store.prompts.min()):,}, and the "
                f"longest document has {int(store.lengths.max()):,})"
            )
        return plan_rows(places, seq=seq)

    def __len__(self) -> int:
        return self.plan.rows

    def _places(self, row: np.ndarray) -> RowPlaces:
        """Returns what is at each place of these rows of the plan."""
        plan, place = self.plan, row[:, None] * self.seq + np.arange(self.seq)
        number = np.searchsorted(plan.begins, place, side="right") - 1
        offset = place - plan.begins[number]
        inside = offset < plan.lengths[number]
        # Padding repeats the last tokens of the document before it, and has segment 0.
        offset = np.minimum(offset, plan.lengths[number] - 1)
        address = self.store.starts[plan.documents[number]] + offset
        return RowPlaces(number, offset, address, inside)

    def _pack(self, rows: np.ndarray, epoch: int) -> Batch:
        row = shuffle(rows, len(self), "rows", self.seed, epoch)
        number, offset, address, inside = places = self._places(row)
        learnt = inside & self.store.learnt(self.plan.documents[number], offset + 1)
        segments = number - number[:, :1] + 1
        return {
            "tokens": self._tokens(address),
            "targets": self._tokens(address + 1),
            "segments": np.where(inside, segments, 0).astype(np.int32),
            "positions": np.where(inside, offset, 0).astype(np.int32),
            "weights": learnt.astype(np.float32),
            **self._further_fields(places),
        }

    def _further_fields(self, places: RowPlaces) -> Batch:
        """Returns the fields of rows that a subclass adds."""
        return {}


def _places(store: TokenStore, seq: int, too_long: str) -> np.ndarray:
    """[documents] int64: inputs of each document, 0 for those left out. Warns of those and of
    shortened ones."""
    long = store.lengths > seq + 1
    kept = np.minimum(store.lengths, seq + 1)
    leaves = long if too_long == "drop" else np.zeros_like(long)
    leaves = leaves | ~store.learns(kept)
    places = np.where(leaves, 0, kept - 1)
    shortened = int((long & ~leaves).sum())
    for count, what in ((shortened, "are shortened to that"), (int(leaves.sum()), "are left out")):
        if count:
            log.warning(
                "rows hold documents of up to seq + 1 = %d tokens, the longest of %s has %s: %s %s",
                seq + 1,
                f"{len(places):,}",
                f"{int(store.lengths.max()):,}",
                f"{count:,}",
                what,
            )
    return places
