"""Text to batches: sources, tokenizers, packing, mixtures, and a loader that works ahead.

`batch(step)` is a pure function of (seed, step): rows are found by number, never by reading what
comes before, so the data position is one integer and a restart on any number of processes repeats
nothing. Nothing here knows devices or meshes; placement is a function that is passed in. grain is
not used: its iterators carry state, where rows in random access need none.
To read first: GPT-3's appendix B (Brown et al. 2020) on mixtures and packing, and Krell et al.
2021 on packing without cross-contamination.
"""

from jaxtrain.data.batch_size import BatchRamp, batch_of, first_row, rows_of_step
from jaxtrain.data.dataset import Batch, Data, Dataset
from jaxtrain.data.loader import Loader
from jaxtrain.data.mixture import Mixture, MixtureDataset
from jaxtrain.data.ngram import reference_bits
from jaxtrain.data.packing import PackedDataset
from jaxtrain.data.row_stream import RowStream
from jaxtrain.data.synthetic import BigramChain
from jaxtrain.data.text import TextData
from jaxtrain.data.token_file import TokenFile, TokenFiles, open_token_file, write_token_file
from jaxtrain.data.tokenization import tokenize
from jaxtrain.data.whole import DocumentStream, WholeDocuments
from jaxtrain.sources import (
    Conversations,
    Csv,
    Document,
    JsonLines,
    Parquet,
    Piece,
    Preferences,
    StdlibSource,
    TextFiles,
)
from jaxtrain.sources.document import SPLITS
from jaxtrain.tokenizers import BpeTokenizer, ByteTokenizer, TokenizerFile

__all__ = [
    "SPLITS",
    "Batch",
    "BatchRamp",
    "BigramChain",
    "BpeTokenizer",
    "ByteTokenizer",
    "Conversations",
    "Csv",
    "Data",
    "Dataset",
    "Document",
    "DocumentStream",
    "JsonLines",
    "Loader",
    "Mixture",
    "MixtureDataset",
    "PackedDataset",
    "Parquet",
    "Piece",
    "Preferences",
    "RowStream",
    "StdlibSource",
    "TextData",
    "TextFiles",
    "TokenFile",
    "TokenFiles",
    "TokenizerFile",
    "WholeDocuments",
    "batch_of",
    "first_row",
    "open_token_file",
    "reference_bits",
    "rows_of_step",
    "tokenize",
    "write_token_file",
]
