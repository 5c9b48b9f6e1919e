"""The public names and where they are: read by type checkers, and by `__init__.py`."""

from .adapters import column as column
from .adapters import replicated as replicated
from .adapters import row as row
from .decoder import DecoderConfig as DecoderConfig
from .description import ModelDescription as ModelDescription
from .layered import LayeredModel as LayeredModel
from .layered import ModelConfig as ModelConfig
from .layered import stacked_blocks as stacked_blocks
from .layered import vocabulary_table as vocabulary_table
from .transformer.attention import AttentionConfig as AttentionConfig
from .transformer.block import BlockConfig as BlockConfig
from .transformer.feed_forward import MlpConfig as MlpConfig
from .transformer.feed_forward import gelu_exact as gelu_exact
from .transformer.feed_forward import gelu_tanh as gelu_tanh
from .transformer.feed_forward import silu as silu
from .transformer.latent import LatentAttentionConfig as LatentAttentionConfig
from .transformer.mixture import MoeConfig as MoeConfig
from .transformer.mixture import SharedExpert as SharedExpert

__all__: list[str]
