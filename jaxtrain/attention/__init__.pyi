"""The public names and where they are: read by type checkers, and by `__init__.py`."""

from .blockwise import Blockwise as Blockwise
from .cudnn import Cudnn as Cudnn
from .documents import document_starts as document_starts
from .kernels import Reference as Reference
from .kernels import SelfAttention as SelfAttention
from .kernels import attention as attention
from .rotary.rope import Rope as Rope
from .rotary.scaling import DynamicNtk as DynamicNtk
from .rotary.scaling import LinearScaling as LinearScaling
from .rotary.scaling import Llama3Scaling as Llama3Scaling
from .rotary.scaling import LongRope as LongRope
from .rotary.scaling import Yarn as Yarn
from .splash import Splash as Splash
from .splash import SplashBlocks as SplashBlocks
from .triton import Triton as Triton

__all__: list[str]
