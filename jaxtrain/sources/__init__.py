"""Where documents come from: text files, records in JSON Lines, CSV and Parquet, conversations,
pairs of answers.

A source lists and reads documents; it knows nothing of tokens, which `data` makes of them.
To read first: the datasheet of C4 (Dodge et al. 2021) on what web text holds, and Lee et al. 2022
on copies in it.
"""

from jaxtrain.sources.conversations import Conversations
from jaxtrain.sources.document import Document, Piece, Source, documents, fingerprint
from jaxtrain.sources.preferences import Preferences
from jaxtrain.sources.records import Csv, JsonLines, Parquet
from jaxtrain.sources.stdlib import StdlibSource
from jaxtrain.sources.text import TextFiles

__all__ = [
    "Conversations",
    "Csv",
    "Document",
    "JsonLines",
    "Parquet",
    "Piece",
    "Preferences",
    "Source",
    "StdlibSource",
    "TextFiles",
    "documents",
    "fingerprint",
]
