"""Documents packed into rows of fixed length, in random access.

An epoch is one stream: every document, in an order shuffled by (seed, epoch), each ended by eos.
Piece p has the tokens p*seq .. (p+1)*seq - 1 of the stream as inputs and those one further on as
targets, so no token is dropped between pieces. Rows are the pieces, shuffled again: a batch of a
long document's neighbouring pieces would have correlated gradients. The index that finds a piece is
the documents' shuffled order and where each starts in the stream; it is built once and
memory-mapped.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxtrain.data.dataset import Batch
from jaxtrain.data.permutation import permutation, shuffle
from jaxtrain.data.token_file import TokenStore
from jaxtrain.data.token_rows import TokenRows
from jaxtrain.files.array_file import DamagedFile, open_arrays, whole, write_arrays
from jaxtrain.files.cache import mark_used
from jaxtrain.files.cache_entries import keep_within_limit
from jaxtrain.tokenizers import Vocabulary

log = logging.getLogger(__name__)


class PackingIndex(NamedTuple):
    order: np.ndarray
    """[documents] int64: document at each place of the epoch."""
    starts: np.ndarray
    """[documents + 1] int64: where it starts in the stream; the last is the stream's length."""


def build_index(lengths: np.ndarray, *, seed: int, epoch: int) -> PackingIndex:
    """The index of an epoch over documents of `lengths` tokens: a function of its arguments."""
    order = permutation(len(lengths), "documents", seed, epoch)
    starts = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths[order], out=starts[1:])
    return PackingIndex(order=order, starts=starts)


def cached_index(
    path: Path, lengths: np.ndarray, *, seed: int, epoch: int, digest: str
) -> PackingIndex:
    """`build_index` kept in the file `path`; a file that is damaged or another's is rebuilt."""
    meta = {"seed": seed, "epoch": epoch, "documents": digest}
    for attempt in ("open", "open what was built"):
        try:
            file = open_arrays(path, kind="packing")
            if file.meta != meta:
                raise DamagedFile(f"{path} is the index of {file.meta}, not of {meta}")
            mark_used(path, f"epoch {epoch} by seed {seed}")
            return PackingIndex(**file.arrays)
        except FileNotFoundError:
            pass
        except DamagedFile as error:
            log.warning("%s: building the packing index again", error)
        if attempt == "open":
            index = build_index(lengths, seed=seed, epoch=epoch)
            arrays = {name: whole(array) for name, array in index._asdict().items()}
            write_arrays(path, kind="packing", meta=meta, arrays=arrays)
            keep_within_limit(path.parent)
    raise ValueError(f"{path} was written and cannot be read back; check the disk it is on")


class PackedDataset(TokenRows):
    """A `Dataset` over tokenised documents.

    Laws: in each epoch every token is an input exactly once, and every token but the first of its
    document is a weighted target exactly once (tokens that are only read excepted). When documents
    are isolated, a document cut at the end of a piece goes on in the next as one of its own, with
    positions from 0. `len` is the same in all epochs; the rest of the last piece is padding.
    """

    def __init__(
        self,
        store: TokenStore,
        vocabulary: Vocabulary,
        *,
        seq: int,
        isolate_documents: bool,
        seed: int,
        cache_dir: Path,
    ) -> None:
        super().__init__(
            store,
            vocabulary,
            seq=seq,
            isolate_documents=isolate_documents,
            seed=seed,
            cache_dir=cache_dir,
            packing="shuffled rows",
        )
        self.tokens = int(store.lengths.sum())
        self._indices: dict[int, PackingIndex] = {}

    def __len__(self) -> int:
        return -(-self.tokens // self.seq)

    def index(self, epoch: int) -> PackingIndex:
        """Returns the epoch's packing index, which is opened once."""
        index = self._indices.get(epoch)
        if index is None:
            index = cached_index(
                self._index_path(epoch),
                self.store.lengths,
                seed=self.seed,
                epoch=epoch,
                digest=self.store.digest,
            )
            # A batch spans at most the end of one epoch and the start of the next.
            recent = {e: i for e, i in self._indices.items() if e >= epoch - 1}
            self._indices = {**recent, epoch: index}
        return index

    def _index_path(self, epoch: int) -> Path:
        return self.cache_dir / f"packing-{self.store.digest[:16]}-{self.seed}-{epoch}.index"

    def in_cache(self) -> list[Path]:
        return [*super().in_cache(), *map(self._index_path, self._indices)]

    def _pack(self, rows: np.ndarray, epoch: int) -> Batch:
        order, starts = self.index(epoch)
        # [rows, seq + 1] places in the stream: the inputs, and one more for the last target.
        pieces = shuffle(rows, len(self), "rows", self.seed, epoch)
        begin = pieces[:, None] * self.seq
        place = begin + np.arange(self.seq + 1)
        real = place < self.tokens
        # Padding repeats the stream's last token, an eos, and has segment 0.
        np.minimum(place, self.tokens - 1, out=place)
        number = np.searchsorted(starts, place, side="right") - 1
        offset = place - starts[number]
        document = order[number]
        tokens = self._tokens(self.store.starts[document] + offset)
        learnt = real[:, 1:] & self.store.learnt(document[:, 1:], offset[:, 1:])
        if self.isolate_documents:
            learnt &= number[:, 1:] == number[:, :-1]
            segments = number[:, :-1] - number[:, :1] + 1
            positions = np.minimum(offset[:, :-1], place[:, :-1] - begin)
        else:
            segments = np.ones_like(number[:, :-1])
            positions = np.broadcast_to(np.arange(self.seq), segments.shape)
        inside = real[:, :-1]
        return {
            "tokens": np.ascontiguousarray(tokens[:, :-1]),
            "targets": np.ascontiguousarray(tokens[:, 1:]),
            "segments": np.where(inside, segments, 0).astype(np.int32),
            "positions": np.where(inside, positions, 0).astype(np.int32),
            "weights": learnt.astype(np.float32),
        }
