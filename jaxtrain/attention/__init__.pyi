"""The public names and where they are: read by type checkers, and by `__init__.py`."""

from .blockwise import Blockwise as Blockwise
from .cudnn import Cudnn as Cudnn
from .documents import document_starts as document_starts
from .kernels import Reference as Reference
from .kernels import SelfAttention as SelfAttention
from .kernels import attention as attention
from .splash import Splash as Splash
from .splash import SplashBlocks as SplashBlocks
from .triton import Triton as Triton

__all__: list[str]
