"""The public names and where they are: read by type checkers, and by `__init__.py`."""

from .adapters import column as column
from .adapters import replicated as replicated
from .adapters import row as row
from .description import Member as Member
from .description import ModelDescription as ModelDescription
from .layered import LayeredModel as LayeredModel
from .layered import ModelConfig as ModelConfig
from .layered import stacked_blocks as stacked_blocks
from .layered import vocabulary_table as vocabulary_table

__all__: list[str]
