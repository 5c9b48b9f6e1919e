"""Whole documents in rows: each once, uncut, in few rows; against a list of documents."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest

from jaxtrain.data import DocumentStream, JsonLines, TextData, WholeDocuments
from jaxtrain.data.packing import PackedDataset
from jaxtrain.data.token_file import TokenDocument, TokenStore, open_token_file, write_token_file
from jaxtrain.data.whole import WholeDataset, plan_rows
from jaxtrain.tokenizers import ByteTokenizer

RNG = np.random.default_rng(3)


def write_corpus(folder: Path, lengths: list[int]) -> tuple[TokenStore, list[TokenDocument]]:
    """Documents in two files; every second has a mask of its own, the others a prompt."""
    documents = [
        TokenDocument(RNG.integers(0, 256, n), prompt=n // 2, learnt=mask(n) if i % 2 else None)
        for i, n in enumerate(lengths)
    ]
    half = len(documents) // 2
    paths = (folder / "a.tokens", folder / "b.tokens")
    for path, part in zip(paths, (documents[:half], documents[half:]), strict=True):
        write_token_file(path, part, vocab=257)
    return TokenStore(files=tuple(map(open_token_file, paths)), documents=None), documents


def mask(size: int) -> np.ndarray:
    learnt = RNG.random(size) < 0.5
    learnt[size // 2 :][:1], learnt[: size // 2] = True, False
    return learnt


def rows_of(
    folder: Path, lengths: list[int], *, seq: int, too_long: str = "shorten"
) -> tuple[WholeDataset, list[TokenDocument]]:
    store, documents = write_corpus(folder, lengths)
    packing = WholeDocuments(too_long)
    dataset = WholeDataset(
        store,
        ByteTokenizer(),
        seq=seq,
        seed=1,
        cache_dir=folder,
        packing=packing,
    )
    return dataset, documents


@pytest.mark.parametrize("too_long", ["shorten", "drop"])
def test_each_document_is_whole_and_once(tmp_path: Path, too_long: str) -> None:
    seq, lengths = 24, [*RNG.integers(2, 24, 60).tolist(), 25, 26, 40, 100, 1, 2]
    dataset, documents = rows_of(tmp_path, lengths, seq=seq, too_long=too_long)
    expected = []
    for document in documents:
        ids = document.ids.tolist()
        learnt = [p >= document.prompt for p in range(len(ids))]
        if document.learnt is not None:
            learnt = document.learnt.tolist()
        cut = len(ids) > seq + 1
        ids, learnt = ids[: seq + 1], learnt[: seq + 1]
        if any(learnt[1:]) and not (cut and too_long == "drop"):
            expected.append((ids[:-1], ids[1:], [float(x) for x in learnt[1:]]))
    for epoch in range(2):
        batch = dataset.rows(np.arange(len(dataset)) + epoch * len(dataset))
        read = []
        for row in range(len(dataset)):
            segments = batch["segments"][row]
            assert (np.diff(segments[segments > 0]) >= 0).all() and segments[0] == 1
            for segment in range(1, segments.max() + 1):
                inside = segments == segment
                assert batch["positions"][row][inside].tolist() == list(range(inside.sum()))
                names = ("tokens", "targets", "weights")
                read.append(tuple(batch[name][row][inside].tolist() for name in names))
            padding = segments == 0
            assert not batch["weights"][row][padding].any()
            assert not batch["positions"][row][padding].any()
        assert sorted(read) == sorted(expected)


def test_rows_are_shuffled_by_epoch_and_pure(tmp_path: Path) -> None:
    dataset, _ = rows_of(tmp_path, RNG.integers(2, 12, 80).tolist(), seq=16)
    count = len(dataset)
    both = dataset.rows(np.arange(2 * count))["tokens"]
    assert both[:count].tolist() != both[count:].tolist()
    assert sorted(both[:count].tolist()) == sorted(both[count:].tolist())
    one_by_one = [dataset.rows(np.array([i]))["tokens"][0].tolist() for i in range(2 * count)]
    assert one_by_one == both.tolist()


def best_fit(places: list[int], seq: int) -> int:
    """Rows that best fit takes, the longest first: the room left is searched one by one."""
    rooms: list[int] = []
    for need in sorted(places, reverse=True):
        fitting = [r for r in rooms if r >= need]
        if fitting:
            rooms.remove(min(fitting))
        rooms.append((min(fitting) if fitting else seq) - need)
    return len(rooms)


@pytest.mark.parametrize("seq", [1, 7, 64, 1000])
def test_rows_are_those_of_best_fit(seq: int) -> None:
    places = RNG.integers(0, seq + 1, 300)
    plan = plan_rows(places, seq=seq)
    assert plan.rows == best_fit([p for p in places.tolist() if p], seq)
    assert sorted(plan.documents.tolist()) == np.flatnonzero(places).tolist()
    ends = plan.begins + plan.lengths
    assert (ends[:-1] <= plan.begins[1:]).all()  # no two overlap
    assert (plan.begins // seq == (ends - 1) // seq).all()  # none crosses a row's end
    assert (plan.lengths == places[plan.documents]).all()


def test_a_row_is_filled_where_pieces_fit_exactly() -> None:
    assert plan_rows(np.array([1, 6, 3, 4, 5, 2, 7]), seq=7).rows == 4


def test_what_is_shortened_and_left_out_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="jaxtrain"):
        rows_of(tmp_path, [4, 5, 12, 100], seq=8)
    assert (
        "longest of 4 has 100: 1 are shortened" in caplog.text and "1 are left out" in caplog.text
    )
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="jaxtrain"):
        rows_of(tmp_path, [4, 5, 9], seq=8)
    assert not caplog.records


def test_nothing_to_learn_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="use a larger seq"):
        rows_of(tmp_path, [100, 120], seq=8)


def test_prompts_are_packed_whole_unless_said_otherwise(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "abc", "q": "Q"}\n' * 5)

    def opened(**options: object) -> object:
        prompts = options.pop("prompts", "q")
        source = JsonLines(str(tmp_path / "a.jsonl"), prompt_field=prompts, held_out=0.0)  # type: ignore
        data = TextData(source, ByteTokenizer(), seq=16, **options)  # type: ignore
        return data.open("train", seed=0, cache_dir=tmp_path)

    assert isinstance(opened(), WholeDataset)
    assert isinstance(opened(prompts=None), PackedDataset)
    assert isinstance(opened(packing=DocumentStream()), PackedDataset)
    assert isinstance(opened(prompts=None, packing=WholeDocuments("drop")), WholeDataset)
    digests = {opened(packing=p).digest for p in (None, WholeDocuments("drop"), DocumentStream())}  # type: ignore
    assert len(digests) == 3
    with pytest.raises(ValueError, match="use shorten or drop"):
        WholeDocuments("cut")
    assert isinstance(opened(isolate_documents=False), PackedDataset)
    with pytest.raises(ValueError, match=r"keeps documents apart.*use one of the two"):
        TextData(packing=WholeDocuments(), isolate_documents=False)


def test_a_document_is_left_out_if_what_is_kept_of_it_has_no_loss(tmp_path: Path) -> None:
    """Of its first 9 tokens: a loss at the last, behind it, at the first alone, in the second of
    two files."""
    seq, size = 8, 12

    def document(number: int, *learnt: int) -> TokenDocument:
        mask = np.isin(np.arange(size), learnt)
        return TokenDocument(np.full(size, number), learnt=mask)

    parts = ([document(1, 8), document(2, 9)], [document(3, 0), document(4, 3, 11)])
    paths = [tmp_path / f"{number}.tokens" for number in range(2)]
    for path, part in zip(paths, parts, strict=True):
        write_token_file(path, part, vocab=257)
    store = TokenStore(files=tuple(map(open_token_file, paths)), documents=None)
    assert store.has_prompts
    prompts = [TokenDocument(np.full(size, 5), prompt=8), TokenDocument(np.full(size, 6), prompt=9)]
    write_token_file(tmp_path / "p.tokens", prompts, vocab=257)
    other = TokenStore(files=(open_token_file(tmp_path / "p.tokens"),), documents=None)
    for opened, kept in ((store, {1, 4}), (other, {5})):
        options = {"seq": seq, "seed": 0, "cache_dir": tmp_path, "packing": WholeDocuments()}
        dataset = WholeDataset(opened, ByteTokenizer(), **options)  # type: ignore
        batch = dataset.rows(np.arange(len(dataset)))
        assert set(batch["tokens"][:, 0].tolist()) == kept
        assert (batch["weights"].sum(axis=1) == 1).all()


def test_a_mask_of_another_length_is_refused(tmp_path: Path) -> None:
    document = TokenDocument(np.zeros(3, int), learnt=np.ones(2, bool))
    with pytest.raises(ValueError, match="document 0 has 3 ids, and says of 2"):
        write_token_file(tmp_path / "x", [document], vocab=9)
