"""The `data` field of an experiment on text: source, tokenizer, packing."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from jaxtrain.data.array_file import DamagedFile
from jaxtrain.data.dataset import Dataset, check_count, check_split
from jaxtrain.data.mixture import Mixture, MixtureDataset
from jaxtrain.data.packing import PackedDataset
from jaxtrain.data.source import Document, Source, StdlibSource, documents, fingerprint
from jaxtrain.data.token_file import TokenFile, TokenFiles, TokenStore
from jaxtrain.data.tokenization import tokenize
from jaxtrain.data.tokenizer import ByteTokenizer, Tokenizer, TokenizerFile, Vocabulary
from jaxtrain.files.stores import local_path

log = logging.getLogger(__name__)

HELD_OUT_SEED = 0


@dataclass(frozen=True)
class TextData:
    """Documents of `source`, tokenised and packed into rows of `seq` tokens.

    With `isolate_documents` attention, positions and loss stay within a document; without, rows
    are cut from one stream and documents see what came before them. The corpus is tokenised once
    per (files, tokenizer) into `cache_dir`, which may be deleted at any time.

    tokenizer: what makes tokens of texts.
    """

    source: Source | TokenFiles | Mixture = field(default_factory=StdlibSource)
    tokenizer: Tokenizer = field(default_factory=ByteTokenizer)
    seq: int = 512
    isolate_documents: bool = True

    def __post_init__(self) -> None:
        if problems := check_count("seq", self.seq, 1):
            raise ValueError(problems[0])

    def open(self, split: str, *, seed: int, cache_dir: Path) -> Dataset:
        """The split's rows. Held-out rows do not depend on `seed`, so that runs compare.

        Raises ValueError for what is wrong with the corpus: nothing found, unreadable, empty, of
        another tokenizer.
        """
        check_split(split)
        seed = HELD_OUT_SEED if split == "held_out" else seed
        cache_dir = local_path("cache_dir", cache_dir)
        vocabulary = self.vocabulary(cache_dir)
        opened = [
            (
                weight,
                PackedDataset(
                    _store(source, split, vocabulary, cache_dir),
                    vocabulary,
                    seq=self.seq,
                    isolate_documents=self.isolate_documents,
                    seed=seed,
                    cache_dir=cache_dir,
                ),
            )
            for weight, source in self._parts()
        ]
        if isinstance(self.source, Mixture):
            return MixtureDataset(opened, seed=seed)
        return opened[0][1]

    def vocabulary(self, cache_dir: Path) -> Vocabulary:
        """The tokenizer at work; trained on the train split first, where it is a trained one."""
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
        the tokenizer's file. Files are listed, not read."""
        missing = self.tokenizer.absent() if isinstance(self.tokenizer, TokenizerFile) else []
        for split, (_, source) in itertools.product(splits, self._parts()):
            list_files = source.files if isinstance(source, TokenFiles) else source.pieces
            try:
                list_files(split)
            except (ValueError, OSError) as error:
                missing.append(str(error))
        return list(dict.fromkeys(missing))

    @property
    def has_text(self) -> bool:
        """True if `documents` can return every part's text: token files have none."""
        return not any(isinstance(source, TokenFiles) for _, source in self._parts())

    def _parts(self) -> tuple[tuple[float, Any], ...]:
        return self.source.parts if isinstance(self.source, Mixture) else ((1.0, self.source),)


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
    made_of = (fingerprint(source, split), vocabulary.key)
    path = cache_dir / f"{sha256(repr(made_of).encode()).hexdigest()[:24]}.tokens"
    try:
        return tokenize(source, vocabulary, path, split=split)
    except DamagedFile as error:
        log.warning("%s: tokenising the corpus again", error)
        path.unlink(missing_ok=True)
        return tokenize(source, vocabulary, path, split=split)
