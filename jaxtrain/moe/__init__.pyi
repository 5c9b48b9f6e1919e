"""The public names and where they are: read by type checkers, and by `__init__.py`."""

from .block_loop import BlockLoop as BlockLoop
from .megablox import Megablox as Megablox
from .triton_blocks import TritonBlocks as TritonBlocks

__all__: list[str]
