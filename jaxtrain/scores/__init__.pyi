"""The public names and where they are: read by type checkers, and by `__init__.py`."""

from .biases import Alibi as Alibi
from .biases import RelativeBias as RelativeBias
from .function import ScoreFunction as ScoreFunction

__all__: list[str]
