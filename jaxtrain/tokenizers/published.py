"""A tokenizer.json of Hugging Face `tokenizers` at work."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.files.json_text import parse_json
from jaxtrain.files.regular import write_text
from jaxtrain.tokenizers.chat import ChatTemplate
from jaxtrain.tokenizers.settings import (
    SETTINGS,
    TOKENIZER,
)

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
    """A tokenizer.json at work. Raises ValueError for what is none, and for one without `eos`.

    chat: the template by which it encodes conversations, None for none. bos: the id that begins
    each document, None for none. add_eos: eos ends each document.
    """

    def __init__(
        self,
        content: str,
        *,
        eos: str,
        chat: ChatTemplate | None = None,
        bos: int | None = None,
        add_eos: bool = True,
    ) -> None:
        self.json = content
        self.eos_token = eos
        self.chat, self.bos, self.add_eos = chat, bos, add_eos
        around = "" if bos is None and add_eos else f"\0{bos}\0{add_eos}"
        self.key = hashlib.sha256(f"{eos}\0{content}{around}".encode()).hexdigest()
        self._tokenizer = open_tokenizer(content)
        self._markup: dict[str | None, Any] = {}
        # Text that spells a special token is text: a document must not be able to end itself.
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        added = self._tokenizer.get_added_tokens_decoder()
        self.special = [token.content for token in added.values() if token.special]
        self.special_ids = np.array([i for i, t in added.items() if t.special], dtype=np.uint32)
        if eos not in ids:
            special = [token.content for token in added.values()]
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
        options = {"chat": self.chat, "bos": self.bos, "add_eos": self.add_eos}
        return _restore, (self.json, self.eos_token, options)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        with panics_are_errors():
            encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(e.ids, dtype=np.uint32) for e in encoded]

    def encode_pairs(
        self, prompts: Sequence[str], texts: Sequence[str]
    ) -> list[tuple[np.ndarray, int]]:
        whole = [prompt + text for prompt, text in zip(prompts, texts, strict=True)]
        with panics_are_errors():
            encoded = self._tokenizer.encode_batch(whole, add_special_tokens=False)
        ends = ([stop for _, stop in e.offsets] for e in encoded)
        counts = (
            next((n for n, stop in enumerate(stops) if stop > len(prompt)), len(stops))
            for prompt, stops in zip(prompts, ends, strict=True)
        )
        ids = (np.array(e.ids, dtype=np.uint32) for e in encoded)
        return list(zip(ids, counts, strict=True))

    def encode_markup(self, text: str, mark: str | None) -> tuple[np.ndarray, np.ndarray]:
        """Returns ([tokens] uint32, [tokens, 2] their characters from .. to) of a text in which
        special tokens are those, unless they have `mark` in them: then they are text without it."""
        with panics_are_errors():
            encoded = self._markup_tokenizer(mark).encode(text, add_special_tokens=False)
        offsets = np.array(encoded.offsets, dtype=np.int64).reshape(-1, 2)
        return np.array(encoded.ids, dtype=np.uint32), offsets

    def _markup_tokenizer(self, mark: str | None) -> Any:
        if mark in self._markup:
            return self._markup[mark]
        content = json.loads(self.json)
        # Special tokens are looked for before the normalizer runs: it takes the mark away when they
        # have been found, and makes none of what only looks like one.
        for token in content.get("added_tokens", ()):
            token["normalized"] = token.get("normalized", True) and not token.get("special")
        if mark is not None:
            own = [content["normalizer"]] if content.get("normalizer") else []
            unmark = {"type": "Replace", "pattern": {"String": mark}, "content": ""}
            content["normalizer"] = {"type": "Sequence", "normalizers": [unmark, *own]}
        built = self._markup[mark] = open_tokenizer(json.dumps(content, ensure_ascii=False))
        built.no_truncation()
        built.no_padding()
        return built

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
        """The same, without special tokens that it, or its post-processor, puts around a text."""
        plain, processed = self._without_and_with()
        if plain == processed and self.bos is None and self.add_eos:
            return self
        content = json.loads(self.json)
        if plain != processed:
            content["post_processor"] = None
        text = json.dumps(content, ensure_ascii=False)
        return HuggingFaceVocabulary(text, eos=self.eos_token, chat=self.chat)

    def beginning_with(self, bos: int | None) -> str:
        """Returns this tokenizer.json, changed to put `bos` before a text; unchanged if `bos` is
        None. For a vocabulary that puts nothing there itself, such as `bare()`."""
        if bos is None:
            return self.json
        from tokenizers import Tokenizer, processors

        built, token = Tokenizer.from_str(self.json), self.token(bos)
        begins = processors.TemplateProcessing(
            single=f"{token}:0 $A:0",
            pair=f"{token}:0 $A:0 {token}:1 $B:1",
            special_tokens=[(token, bos)],
        )
        own = built.post_processor
        built.post_processor = begins if own is None else processors.Sequence([own, begins])
        return built.to_str()

    def token(self, number: int) -> str:
        """A token as the vocabulary has it, by its number."""
        return self._tokenizer.id_to_token(number)

    def id_of(self, token: str | None) -> int | None:
        """A token's number, None where there is none."""
        return None if token is None else self._tokenizer.token_to_id(token)

    def save(self, folder: Path) -> str:
        """Write folder/tokenizer.json, with its chat template and what begins a text beside it; the
        value an experiment names it by."""
        path = folder / TOKENIZER
        settings: dict[str, Any] = {"eos_token": self.eos_token}
        if self.chat is not None:
            settings = {**dict(self.chat.tokens), **settings, "chat_template": self.chat.stored}
        options = f"eos={self.eos_token!r}"
        if self.bos is not None:
            settings["bos_token"] = self.token(self.bos)
            options += ", add_bos=True"
        elif self.begins_with() is not None:
            options += ", add_bos=False"
        if not self.add_eos:
            options += ", add_eos=False"
        write_text(path, self.json)
        write_text(folder / SETTINGS, json.dumps(settings, indent=2, ensure_ascii=False) + "\n")
        return f'TokenizerFile("{path}", {options})'

    def decode(self, ids: Sequence[int]) -> str:
        """Special tokens, eos among them, are left out."""
        with panics_are_errors():
            return self._tokenizer.decode(np.asarray(ids).tolist(), skip_special_tokens=True)


def _restore(content: str, eos: str, options: dict[str, Any]) -> HuggingFaceVocabulary:
    return HuggingFaceVocabulary(content, eos=eos, **options)


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
