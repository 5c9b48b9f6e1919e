"""The public names and where they are: read by type checkers, and by `__init__.py`."""

from .score import Scored as Scored
from .score import score_rows as score_rows

__all__: list[str]
