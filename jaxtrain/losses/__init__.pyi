"""The public names and where they are: read by type checkers, and by `__init__.py`."""

from .cross_entropy import HeadConfig as HeadConfig
from .cross_entropy import LossSums as LossSums
from .cross_entropy import cross_entropy as cross_entropy
from .preferences import DPO as DPO

__all__: list[str]
