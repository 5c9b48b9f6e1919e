"""Compares tokenizers by the ids that they give."""

from __future__ import annotations

import json
from typing import Any

from jaxtrain.tokenizers.byte_values import ByteTokenizer
from jaxtrain.tokenizers.published import HuggingFaceVocabulary, open_tokenizer


def same_ids(vocabulary: Any, reference: Any) -> bool:
    """Returns True if a text has the same ids in both, apart from those put around it."""
    return _encoder(vocabulary) == _encoder(reference)


def _encoder(vocabulary: Any) -> Any:
    """Returns what decides the ids of a text."""
    if isinstance(vocabulary, ByteTokenizer):
        vocabulary = vocabulary.published()
    if not isinstance(vocabulary, HuggingFaceVocabulary):
        return vocabulary.key
    content = json.loads(open_tokenizer(vocabulary.json).to_str())
    return content | {"post_processor": None}, vocabulary.eos_token
