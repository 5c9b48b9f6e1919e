"""The public names and where they are: read by type checkers, and by `__init__.py`."""

from .adapters import column as column
from .adapters import row as row
from .block import AttentionConfig as AttentionConfig
from .block import BlockConfig as BlockConfig
from .block import MlpConfig as MlpConfig
from .block import MoeConfig as MoeConfig
from .block import gelu_exact as gelu_exact
from .block import gelu_tanh as gelu_tanh
from .block import silu as silu
from .decoder import DecoderConfig as DecoderConfig
from .description import AttentionCall as AttentionCall
from .description import Bias as Bias
from .description import ColumnParallel as ColumnParallel
from .description import Elementwise as Elementwise
from .description import ExpertCall as ExpertCall
from .description import Head as Head
from .description import ModelDescription as ModelDescription
from .description import Residual as Residual
from .description import RowParallel as RowParallel
from .description import Weight as Weight
from .layered import LayeredModel as LayeredModel
from .layered import ModelConfig as ModelConfig
from .layered import stacked_blocks as stacked_blocks
from .layered import vocabulary_table as vocabulary_table

__all__: list[str]
