"""The public names and where they are: read by type checkers, and by `__init__.py`."""

from .tasks import Tasks as Tasks

__all__: list[str]
