"""Byte-level BPE, trained on the corpus."""

from __future__ import annotations

import hashlib
import itertools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxtrain.files.array_file import DamagedFile, open_arrays, whole, write_arrays
from jaxtrain.files.cache import mark_used
from jaxtrain.notices import notice
from jaxtrain.reprs import short_repr
from jaxtrain.tokenizers.protocol import EOS
from jaxtrain.tokenizers.published import HuggingFaceVocabulary
from jaxtrain.violations import INT32_MAX, count

log = logging.getLogger(__name__)

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
        problems = count("vocab", self.vocab, 257, LARGEST_TRAINED)  # 256 bytes and eos
        problems += count("min_frequency", self.min_frequency, 1, INT32_MAX)
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
            mark_used(path)
            return HuggingFaceVocabulary(cached.tobytes().decode("utf-8"), eos=self.eos)
        except FileNotFoundError:
            notice(f"training a BPE vocabulary of {self.vocab:,} on the corpus")
        except DamagedFile as error:
            log.warning("%s: training the tokenizer again", error)
        trained = self._train(texts())
        body = np.frombuffer(trained.encode("utf-8"), dtype=np.uint8)
        write_arrays(path, kind="tokenizer", meta={"eos": self.eos}, arrays={"json": whole(body)})
        mark_used(path, short_repr(self))
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
