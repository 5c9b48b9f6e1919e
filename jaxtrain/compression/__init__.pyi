"""The public names and where they are: read by type checkers, and by `__init__.py`."""

from .codecs import Fp8 as Fp8
from .codecs import Int8 as Int8
from .codecs import RandomK as RandomK
from .codecs import Sign as Sign
from .codecs import TopK as TopK
from .compressed import Compressed as Compressed
from .compressed import Guard as Guard
from .powersgd import PowerSGD as PowerSGD

__all__: list[str]
