"""The public names and where they are: read by type checkers, and by `__init__.py`."""

from .attention import AttentionConfig as AttentionConfig
from .block import BlockConfig as BlockConfig
from .decoder import DecoderConfig as DecoderConfig
from .feed_forward import MlpConfig as MlpConfig
from .feed_forward import gelu_exact as gelu_exact
from .feed_forward import gelu_tanh as gelu_tanh
from .feed_forward import silu as silu
from .latent import LatentAttentionConfig as LatentAttentionConfig
from .mixture import MoeConfig as MoeConfig
from .mixture import SharedExpert as SharedExpert

__all__: list[str]
