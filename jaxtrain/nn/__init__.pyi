"""The public names and where they are: read by type checkers, and by `__init__.py`."""

from .norm import LayerNorm as LayerNorm
from .norm import Norm as Norm
from .norm import RMSNorm as RMSNorm
from .param import Initialisation as Initialisation
from .param import normal as normal
from .stack import LayerLoop as LayerLoop

__all__: list[str]
