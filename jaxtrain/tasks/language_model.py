"""A scorer of texts as the harness's model. Imports the harness."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from lm_eval.api.model import TemplateLM  # type: ignore[import-not-found]
from lm_eval.utils import (  # type: ignore[import-not-found]
    get_rolling_token_windows,
    make_disjoint_window,
)

from jaxtrain.notices import Share, notice
from jaxtrain.tokenizers import Vocabulary

log = logging.getLogger(__name__)

AT_ONCE = 1024
"""Texts that are packed and scored together."""

ScoreRows = Callable[[Sequence[Sequence[int]]], Sequence[tuple[np.ndarray, np.ndarray]]]
"""Of each text's ids after the first: log-probabilities, and True where an id is the likeliest."""


class HarnessModel(TemplateLM):
    """The harness's view of a model: it encodes and scores, and writes no text. Contexts and
    continuations are encoded together, as the harness's own models do; a document begins as the
    run's do, and where there is no context the first id follows bos, or eos where there is none.

    seq: a text has at most seq + 1 ids; of a longer one the last, with its whole continuation.
    """

    def __init__(self, vocabulary: Vocabulary, seq: int, scorer: ScoreRows) -> None:
        super().__init__()
        self.vocabulary, self.seq, self._scorer = vocabulary, seq, scorer

    @property
    def eot_token_id(self) -> int:
        return int(self.vocabulary.eos)

    @property
    def prefix_token_id(self) -> int:
        bos = self.vocabulary.bos
        return self.eot_token_id if bos is None else int(bos)

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Returns the ids of a text; as a document begins, unless `add_special_tokens` is False."""
        bos = self.vocabulary.bos if add_special_tokens is not False else None
        ids = list(map(int, self.vocabulary.encode(string)))
        return ids if bos is None else [int(bos), *ids]

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        """Returns the summed log-probability of each continuation after its context, and True where
        each of its ids is the likeliest. Raises ValueError for one without ids, or longer than a
        row."""
        texts, cut = [], 0
        for words, context, continuation in requests:
            if not 0 < len(continuation) <= self.seq:
                raise ValueError(
                    f"the continuation {_shortened(words)} has {len(continuation)} ids, and a row "
                    f"of this model scores 1 to {self.seq}: leave the task out"
                )
            text = (*(context or [self.prefix_token_id]), *continuation)
            cut += len(text) > self.seq + 1
            texts.append(text[-(self.seq + 1) :])
        if cut:
            log.warning(
                "of %s texts %s are longer than a row of seq = %d: the beginning of their contexts "
                "is left out", f"{len(texts):,}", f"{cut:,}", self.seq,
            )  # fmt: skip
        results = []
        for request, score in zip(requests, self._scores(texts), strict=True):
            log_probs, likeliest = (part[-len(request[2]) :] for part in score)
            results.append((float(np.sum(log_probs, dtype=np.float64)), bool(likeliest.all())))
        return results

    def _scores(self, texts: Sequence[Sequence[int]]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Scores texts; equal ones once."""
        distinct = list(dict.fromkeys(texts))
        notice(f"scoring {len(distinct):,} texts")
        tell, scored = Share("scoring"), {}
        for first in range(0, len(distinct), AT_ONCE):
            chunk = distinct[first : first + AT_ONCE]
            scored.update(zip(chunk, self._scorer(chunk), strict=True))
            tell(len(scored), len(distinct))
        return [scored[text] for text in texts]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Returns the log-probability of whole texts, in windows of `seq` ids."""
        windows, number = [], []
        for place, request in enumerate(requests):
            text = request.args[0]
            ids = self.tok_encode(text, add_special_tokens=False)
            for window in get_rolling_token_windows(ids, self.prefix_token_id, self.seq, 1):
                windows.append((("", text), *make_disjoint_window(window)))
                number.append(place)
        totals = np.zeros(len(requests))
        scores = self._loglikelihood_tokens(windows)
        np.add.at(totals, number, [total for total, _ in scores])
        return totals.tolist()

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        raise ValueError("this model writes no text: use tasks that compare log-probabilities")


def _shortened(words: tuple[str, str]) -> str:
    context, continuation = words
    return f"{continuation[:40]!r} of {context[-40:]!r}"
