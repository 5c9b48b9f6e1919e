"""The public names and where they are: read by type checkers, and by `__init__.py`."""

from .choice import Collectives as Collectives
from .compressed import Compressed as Compressed
from .compressed import Guard as Guard
from .compression import Fp8 as Fp8
from .compression import Int8 as Int8
from .compression import RandomK as RandomK
from .compression import Sign as Sign
from .compression import TopK as TopK
from .hierarchical import Hierarchical as Hierarchical
from .lax_form import Lax as Lax
from .powersgd import PowerSGD as PowerSGD
from .recursive import Recursive as Recursive
from .ring import Ring as Ring
from .rounded import Rounded as Rounded
from .rows import Padded as Padded
from .rows import Ragged as Ragged

__all__: list[str]
