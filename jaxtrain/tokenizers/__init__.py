"""Text to token ids and back: bytes, byte-level BPE trained on the corpus, or a tokenizer.json; and
conversations to token ids by the chat template of a tokenizer.

A tokenizer in an experiment file is a frozen value; `build` makes the vocabulary, which encodes.
Corpora, packing and token files are in `data`.
To read first: Sennrich et al. 2016 on BPE, and Hugging Face's documentation of chat templates.
"""

from jaxtrain.tokenizers.bpe import BpeTokenizer
from jaxtrain.tokenizers.byte_values import ByteTokenizer
from jaxtrain.tokenizers.file import TokenizerFile
from jaxtrain.tokenizers.protocol import EOS, Tokenizer, Vocabulary
from jaxtrain.tokenizers.published import (
    LARGEST_ID,
    HuggingFaceVocabulary,
    open_tokenizer,
    panics_are_errors,
)

__all__ = [
    "EOS",
    "LARGEST_ID",
    "BpeTokenizer",
    "ByteTokenizer",
    "HuggingFaceVocabulary",
    "Tokenizer",
    "TokenizerFile",
    "Vocabulary",
    "open_tokenizer",
    "panics_are_errors",
]
