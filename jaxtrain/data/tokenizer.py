"""Text to token ids and back: bytes, byte-level BPE trained on the corpus, or a tokenizer.json.

A tokenizer in an experiment file is a frozen value; `build` makes the vocabulary, which encodes.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jaxtrain.data.array_file import DamagedFile, open_arrays, whole, write_arrays
from jaxtrain.data.dataset import check_count
from jaxtrain.files.json_text import parse_json
from jaxtrain.files.regular import read_text, write_text
from jaxtrain.files.stores import store_violations

log = logging.getLogger(__name__)

EOS = "<|endoftext|>"


class Vocabulary(Protocol):
    """A tokenizer at work. Picklable, so that other processes can encode with it."""

    @property
    def size(self) -> int:
        """Every id is below it."""
        ...

    @property
    def eos(self) -> int:
        """Ends each document; `encode` never gives it."""
        ...

    @property
    def token_bytes(self) -> np.ndarray:
        """[size] int32: bytes of text each id stands for, 0 for special ones."""
        ...

    @property
    def key(self) -> str:
        """Equal keys encode equally."""
        ...

    def save(self, folder: Path) -> str:
        """Keep it in `folder`; the Python expression an experiment names it by."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]: ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class Tokenizer(Protocol):
    def build(
        self, texts: Callable[[], Iterator[str]], *, corpus: str, cache_dir: Path
    ) -> Vocabulary:
        """`texts()` is the train split, read only if needed; `corpus` is its fingerprint."""
        ...


@dataclass(frozen=True)
class ByteTokenizer:
    """The 256 byte values of UTF-8, and eos = 256. It is its own vocabulary."""

    @property
    def size(self) -> int:
        return 257

    @property
    def eos(self) -> int:
        return 256

    @property
    def key(self) -> str:
        return "bytes"

    @property
    def token_bytes(self) -> np.ndarray:
        return np.where(np.arange(self.size) == self.eos, 0, 1).astype(np.int32)

    def build(
        self, texts: Callable[[], Iterator[str]], *, corpus: str, cache_dir: Path
    ) -> ByteTokenizer:
        return self

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode("utf-8"), dtype=np.uint8) for text in texts]

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def save(self, folder: Path) -> str:
        """Nothing to write; the value an experiment names it by."""
        return "ByteTokenizer()"

    def published(self) -> HuggingFaceVocabulary:
        """The same as a tokenizer.json: byte-level BPE without a merge."""
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers

        # GPT-2's alphabet: printable bytes stand for themselves, the others for later characters.
        plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
        unprintable = (byte for byte in range(256) if byte not in plain)
        letters = {byte: chr(byte) for byte in plain}
        letters |= {byte: chr(256 + i) for i, byte in enumerate(unprintable)}
        tokenizer = Tokenizer(models.BPE({char: byte for byte, char in letters.items()}, []))
        tokenizer.add_special_tokens([EOS])
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        return HuggingFaceVocabulary(tokenizer.to_str(), eos=EOS)

    def decode(self, ids: Sequence[int]) -> str:
        """Lossless on whole UTF-8; a character cut in two becomes U+FFFD. Eos is left out."""
        return bytes(i for i in ids if i != self.eos).decode("utf-8", errors="replace")


LARGEST_TRAINED = 2**22
"""Tokens; four times the largest vocabulary published. The trainer takes memory for all at once."""


@dataclass(frozen=True)
class BpeTokenizer:
    """Byte-level BPE (Sennrich et al. 2016; GPT-2's byte alphabet), trained on the train split.

    Lossless: decode(encode(x)) == x. Trained once per corpus and kept in `cache_dir`; the same
    corpus gives the same merges. `vocab` counts the 256 bytes and eos; a small corpus may have
    fewer merges to give, and the vocabulary is then smaller.

    min_frequency: a pair that is met less often is not merged. eos: the token that ends a
    document.
    """

    vocab: int = 4096
    min_frequency: int = 2
    eos: str = EOS

    def __post_init__(self) -> None:
        problems = check_count("vocab", self.vocab, 257, LARGEST_TRAINED)  # 256 bytes and eos
        problems += check_count("min_frequency", self.min_frequency, 1)
        if not isinstance(self.eos, str) or not self.eos:
            problems.append(f"eos={self.eos!r} must be the token that ends a document")
        if problems:
            raise ValueError("BpeTokenizer: " + "; ".join(problems))

    def build(
        self, texts: Callable[[], Iterator[str]], *, corpus: str, cache_dir: Path
    ) -> HuggingFaceVocabulary:
        key = hashlib.sha256(repr((self, corpus)).encode()).hexdigest()[:24]
        path = cache_dir / f"bpe-{key}.tokenizer"
        try:
            # The cache is a sealed file, so that a flipped byte is not a different tokenizer.
            cached = open_arrays(path, kind="tokenizer", verify=True).arrays["json"]
            return HuggingFaceVocabulary(cached.tobytes().decode("utf-8"), eos=self.eos)
        except FileNotFoundError:
            log.info("training a BPE vocabulary of %d", self.vocab)
        except DamagedFile as error:
            log.warning("%s: training the tokenizer again", error)
        trained = self._train(texts())
        body = np.frombuffer(trained.encode("utf-8"), dtype=np.uint8)
        write_arrays(path, kind="tokenizer", meta={"eos": self.eos}, arrays={"json": whole(body)})
        return HuggingFaceVocabulary(trained, eos=self.eos)

    def _train(self, texts: Iterator[str]) -> str:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

        first = next(texts, None)
        if first is None:
            raise ValueError("the train split has no text to train a BpeTokenizer on")
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=self.vocab,
            min_frequency=self.min_frequency,
            special_tokens=[self.eos],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(itertools.chain((first,), texts), trainer=trainer)
        return tokenizer.to_str()


@dataclass(frozen=True)
class TokenizerFile:
    """A tokenizer.json of Hugging Face `tokenizers`; `eos` is the token that ends a document.

    path: of the file.
    """

    path: str
    eos: str = EOS

    def __post_init__(self) -> None:
        problems = store_violations("path", self.path)
        for name, value in (("path", self.path), ("eos", self.eos)):
            if not isinstance(value, str) or not value:
                problems.append(f"{name}={value!r} must be a text of one character or more")
        if problems:
            raise ValueError("TokenizerFile: " + "; ".join(problems))

    def absent(self) -> list[str]:
        """Returns a message if the file does not exist; nothing is read."""
        if Path(self.path).is_file():
            return []
        return [f"there is no tokenizer {self.path} (from {Path.cwd()})"]

    def build(
        self, texts: Callable[[], Iterator[str]], *, corpus: str, cache_dir: Path
    ) -> HuggingFaceVocabulary:
        try:
            content = read_text(Path(self.path))
            return HuggingFaceVocabulary(content, eos=self.eos)
        except (OSError, ValueError) as error:
            raise ValueError(f"{self.path} cannot be used as a tokenizer: {error}") from error


LARGEST_ID = 2**24
"""No vocabulary comes near it; one number is kept for each id."""


def open_tokenizer(content: str) -> Any:
    """A tokenizer.json as the library has it. Raises ValueError for what is none."""
    from tokenizers import Tokenizer

    parse_json(content)
    try:
        with panics_are_errors("it is no tokenizer.json"):
            return Tokenizer.from_str(content)
    except ValueError:
        raise
    except Exception as error:  # the library's errors have no class of their own
        raise ValueError(f"it is no tokenizer.json: {error}") from error


ON_A_TEXT = (
    "the tokenizer of tokenizer.json fails on a text; leave that text out, or use a tokenizer.json "
    "with a simpler pattern in its pre_tokenizer"
)


@contextmanager
def panics_are_errors(message: str = ON_A_TEXT) -> Iterator[None]:
    """Raises ValueError with `message` if the library panics, which is no Exception: for example on
    a text for which a pattern of the tokenizer.json needs too many tries."""
    try:
        yield
    except BaseException as error:
        if type(error).__module__ != "pyo3_runtime":
            raise
        raise ValueError(f"{message}: {error}") from error


class HuggingFaceVocabulary:
    """A tokenizer.json at work. Raises ValueError for what is none, and for one without `eos`."""

    def __init__(self, content: str, *, eos: str) -> None:
        self.json = content
        self.eos_token = eos
        self.key = hashlib.sha256(f"{eos}\0{content}".encode()).hexdigest()
        self._tokenizer = open_tokenizer(content)
        # Text that spells a special token is text: a document must not be able to end itself.
        self._tokenizer.encode_special_tokens = True
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        if eos not in ids:
            special = [t.content for t in self._tokenizer.get_added_tokens_decoder().values()]
            raise ValueError(
                f"eos={eos!r} is not in the vocabulary; its special tokens are "
                f"{', '.join(map(repr, special)) or 'none'}; give the one that ends a text, as eos"
            )
        self.eos = ids[eos]
        self.size = max(ids.values()) + 1
        if self.size > LARGEST_ID:
            raise ValueError(f"it has the id {self.size - 1:,}; ids below {LARGEST_ID:,} are read")
        self.token_bytes = _token_bytes(json.loads(content), ids, self.size)

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (self.json, self.eos_token)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        with panics_are_errors():
            encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(e.ids, dtype=np.uint32) for e in encoded]

    def encode(self, text: str) -> list[int]:
        return self._ids(text, add_special_tokens=False)

    def _ids(self, text: str, *, add_special_tokens: bool) -> list[int]:
        with panics_are_errors():
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def _without_and_with(self) -> tuple[list[int], list[int]]:
        """A text's ids without, and with, what its post-processor puts around it."""
        return self.encode("a"), self._ids("a", add_special_tokens=True)

    def begins_with(self) -> int | None:
        """The special token that its post-processor puts before a text, if any."""
        plain, processed = self._without_and_with()
        return processed[0] if processed[:1] != plain[:1] else None

    def bare(self) -> HuggingFaceVocabulary:
        """The same, without a post-processor that puts special tokens around a text."""
        plain, processed = self._without_and_with()
        if plain == processed:
            return self
        content = json.dumps({**json.loads(self.json), "post_processor": None}, ensure_ascii=False)
        return HuggingFaceVocabulary(content, eos=self.eos_token)

    def id_of(self, token: str | None) -> int | None:
        """A token's number, None where there is none."""
        return None if token is None else self._tokenizer.token_to_id(token)

    def save(self, folder: Path) -> str:
        """Write folder/tokenizer.json; the value an experiment names it by."""
        path = folder / "tokenizer.json"
        write_text(path, self.json)
        return f'TokenizerFile("{path}", eos={self.eos_token!r})'

    def decode(self, ids: Sequence[int]) -> str:
        """Special tokens, eos among them, are left out."""
        with panics_are_errors():
            return self._tokenizer.decode(np.asarray(ids).tolist(), skip_special_tokens=True)


def _restore(content: str, eos: str) -> HuggingFaceVocabulary:
    return HuggingFaceVocabulary(content, eos=eos)


def _token_bytes(content: dict[str, Any], ids: dict[str, int], size: int) -> np.ndarray:
    """Byte-level vocabularies write a byte as one character, all others write text; so do tokens
    that were added to either, which are looked for in the text before it is taken to bytes.

    In text, SentencePiece's U+2581 is a space and `<0x41>` a byte.
    """
    added = {entry["content"]: entry["special"] for entry in content.get("added_tokens", ())}
    byte_level = '"ByteLevel"' in json.dumps(content.get("decoder"))
    lengths = np.zeros(size, dtype=np.int32)
    for token, index in ids.items():
        if added.get(token):  # special
            continue
        if token in added:
            lengths[index] = len(token.encode("utf-8"))
        elif byte_level:
            lengths[index] = len(token)
        elif len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            lengths[index] = 1
        else:
            lengths[index] = len(token.replace("\u2581", " ").encode("utf-8"))
    return lengths
