"""The public names and where they are: read by type checkers, and by `__init__.py`."""

from .loss import HeadConfig as HeadConfig
from .loss import LossSums as LossSums
from .loss import cross_entropy as cross_entropy
from .norm import LayerNorm as LayerNorm
from .norm import Norm as Norm
from .norm import RMSNorm as RMSNorm
from .param import Initialisation as Initialisation
from .param import normal as normal
from .quantized.delayed import Delayed as Delayed
from .quantized.recipe import Fp8Products as Fp8Products
from .quantized.recipe import Int8Products as Int8Products
from .rotary.rope import Rope as Rope
from .rotary.scaling import DynamicNtk as DynamicNtk
from .rotary.scaling import LinearScaling as LinearScaling
from .rotary.scaling import Llama3Scaling as Llama3Scaling
from .rotary.scaling import LongRope as LongRope
from .rotary.scaling import Yarn as Yarn
from .stack import LayerLoop as LayerLoop

__all__: list[str]
