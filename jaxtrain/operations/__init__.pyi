"""The public names and where they are: read by type checkers, and by `__init__.py`."""

from .attention import AttentionCall as AttentionCall
from .block import Block as Block
from .block import Branches as Branches
from .block import Read as Read
from .block import Residual as Residual
from .block import Update as Update
from .collectives import ExpertExchange as ExpertExchange
from .collectives import Gather as Gather
from .collectives import HeadExchange as HeadExchange
from .collectives import KeyGather as KeyGather
from .collectives import Scatter as Scatter
from .collectives import Sum as Sum
from .elementwise import Bias as Bias
from .elementwise import Elementwise as Elementwise
from .elementwise import NormAcrossHeads as NormAcrossHeads
from .experts import ExpertCall as ExpertCall
from .head import Head as Head
from .node import Multiplication as Multiplication
from .node import Node as Node
from .node import Scales as Scales
from .node import Tensors as Tensors
from .node import Weight as Weight
from .operation import Operation as Operation
from .product import ColumnParallel as ColumnParallel
from .product import ReplicatedProduct as ReplicatedProduct
from .product import RowParallel as RowParallel
from .product import TokenGather as TokenGather

__all__: list[str]
