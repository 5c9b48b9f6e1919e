"""Pairs of answers in rows: both whole, side by side, once an epoch; against a list of pairs."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chats import turns, write_folder

from jaxtrain.data import (
    BpeTokenizer,
    ByteTokenizer,
    Conversations,
    DocumentStream,
    Mixture,
    Preferences,
    TextData,
    TokenizerFile,
    WholeDocuments,
)
from jaxtrain.data.pairs import PairDataset, pair_places
from jaxtrain.data.token_file import TokenDocument, TokenStore, open_token_file, write_token_file

RNG = np.random.default_rng(5)


def opened(folder: Path, sizes: list[tuple[int, int]], *, seq: int, **packing: str) -> PairDataset:
    """Pairs of documents of these numbers of tokens, the first third of each a prompt."""
    documents = [
        TokenDocument(RNG.integers(0, 256, n), prompt=n // 3) for pair in sizes for n in pair
    ]
    write_token_file(folder / "a.tokens", documents, vocab=257)
    store = TokenStore(files=(open_token_file(folder / "a.tokens"),), documents=None)
    options: Any = dict(seq=seq, seed=1, cache_dir=folder, packing=WholeDocuments(**packing))
    return PairDataset(store, ByteTokenizer(), **options)


def pairs_in(dataset: PairDataset, epoch: int = 0) -> list[Any]:
    """Each pair as (ids, weighted targets) of its two answers, read off the rows."""
    rows = dataset.rows(np.arange(len(dataset)) + epoch * len(dataset))
    found = []
    for row in range(len(dataset)):
        one = {name: values[row] for name, values in rows.items()}
        assert not one["weights"][one["segments"] == 0].any()
        for first in range(1, one["segments"].max(), 2):
            answers = []
            for number in (first, first + 1):
                (at,) = np.nonzero(one["segments"] == number)
                assert at.size and np.array_equal(at, np.arange(at[0], at[-1] + 1))
                np.testing.assert_array_equal(one["positions"][at], np.arange(at.size))
                ids = [*one["tokens"][at], one["targets"][at[-1]]]
                np.testing.assert_array_equal(one["tokens"][at[1:]], one["targets"][at[:-1]])
                answers.append((ids, [*one["targets"][at][one["weights"][at] > 0]]))
            found.append(tuple(answers))
        assert one["segments"].max() % 2 == 0
    return sorted(found)


def expected(dataset: PairDataset, cuts: list[tuple[int, int]]) -> list[Any]:
    """The pairs of the store whose answers are cut to so many tokens, in order; (0, 0): left
    out."""
    tokens = dataset.store.gather(np.arange(dataset.addresses))
    pairs = []
    for pair, cut in enumerate(cuts):
        answers = []
        for number, size in zip((2 * pair, 2 * pair + 1), cut, strict=True):
            start = int(dataset.store.starts[number])
            ids = tokens[start : start + size].tolist()
            answers.append((ids, ids[max(1, int(dataset.store.prompts[number])) :]))
        if all(cut):
            pairs.append(tuple(answers))
    return sorted(pairs)


def test_each_pair_is_whole_and_once_in_every_epoch(tmp_path: Path) -> None:
    sizes = [tuple(map(int, pair)) for pair in RNG.integers(2, 12, (50, 2))]
    dataset = opened(tmp_path, sizes, seq=24)
    first, second = (pairs_in(dataset, epoch) for epoch in (0, 1))
    assert first == second == expected(dataset, sizes)
    rows = [dataset.rows(np.arange(len(dataset)) + n * len(dataset))["tokens"] for n in (0, 1)]
    assert not np.array_equal(*rows), "an order of its own"
    needed = sum(a + b - 2 for a, b in sizes)
    assert needed <= 24 * len(dataset) <= 1.2 * needed


def test_long_pairs_are_cut_where_the_other_answer_leaves_no_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sizes = [(10, 10), (30, 5), (5, 30), (30, 30), (12, 11), (70, 4), (12, 12)]
    # Half of the row's 21 places is 10, of 11 tokens.
    cuts = [(10, 10), (18, 5), (5, 18), (11, 11), (12, 11), (0, 0), (11, 11)]
    with caplog.at_level(logging.WARNING):
        dataset = opened(tmp_path, sizes, seq=21)
    assert pairs_in(dataset) == expected(dataset, cuts)
    assert "of 7 pairs 4 are shortened" in caplog.text and "of 7 pairs 1 are left" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        dropped = opened(tmp_path, sizes, seq=21, too_long="drop")
    kept = [cut if sum(cut) <= 23 else (0, 0) for cut in sizes]
    assert pairs_in(dropped) == expected(dropped, kept)
    assert "of 7 pairs 5 are left out" in caplog.text and "shortened" not in caplog.text
    assert dropped.digest != dataset.digest


def test_pairs_whose_answers_are_cut_to_the_same_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ids = RNG.integers(0, 256, (4, 30))
    ids[1, :20], ids[3, :19] = ids[0, :20], ids[2, :19]
    documents = [TokenDocument(row, prompt=3) for row in ids]
    write_token_file(tmp_path / "b.tokens", documents, vocab=257)
    store = TokenStore(files=(open_token_file(tmp_path / "b.tokens"),), documents=None)
    with caplog.at_level(logging.WARNING):
        places = pair_places(store, 38, "shorten")
    assert places.tolist() == [[0, 0], [19, 19]], "20 tokens of each: the same in the first pair"
    assert "of 2 pairs 1 are shortened" in caplog.text and "of 2 pairs 1 are left" in caplog.text


def test_the_content_is_of_tokens_alone(tmp_path: Path) -> None:
    sizes = [(5, 7), (9, 4)]
    rng = RNG.bit_generator.state
    dataset = opened(tmp_path, sizes, seq=16)
    RNG.bit_generator.state = rng
    (tmp_path / "again").mkdir()
    again = opened(tmp_path / "again", sizes, seq=16)
    other = opened(tmp_path, sizes, seq=16)
    longer = PairDataset(
        dataset.store,
        ByteTokenizer(),
        seq=17,
        seed=1,
        cache_dir=tmp_path,
        packing=WholeDocuments(),
    )
    assert dataset.content == again.content
    assert len({dataset.content, other.content, longer.content}) == 3


def test_answers_without_a_token_to_learn_leave_the_pair_out(tmp_path: Path) -> None:
    assert (
        pair_places(opened(tmp_path, [(3, 3), (1, 3), (3, 3)], seq=8).store, 8, "drop")[1].sum()
        == 0
    )
    with pytest.raises(ValueError, match="no pair has a token to learn in both answers"):
        opened(tmp_path, [(60, 60)], seq=8)


def test_reference_losses_stand_at_their_targets(tmp_path: Path) -> None:
    dataset = opened(tmp_path, [(5, 7), (9, 4), (6, 6), (30, 5)], seq=16)
    assert not dataset.rows(np.arange(len(dataset)))["reference"].any()
    dataset.set_reference(np.arange(dataset.addresses, dtype=np.float32) + 1)
    tokens = dataset.store.gather(np.arange(dataset.addresses))
    for epoch in (0, 3):
        rows = dataset.rows(np.arange(len(dataset)) + epoch * len(dataset))
        inside = rows["segments"] > 0
        at = rows["reference"][inside].astype(int) - 1
        np.testing.assert_array_equal(tokens[at], rows["targets"][inside])
        assert len({*at}) == inside.sum() and not rows["reference"][~inside].any()
    at = dataset.targets_at(np.arange(len(dataset)))
    rows = dataset.rows(np.arange(len(dataset)))
    np.testing.assert_array_equal(at >= 0, rows["segments"] > 0)
    np.testing.assert_array_equal(tokens[at[at >= 0]], rows["targets"][at >= 0])


def write_pairs(folder: Path, count: int = 20) -> str:
    lines = (
        {"prompt": f"{i}: ", "chosen": "yes" * (1 + i % 3), "rejected": "no"} for i in range(count)
    )
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return str(folder / "pairs.jsonl")


def test_texts_are_tokenised_as_prompts_and_answers(tmp_path: Path) -> None:
    source = Preferences(write_pairs(tmp_path), held_out=0.0)
    dataset: Any = TextData(source, seq=40).open("train", seed=0, cache_dir=tmp_path)
    text = ByteTokenizer().decode
    found = {
        tuple((text(ids[:-1]), text(learnt[:-1])) for ids, learnt in pair)
        for pair in pairs_in(dataset)
    }
    assert found == {
        ((f"{i}: {'yes' * (1 + i % 3)}", "yes" * (1 + i % 3)), (f"{i}: no", "no"))
        for i in range(20)
    }


@pytest.mark.parametrize("on_bad", ["refuse", "skip"])
def test_messages_are_tokenised_by_the_template_both_or_none(tmp_path: Path, on_bad: str) -> None:
    """A pair of which the template refuses one answer leaves no answer behind."""
    pairs = [
        {
            "prompt": turns("q")[:1],
            "chosen": turns("q", "yes")[1:],
            "rejected": turns("q", "no")[1:],
        },
        {
            "prompt": "q",
            "chosen": turns("q", "yes"),
            "rejected": [
                *turns("q", "no"),
                {"role": "tool", "content": "?"},
                *turns("q", "no")[1:],
            ],
        },
        {"prompt": "q", "chosen": turns("q", "2")[1:], "rejected": turns("q", "3")[1:]},
    ]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    tokenizer = TokenizerFile(str(write_folder(tmp_path / "tokenizer", "mistral")), eos="</s>")
    source = Preferences(str(tmp_path / "pairs.jsonl"), held_out=0.0, on_bad=on_bad)
    data = TextData(source, tokenizer, seq=64)
    if on_bad == "refuse":
        with pytest.raises(ValueError, match=r"pairs\.jsonl:2: .*roles are user and assistant"):
            data.open("train", seed=0, cache_dir=tmp_path)
        return
    dataset: Any = data.open("train", seed=0, cache_dir=tmp_path)
    single = TextData(
        Conversations(chats(tmp_path, pairs), held_out=0.0, learn="last"), tokenizer, seq=64
    )
    alone: Any = single.open("train", seed=0, cache_dir=tmp_path)
    ids = [dataset.store.gather(np.arange(s, s + n)).tolist() for s, n in spans(dataset)]
    assert ids == [alone.store.gather(np.arange(s, s + n)).tolist() for s, n in spans(alone)]
    assert len(ids) == 4


def chats(folder: Path, pairs: list[Any]) -> str:
    """The answers of the first and the last pair, as conversations."""
    user = turns("q")[:1]
    answers = [[*user, *pair[name]] for pair in pairs[::2] for name in ("chosen", "rejected")]
    lines = (json.dumps({"messages": messages}) for messages in answers)
    (folder / "chats.jsonl").write_text("\n".join(lines))
    return str(folder / "chats.jsonl")


def spans(dataset: Any) -> list[tuple[int, int]]:
    return list(zip(dataset.store.starts.tolist(), dataset.store.lengths.tolist(), strict=True))


def test_what_tears_pairs_apart_is_refused(tmp_path: Path) -> None:
    source = Preferences(write_pairs(tmp_path))
    with pytest.raises(
        ValueError, match=r"keep answers apart and whole, and packing=Document.*not"
    ):
        TextData(source, packing=DocumentStream(), isolate_documents=False)
    with pytest.raises(ValueError, match="isolate_documents=False does not; leave it out"):
        TextData(source, isolate_documents=False)
    with pytest.raises(ValueError, match="Preferences have no mixture: name all files in one"):
        TextData(Mixture(((1.0, source), (1.0, source))))
    assert TextData(source).of_pairs and not TextData(source).has_text
    assert not TextData(Conversations("a.jsonl"), TokenizerFile("t.json")).of_pairs


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), BpeTokenizer(300)], ids=str)
def test_messages_need_a_chat_template(tmp_path: Path, tokenizer: Any) -> None:
    pair = {"prompt": "q", "chosen": turns("q", "yes"), "rejected": turns("q", "no")}
    (tmp_path / "pairs.jsonl").write_text(json.dumps(pair))
    data = TextData(Preferences(str(tmp_path / "pairs.jsonl"), held_out=0.0), tokenizer)
    (missing,) = data.absent(("train",))
    assert "the tokenizer has no chat template" in missing
    texts = TextData(Preferences(write_pairs(tmp_path), held_out=0.0), tokenizer)
    assert texts.absent(("train",)) == []
