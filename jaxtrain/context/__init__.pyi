"""The public names and where they are: read by type checkers, and by `__init__.py`."""

from .methods import GatheredKeys as GatheredKeys
from .methods import RingAttention as RingAttention
from .methods import TwoLevel as TwoLevel
from .methods import Ulysses as Ulysses

__all__: list[str]
