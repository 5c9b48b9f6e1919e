"""Tokenizers: lossless, byte counts that add up, trained once and the same every time."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxtrain.tokenizers import (
    BpeTokenizer,
    ByteTokenizer,
    HuggingFaceVocabulary,
    TokenizerFile,
    panics_are_errors,
)

TEXTS = [
    "def f(x):\n    return x + 1\n" * 20,
    "na\u00efve caf\u00e9 \u2603 \U0001f600 \u4f60\u597d\r\n\ttabs  and   spaces ",
    "text that spells <|endoftext|> is text",
    "\x00\x01\x7f",
    "",
]


def corpus() -> Iterator[str]:
    return iter(TEXTS)


def build(tokenizer: Any, folder: Path) -> Any:
    return tokenizer.build(corpus, corpus="test", cache_dir=folder)


@pytest.fixture
def file_tokenizer(tmp_path: Path) -> TokenizerFile:
    trained = build(BpeTokenizer(vocab=280), tmp_path)
    (tmp_path / "tokenizer.json").write_text(trained.json, encoding="utf-8")
    return TokenizerFile(str(tmp_path / "tokenizer.json"))


@pytest.fixture(params=["bytes", "bpe", "file"])
def vocabulary(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    if request.param == "file":
        return build(request.getfixturevalue("file_tokenizer"), tmp_path)
    return build(ByteTokenizer() if request.param == "bytes" else BpeTokenizer(vocab=300), tmp_path)


@pytest.mark.parametrize("text", TEXTS)
def test_decoding_gives_the_text_back_and_bytes_add_up(vocabulary: Any, text: str) -> None:
    ids = vocabulary.encode(text)
    assert vocabulary.decode(ids) == text
    assert vocabulary.token_bytes[ids].sum() == len(text.encode())
    assert vocabulary.eos not in ids and all(0 <= i < vocabulary.size for i in ids)
    assert vocabulary.encode_batch([text, "a"])[0].tolist() == ids


def test_eos_stands_for_no_text(vocabulary: Any) -> None:
    assert vocabulary.token_bytes.shape == (vocabulary.size,)
    assert vocabulary.token_bytes[vocabulary.eos] == 0
    assert vocabulary.decode([*vocabulary.encode("ab"), vocabulary.eos]) == "ab"


def test_a_pickled_vocabulary_encodes_equally(vocabulary: Any) -> None:
    again = pickle.loads(pickle.dumps(vocabulary))
    assert again.key == vocabulary.key
    for text in TEXTS:
        assert again.encode(text) == vocabulary.encode(text)


def test_bpe_is_trained_once_and_deterministically(tmp_path: Path) -> None:
    tokenizer = BpeTokenizer(vocab=270)
    keys = {build(tokenizer, tmp_path / name).key for name in ("a", "b", "c")}
    assert len(keys) == 1

    def never() -> Iterator[str]:
        raise AssertionError("the cache was not used")

    cached = tokenizer.build(never, corpus="test", cache_dir=tmp_path / "a")
    assert {cached.key} == keys
    assert cached.size == 270
    assert len(cached.encode(TEXTS[0])) < 0.6 * len(TEXTS[0])
    other = tokenizer.build(lambda: iter(["zzzz" * 9]), corpus="other", cache_dir=tmp_path / "a")
    assert other.key not in keys


def test_a_damaged_bpe_cache_is_trained_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = BpeTokenizer(vocab=300)
    key = build(tokenizer, tmp_path).key
    (path,) = tmp_path.glob("bpe-*.tokenizer")
    damaged = bytearray(path.read_bytes())
    damaged[5000] ^= 1
    path.write_bytes(damaged)
    assert build(tokenizer, tmp_path).key == key
    assert "is damaged" in caplog.text


def test_bytes_of_a_sentencepiece_style_vocabulary() -> None:
    from tokenizers import Tokenizer, decoders, models

    ids = {"<0x41>": 0, "\u2581the": 1, "\u00e9": 2, "</s>": 3}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[]))
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["</s>"])
    found = HuggingFaceVocabulary(tokenizer.to_str(), eos="</s>")
    assert found.token_bytes.tolist() == [1, 4, 2, 0]


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_bytes_of_tokens_that_were_added_add_up(kind: str, tmp_path: Path) -> None:
    """They are text in a byte-level vocabulary too: a letter of several bytes is one character."""
    from tokenizers import Tokenizer

    plain = ByteTokenizer().published() if kind == "bytes" else build(BpeTokenizer(300), tmp_path)
    tokenizer, words = Tokenizer.from_str(plain.json), ["caf\u00e9", "\u4f60\u597d", "<tool>"]
    tokenizer.add_tokens(words)
    found = HuggingFaceVocabulary(tokenizer.to_str(), eos=plain.eos_token)
    for text in ("a caf\u00e9 na\u00efve \u4f60\u597d\u4f60 <tool>x", *words):
        ids = found.encode(text)
        assert any(found.id_of(word) in ids for word in words)
        assert found.token_bytes[ids].sum() == len(text.encode())


def test_a_bare_vocabulary_puts_nothing_around_a_text_and_is_the_same_else(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, processors

    plain = build(BpeTokenizer(vocab=280), tmp_path)
    assert plain.bare() is plain and plain.begins_with() is None
    number = plain.id_of("<|endoftext|>")
    assert (number, plain.id_of("none such"), plain.id_of(None)) == (plain.eos, None, None)
    adding = Tokenizer.from_str(plain.json)
    adding.post_processor = processors.TemplateProcessing(
        "<|endoftext|> $A", special_tokens=[("<|endoftext|>", number)]
    )
    adds = HuggingFaceVocabulary(adding.to_str(), eos="<|endoftext|>")
    assert adds.begins_with() == number
    bare = adds.bare()
    assert bare.begins_with() is None and bare.eos == adds.eos
    assert Tokenizer.from_str(bare.json).encode("a").ids == adds.encode("a")
    for text in TEXTS:
        assert bare.encode(text) == adds.encode(text)
        assert bare.decode(bare.encode(text)) == text


def test_bad_fields_are_refused(file_tokenizer: TokenizerFile, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"vocab=100 must be .* at least 257 .*min_frequency=0"):
        BpeTokenizer(vocab=100, min_frequency=0)
    with pytest.raises(ValueError, match=r"eos='</s>' is not in the vocabulary.*'<\|endoftext\|>'"):
        build(TokenizerFile(file_tokenizer.path, eos="</s>"), tmp_path)
    with pytest.raises(ValueError, match=r"cannot be used as a tokenizer"):
        build(TokenizerFile(str(tmp_path / "none.json")), tmp_path)
    with pytest.raises(ValueError, match="no text to train"):
        BpeTokenizer().build(lambda: iter(()), corpus="", cache_dir=tmp_path)


def test_a_text_on_which_the_library_panics_is_an_error(tmp_path: Path) -> None:
    """Of the kind that commands tell in a line; a panic of the library is no Exception."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"a": 0, "<eos>": 1}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("(a|aa)+$"), "isolated")
    vocabulary = HuggingFaceVocabulary(tokenizer.to_str(), eos="<eos>")
    text = "a" * 60 + "b"
    for encode in lambda: vocabulary.encode(text), lambda: vocabulary.encode_batch(["a", text]):
        with pytest.raises(ValueError, match=r"fails on a text; leave that.*: .*retry-limit"):
            encode()
    with pytest.raises(KeyboardInterrupt), panics_are_errors():
        raise KeyboardInterrupt
