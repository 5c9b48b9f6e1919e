"""The public names and where they are: read by type checkers, and by `__init__.py`."""

from .optimizer import SGD as SGD
from .optimizer import Adafactor as Adafactor
from .optimizer import AdamW as AdamW
from .optimizer import Lamb as Lamb
from .optimizer import Lars as Lars
from .optimizer import Lion as Lion
from .optimizer import Muon as Muon
from .precision import LossScale as LossScale
from .precision import Precision as Precision
from .precision import bf16 as bf16
from .precision import fp8 as fp8
from .precision import fp16 as fp16
from .precision import fp32 as fp32
from .precision import int8 as int8
from .rate import ScaledRate as ScaledRate
from .schedule import Constant as Constant
from .schedule import InverseSqrt as InverseSqrt
from .schedule import WarmupCosine as WarmupCosine
from .schedule import WarmupLinear as WarmupLinear
from .schedule import WarmupStableDecay as WarmupStableDecay

__all__: list[str]
