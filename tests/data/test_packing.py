"""Packing: each token once an epoch, against a packer written as loops over Python lists."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from jaxtrain.data.packing import PackedDataset, build_index
from jaxtrain.data.permutation import shuffle
from jaxtrain.data.token_file import TokenDocument, TokenStore, open_token_file, write_token_file
from jaxtrain.tokenizers import ByteTokenizer

EOS = 256


def corpus(lengths: list[int]) -> list[TokenDocument]:
    """Documents whose tokens are nearly all different, with prompts on every third."""
    rng = np.random.default_rng(7)
    return [
        TokenDocument(np.append(rng.integers(0, 256, n), EOS), prompt=(n // 2 if i % 3 == 0 else 0))
        for i, n in enumerate(lengths)
    ]


def dataset(
    folder: Path,
    documents: list[TokenDocument],
    *,
    seq: int,
    isolate: bool = True,
    seed: int = 3,
    vocab: int = 257,
) -> PackedDataset:
    write_token_file(folder / "c.tokens", documents, vocab=257)
    store = TokenStore(files=(open_token_file(folder / "c.tokens"),), documents=None)
    tokenizer = ByteTokenizer()
    if vocab != 257:
        tokenizer = SimpleNamespace(size=vocab, eos=0, key="small", token_bytes=np.ones(vocab))
    return PackedDataset(
        store, tokenizer, seq=seq, isolate_documents=isolate, seed=seed, cache_dir=folder
    )


def packed_by_hand(
    documents: list[TokenDocument], order: list[int], *, seq: int, isolate: bool
) -> dict[str, list[list[float]]]:
    stream = [
        (number, j, int(token), j >= documents[document].prompt)
        for number, document in enumerate(order)
        for j, token in enumerate(documents[document].ids)
    ]
    rows: dict[str, list[list[float]]] = {}
    for begin in range(0, len(stream), seq):
        row: dict[str, list[float]] = {
            name: [] for name in ("tokens", "targets", "segments", "positions", "weights")
        }
        for p in range(begin, begin + seq):
            here = stream[p] if p < len(stream) else None
            after = stream[p + 1] if p + 1 < len(stream) else None
            first = next((q for q in range(begin, p + 1) if here and stream[q][0] == here[0]), 0)
            row["tokens"].append(here[2] if here else EOS)
            row["targets"].append(after[2] if after else EOS)
            inside = here[0] - stream[begin][0] + 1 if here else 0
            row["segments"].append(inside if isolate else int(bool(here)))
            row["positions"].append((p - (first if isolate else begin)) if here else 0)
            same = bool(here and after and (not isolate or here[0] == after[0]))
            row["weights"].append(float(same and after is not None and after[3]))
        for name, values in row.items():
            rows.setdefault(name, []).append(values)
    return rows


SHAPES = [
    ([5, 1, 9, 30, 2, 2, 17], 8),
    ([40], 8),
    ([7], 8),
    ([3, 3, 3], 100),
    ([1] * 20, 4),
    ([2, 50, 2], 1),
]


@pytest.mark.parametrize("isolate", [True, False])
@pytest.mark.parametrize("lengths, seq", SHAPES)
def test_rows_equal_the_packer_of_loops(
    lengths: list[int], seq: int, isolate: bool, tmp_path: Path
) -> None:
    documents = corpus(lengths)
    data = dataset(tmp_path, documents, seq=seq, isolate=isolate)
    for epoch in (0, 1):
        rows = data.rows(np.arange(len(data)) + epoch * len(data))
        order = data.index(epoch).order.tolist()
        expected = packed_by_hand(documents, order, seq=seq, isolate=isolate)
        assert sorted(order) == list(range(len(documents)))
        pieces = shuffle(np.arange(len(data)), len(data), "rows", 3, epoch)
        for name, array in rows.items():
            np.testing.assert_array_equal(array, np.array(expected[name])[pieces], err_msg=name)
            wanted = np.float32 if name == "weights" else np.int32
            assert array.dtype == wanted and array.shape == (len(data), seq)


@pytest.mark.parametrize("lengths, seq", SHAPES)
def test_every_token_is_read_once_and_every_continuation_learnt_once(
    lengths: list[int], seq: int, tmp_path: Path
) -> None:
    documents = corpus(lengths)
    data = dataset(tmp_path, documents, seq=seq)
    rows = data.rows(np.arange(len(data)))
    read = rows["tokens"][rows["segments"] > 0]
    assert sorted(read) == sorted(int(t) for d in documents for t in d.ids)
    learnt = rows["targets"][rows["weights"] > 0]
    assert sorted(learnt) == sorted(int(t) for d in documents for t in d.ids[max(d.prompt, 1) :])


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 16, 17, 1000, 4096])
def test_shuffled_is_a_permutation_found_at_any_place_alone(n: int) -> None:
    whole = shuffle(np.arange(n), n, "rows", 0)
    assert sorted(whole) == list(range(n))
    places = np.random.default_rng(0).integers(0, n, 20)
    np.testing.assert_array_equal(shuffle(places, n, "rows", 0), whole[places])
    if n >= 1000:
        assert (whole != shuffle(np.arange(n), n, "rows", 1)).mean() > 0.99
        # As many neighbours stay neighbours as chance would have it: 2, not n.
        assert (np.abs(np.diff(whole)) == 1).sum() < 12
        assert abs(np.corrcoef(np.arange(n), whole)[0, 1]) < 4 / n**0.5


def test_a_batch_is_not_the_neighbouring_pieces_of_one_document(tmp_path: Path) -> None:
    data = dataset(tmp_path, corpus([800] * 16), seq=8)
    index = data.index(0)
    pieces = shuffle(np.arange(160), len(data), "rows", 3, 0).reshape(10, 16)
    documents = [len(set(np.searchsorted(index.starts, batch * 8, "right"))) for batch in pieces]
    assert min(documents) >= 6


def test_rows_are_pure_in_any_order_and_after_reopening(tmp_path: Path) -> None:
    documents = corpus([5, 1, 9, 30, 2, 2, 17] * 3)
    data = dataset(tmp_path, documents, seq=8)
    numbers = np.random.default_rng(0).integers(0, 5 * len(data), 60)
    one_by_one = [data.rows(np.array([n])) for n in numbers]
    again = dataset(tmp_path, documents, seq=8).rows(numbers)
    for name, array in again.items():
        expected = np.concatenate([row[name] for row in one_by_one])
        np.testing.assert_array_equal(array, expected, err_msg=name)
    assert data.rows(np.empty(0, np.int64))["tokens"].shape == (0, 8)


def test_epochs_and_seeds_shuffle_differently(tmp_path: Path) -> None:
    orders = {
        tuple(build_index(np.ones(50, np.int64), seed=seed, epoch=epoch).order)
        for seed in range(4)
        for epoch in range(4)
    }
    assert len(orders) == 16
    # Each place sees each document equally often: chi-square over 2000 epochs of 5 documents.
    lengths = np.ones(5, np.int64)
    seen = np.array([build_index(lengths, seed=0, epoch=e).order for e in range(2000)])
    counts = np.stack([np.bincount(seen[:, place], minlength=5) for place in range(5)])
    assert ((counts - 400) ** 2 / 400).sum() < 45  # 16 degrees of freedom, p = 1e-4


def test_the_index_is_kept_and_rebuilt_when_damaged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    documents = corpus([5, 1, 9, 30])
    expected = dataset(tmp_path, documents, seq=8).rows(np.arange(3))
    (path,) = tmp_path.glob("packing-*.index")
    good = path.read_bytes()
    dataset(tmp_path, documents, seq=8).rows(np.arange(3))
    assert path.read_bytes() == good and not caplog.text
    for damaged in (good[:-3], good[:4096] + bytes([good[4096] ^ 1]) + good[4097:], b""):
        path.write_bytes(damaged)
        rows = dataset(tmp_path, documents, seq=8).rows(np.arange(3))
        np.testing.assert_array_equal(rows["tokens"], expected["tokens"])
        assert path.read_bytes() == good
        assert "building the packing index again" in caplog.text
        caplog.clear()


def test_the_digest_names_what_the_rows_depend_on(tmp_path: Path) -> None:
    documents = corpus([5, 1, 9])
    digests = [
        dataset(tmp_path, documents, seq=8).digest,
        dataset(tmp_path, documents, seq=9).digest,
        dataset(tmp_path, documents, seq=8, isolate=False).digest,
        dataset(tmp_path, documents[:2], seq=8).digest,
    ]
    assert len(set(digests)) == 4
    assert dataset(tmp_path, documents, seq=8, seed=9).digest == digests[0]


def test_an_id_outside_the_vocabulary_is_refused_when_read(tmp_path: Path) -> None:
    data = dataset(tmp_path, [TokenDocument(np.array([1, 2, 200]))], seq=4, vocab=100)
    with pytest.raises(ValueError, match=r"c\.tokens: token 2 is id 200, outside .* of 100"):
        data.rows(np.array([0]))


@pytest.mark.parametrize("numbers", [np.array([-1]), np.array([[0]])])
def test_bad_row_numbers_are_refused(numbers: np.ndarray, tmp_path: Path) -> None:
    data = dataset(tmp_path, corpus([5]), seq=8)
    with pytest.raises(ValueError, match="rows are numbered"):
        data.rows(numbers)
