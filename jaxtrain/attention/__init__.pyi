"""The public names and where they are: read by type checkers, and by `__init__.py`."""

from .blockwise import Blockwise as Blockwise
from .kernels import Cudnn as Cudnn
from .kernels import Reference as Reference
from .kernels import Splash as Splash
from .kernels import attention as attention

__all__: list[str]
