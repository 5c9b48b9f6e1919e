"""The `data` field of an experiment on text: source, tokenizer, packing."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from jaxtrain.data.dataset import Dataset
from jaxtrain.data.mixture import Mixture, MixtureDataset
from jaxtrain.data.packing import PackedDataset
from jaxtrain.data.pairs import PairDataset
from jaxtrain.data.token_file import TokenFile, TokenFiles, TokenStore
from jaxtrain.data.tokenization import (
    ENCODING,
    chat_key,
    encode_conversation,
    no_text,
    tokenize,
)
from jaxtrain.data.whole import DocumentStream, WholeDataset, WholeDocuments
from jaxtrain.files.array_file import DamagedFile
from jaxtrain.files.cache import mark_used
from jaxtrain.files.cache_entries import keep_within_limit
from jaxtrain.files.pointer import StoreFailed
from jaxtrain.files.stores import local_path
from jaxtrain.notices import Share, notice, size
from jaxtrain.sources import (
    Conversations,
    Document,
    Preferences,
    Source,
    StdlibSource,
    documents,
    fingerprint,
)
from jaxtrain.sources.document import check_split, holds_none_out
from jaxtrain.tokenizers import BpeTokenizer, ByteTokenizer, Tokenizer, TokenizerFile, Vocabulary
from jaxtrain.tokenizers.chat import ChatEncoder
from jaxtrain.violations import INT32_MAX, count, raise_violations

log = logging.getLogger(__name__)

HELD_OUT_SEED = 0
LOOK_BYTES = 1 << 26
_USE = {"train": "train on", "held_out": "evaluate on"}


@dataclass(frozen=True)
class TextData:
    """Documents of `source`, tokenised and packed into rows of `seq` tokens.

    With `isolate_documents` attention, positions and loss stay within a document; without, rows
    are cut from one stream and documents see what came before them. The corpus is tokenised once
    per (files, tokenizer) into `cache_dir`, which may be deleted at any time.

    tokenizer: what makes tokens of texts. packing: how documents fill rows, `DocumentStream()` or
    `WholeDocuments()`; None packs prompts with their texts and conversations whole, and cuts rows
    of all else from a stream.
    """

    source: Source | TokenFiles | Mixture = field(default_factory=StdlibSource)
    tokenizer: Tokenizer = field(default_factory=ByteTokenizer)
    seq: int = 512
    isolate_documents: bool = True
    packing: DocumentStream | WholeDocuments | None = None

    def __post_init__(self) -> None:
        problems = count("seq", self.seq, 1, INT32_MAX)
        own = isinstance(self.tokenizer, ByteTokenizer | BpeTokenizer)
        if own and any(isinstance(source, Conversations) for _, source in self._parts()):
            problems.append(
                f"Conversations need a chat template, and {self.tokenizer} has none: use "
                'TokenizerFile("tokenizer.json"), with a chat_template.jinja beside it'
            )
        if not isinstance(self.packing, DocumentStream | WholeDocuments | None):
            problems.append(
                f"packing={self.packing!r} is no way to fill rows; use WholeDocuments(), "
                "DocumentStream() or None"
            )
        elif isinstance(self.packing, WholeDocuments) and not self.isolate_documents:
            problems.append(
                "packing=WholeDocuments() keeps documents apart, and isolate_documents=False lets "
                "them read each other: use one of the two"
            )
        raise_violations(problems + self._pair_violations())

    def _pair_violations(self) -> list[str]:
        if not self.of_pairs:
            mixed = any(isinstance(source, Preferences) for _, source in self._parts())
            one = "Preferences have no mixture: name all files in one, Preferences((..., ...))"
            return [one] * mixed
        names = {"packing": self.packing, "isolate_documents": self.isolate_documents}
        fits = {"packing": not isinstance(self.packing, DocumentStream)}
        fits["isolate_documents"] = self.isolate_documents
        return [
            f"Preferences keep answers apart and whole, and {name}={value!r} does not; leave it out"
            for name, value in names.items()
            if not fits[name]
        ]

    def open(self, split: str, *, seed: int, cache_dir: Path) -> Dataset:
        """The split's rows. Held-out rows do not depend on `seed`, so that runs compare.

        Raises ValueError for what is wrong with the corpus: nothing found, unreadable, empty, of
        another tokenizer.
        """
        check_split(split)
        seed = HELD_OUT_SEED if split == "held_out" else seed
        cache_dir = local_path("cache_dir", cache_dir)
        vocabulary = self.vocabulary(cache_dir)
        stores = [(w, _store(s, split, vocabulary, cache_dir)) for w, s in self._parts()]
        opened = [(w, self._rows(store, vocabulary, seed, cache_dir)) for w, store in stores]
        if isinstance(self.source, Mixture):
            return MixtureDataset(opened, seed=seed)
        return opened[0][1]

    def _rows(
        self, store: TokenStore, vocabulary: Vocabulary, seed: int, cache_dir: Path
    ) -> Dataset:
        whole = store.has_prompts and self.isolate_documents
        packing = self.packing or (WholeDocuments() if whole or self.of_pairs else DocumentStream())
        common: dict[str, Any] = {"seq": self.seq, "seed": seed, "cache_dir": cache_dir}
        if isinstance(packing, WholeDocuments):
            make = PairDataset if self.of_pairs else WholeDataset
            return make(store, vocabulary, packing=packing, **common)
        isolate = self.isolate_documents
        return PackedDataset(store, vocabulary, isolate_documents=isolate, **common)

    def vocabulary(self, cache_dir: Path) -> Vocabulary:
        """Returns the tokenizer's vocabulary. A tokenizer that needs training is trained on the
        train split, unless `cache_dir` has its vocabulary."""
        sources = [s for _, s in self._parts() if not isinstance(s, TokenFiles)]
        prints = "".join(fingerprint(source, "train") for source in sources)
        corpus = sha256(prints.encode()).hexdigest()

        def texts() -> Iterator[str]:
            return (document.text for document in self.documents("train"))

        return self.tokenizer.build(
            texts, corpus=corpus, cache_dir=local_path("cache_dir", cache_dir)
        )

    def documents(self, split: str) -> Iterator[Document]:
        """The documents of every part in turn, unweighted.

        Raises ValueError for token files: they hold no text.
        """
        check_split(split)
        for _, source in self._parts():
            if isinstance(source, TokenFiles):
                raise ValueError(
                    f"{source} holds tokens, no text; to train a tokenizer or to count bytes use "
                    "the text itself, and TokenizerFile beside token files"
                )
            yield from documents(source, split)

    def absent(self, splits: Iterable[str]) -> list[str]:
        """Returns a message for each part that this machine lacks: a pattern that matches no file,
        the tokenizer's file, a chat template that works, a document. The first of each is read.
        """
        missing = self.tokenizer.absent() if isinstance(self.tokenizer, TokenizerFile) else []
        is_own = isinstance(self.tokenizer, TokenizerFile | ByteTokenizer | BpeTokenizer)
        is_here = is_own and not missing
        for split, (_, source) in itertools.product(splits, self._parts()):
            try:
                if isinstance(source, TokenFiles):
                    source.files(split)
                    continue
                first = _first(source, split)
                has_messages = first is not None and first.conversation is not None
                if is_here and (has_messages or isinstance(source, Conversations)):
                    self._try_template(first)
            except StoreFailed:
                raise
            except (ValueError, OSError) as error:
                missing.append(str(error))
        return list(dict.fromkeys(missing))

    def _try_template(self, document: Document | None) -> None:
        """Encodes a document's conversations, None for none. Raises ValueError where its template
        does not."""
        vocabulary: Any = None  # of a tokenizer that is trained on its corpus: it has no template
        if not isinstance(self.tokenizer, BpeTokenizer):
            vocabulary = self.tokenizer.build(lambda: iter(()), corpus="", cache_dir=Path())
        with ChatEncoder(vocabulary) as chat:
            for answer in () if document is None else document.answers:
                encode_conversation(chat, answer)

    @property
    def has_text(self) -> bool:
        """True if `documents` returns every part's text as it is learnt: token files have none, and
        that of conversations is what a template makes of them."""
        others = TokenFiles | Conversations | Preferences
        return not any(isinstance(s, others) for _, s in self._parts())

    @property
    def of_pairs(self) -> bool:
        """True if rows have pairs of answers, a chosen and a rejected one."""
        return isinstance(self.source, Preferences)

    def _parts(self) -> tuple[tuple[float, Any], ...]:
        return self.source.parts if isinstance(self.source, Mixture) else ((1.0, self.source),)


def _first(source: Source, split: str) -> Document | None:
    """Returns the first document, None if there is none in the first files, one at least and up to
    `LOOK_BYTES` of them. Raises ValueError if there is none in any."""
    if split == "held_out" and holds_none_out(source):
        raise ValueError(no_text(split, source))
    pieces = source.pieces(split)
    ends = itertools.accumulate(piece.stop - piece.start for piece in pieces)
    looked = [p for p, end in zip(pieces, ends, strict=True) if end <= LOOK_BYTES or p is pieces[0]]
    first = next((d for piece in looked for d in source.read(piece, split) if d.text), None)
    if first is None and len(looked) == len(pieces):
        raise ValueError(no_text(split, source))
    return first


def _store(
    source: Source | TokenFiles, split: str, vocabulary: Vocabulary, cache_dir: Path
) -> TokenStore:
    if isinstance(source, TokenFiles):
        return source.store(split, vocab=vocabulary.size, tokenizer=vocabulary.key)
    file = _cached_tokens(source, split, vocabulary, cache_dir)
    return TokenStore(files=(file,), documents=None)


def _cached_tokens(
    source: Source, split: str, vocabulary: Vocabulary, cache_dir: Path
) -> TokenFile:
    made_of: tuple[str, ...] = (fingerprint(source, split), vocabulary.key, ENCODING)
    if isinstance(source, Conversations | Preferences):
        made_of += (chat_key(vocabulary),)
    path = cache_dir / f"{sha256(repr(made_of).encode()).hexdigest()[:24]}.tokens"
    if is_new := not path.exists():
        bytes_of_text = sum(piece.stop - piece.start for piece in source.pieces(split))
        notice(f"tokenising {size(bytes_of_text)} of data to {_USE[split]}")
    share = Share("tokenising")
    try:
        file = tokenize(source, vocabulary, path, split=split, progress=share)
    except DamagedFile as error:
        log.warning("%s: tokenising the corpus again", error)
        path.unlink(missing_ok=True)
        file = tokenize(source, vocabulary, path, split=split, progress=share)
    mark_used(path, f"{split} of {source!r}, vocabulary of {vocabulary.size:,}")
    if is_new:
        keep_within_limit(cache_dir)
    return file
