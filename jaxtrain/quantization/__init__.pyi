"""The public names and where they are: read by type checkers, and by `__init__.py`."""

from .delayed import Delayed as Delayed
from .recipe import Fp8Products as Fp8Products
from .recipe import Int8Products as Int8Products

__all__: list[str]
