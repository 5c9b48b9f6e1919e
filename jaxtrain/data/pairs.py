"""Pairs of answers packed into rows: both answers of a pair, each with its prompt, are in one row.

A pair is two documents, the chosen and the rejected one, which follow each other in the store and
in the row. So documents 1, 3, .. of a row are chosen, and 2, 4, .. are the rejected ones.
"""

from __future__ import annotations

import logging
from functools import cached_property
from hashlib import sha256

import numpy as np

from jaxtrain.data.dataset import Batch
from jaxtrain.data.permutation import shuffle
from jaxtrain.data.token_file import TokenStore
from jaxtrain.data.whole import RowPlaces, RowPlan, WholeDataset, WholeDocuments, plan_rows

log = logging.getLogger(__name__)

HASHED_AT_ONCE = 1 << 22
"""Tokens hashed at one time."""


class PairDataset(WholeDataset):
    """A `Dataset` of pairs of answers, with the loss of each token in a reference model.

    Laws: those of `WholeDataset`, for pairs in place of documents. `reference` is 0 until
    `set_reference`.
    """

    _reference: np.ndarray | None = None

    def _plan(self, packing: WholeDocuments) -> RowPlan:
        places = pair_places(self.store, self.seq, packing.too_long)
        if not places.any():
            raise ValueError(
                f"no pair has a token to learn in both answers within a row of seq={self.seq}; use "
                f"a larger seq (the longest answer and its prompt have "
                f"{int(self.store.lengths.max()):,} tokens)"
            )
        plan = plan_rows(places.sum(1), seq=self.seq)
        first = places[plan.documents, 0]
        begins = np.stack([plan.begins, plan.begins + first], 1)
        documents = np.stack([2 * plan.documents, 2 * plan.documents + 1], 1)
        lengths = places[plan.documents]
        return RowPlan(documents.reshape(-1), begins.reshape(-1), lengths.reshape(-1), plan.rows)

    def set_reference(self, losses: np.ndarray) -> None:
        """Sets the reference model's loss of each token of the store, by its address."""
        self._reference = losses

    @property
    def addresses(self) -> int:
        """Number of addresses of the store: its tokens."""
        return int(self.store.bases[-1])

    @cached_property
    def content(self) -> str:
        """Names the pairs and how they are cut: equal for equal tokens, whatever they are of."""
        hashed = sha256(repr((self.seq, self.addresses)).encode())
        for array in (self.plan.documents, self.plan.lengths, self.store.starts):
            hashed.update(np.ascontiguousarray(array, np.int64).tobytes())
        for first in range(0, self.addresses, HASHED_AT_ONCE):
            stop = min(first + HASHED_AT_ONCE, self.addresses)
            hashed.update(self.store.gather(np.arange(first, stop)).tobytes())
        return hashed.hexdigest()

    def targets_at(self, indices: np.ndarray) -> np.ndarray:
        """Returns the addresses of the targets in these rows of the first epoch, [rows, seq] int64,
        -1 for padding."""
        _, _, address, inside = self._places(shuffle(indices, len(self), "rows", self.seed, 0))
        return np.where(inside, address + 1, -1)

    def _further_fields(self, places: RowPlaces) -> Batch:
        reference = np.zeros(places.inside.shape, np.float32)
        if self._reference is not None:
            reference[places.inside] = self._reference[places.address[places.inside] + 1]
        return {"reference": reference}


def pair_places(store: TokenStore, seq: int, too_long: str) -> np.ndarray:
    """[pairs, 2] int64: inputs of each answer with its prompt, 0 for pairs left out. Of a pair that
    does not fit, answers longer than half a row are cut to what the other one leaves, or to half; a
    pair whose answers are then equal is left out. Warns of pairs left out and of shortened ones."""
    inputs = (store.lengths - 1).reshape(-1, 2)
    long = inputs.sum(1) > seq
    room = np.maximum(seq - inputs[:, ::-1], seq // 2)
    places = np.where(long[:, None], np.minimum(inputs, room), inputs)
    learns = store.learns(places.reshape(-1) + 1).reshape(-1, 2).all(1)
    leaves = ~learns | _equal(store, places, long) | (long if too_long == "drop" else False)
    for which, happens in ((long & ~leaves, "are shortened to that"), (leaves, "are left out")):
        if which.any():
            log.warning(
                "rows hold pairs of answers, with their prompts, of up to seq = %d tokens: of %s "
                "pairs %s %s",
                seq,
                f"{len(inputs):,}",
                f"{int(which.sum()):,}",
                happens,
            )
    return np.where(leaves[:, None], 0, places)


def _equal(store: TokenStore, places: np.ndarray, long: np.ndarray) -> np.ndarray:
    """[pairs] bool: True for those of the `long` pairs whose answers, cut to these places, are the
    same tokens."""
    equal = np.zeros(len(places), bool)
    for pair in np.flatnonzero(long & (places[:, 0] == places[:, 1])):
        tokens = store.starts[[2 * pair, 2 * pair + 1], None] + np.arange(places[pair, 0] + 1)
        equal[pair] = np.array_equal(*store.gather(tokens))
    return equal
