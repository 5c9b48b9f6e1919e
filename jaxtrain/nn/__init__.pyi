"""The public names and where they are: read by type checkers, and by `__init__.py`."""

from .loss import HeadConfig as HeadConfig
from .loss import LossSums as LossSums
from .loss import cross_entropy as cross_entropy
from .norm import LayerNorm as LayerNorm
from .norm import Norm as Norm
from .norm import RMSNorm as RMSNorm
from .param import Initialisation as Initialisation
from .param import normal as normal
from .stack import LayerLoop as LayerLoop

__all__: list[str]
