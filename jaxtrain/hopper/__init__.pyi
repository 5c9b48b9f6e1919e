"""The public names and where they are: read by type checkers, and by `__init__.py`."""

from .attention import FlashAttention as FlashAttention

__all__: list[str]
