"""The public names and where they are: read by type checkers, and by `__init__.py`."""

from .block_loop import BlockLoop as BlockLoop
from .megablox import Megablox as Megablox
from .mosaic_blocks import MosaicBlocks as MosaicBlocks
from .router import Balance as Balance
from .router import Capacity as Capacity
from .router import Groups as Groups
from .router import SigmoidRouter as SigmoidRouter
from .router import SoftmaxRouter as SoftmaxRouter
from .triton_blocks import TritonBlocks as TritonBlocks

__all__: list[str]
