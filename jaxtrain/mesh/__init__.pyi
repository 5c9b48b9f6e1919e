"""The public names and where they are: read by type checkers, and by `__init__.py`."""

from .mesh import MeshSpec as MeshSpec
from .mesh import load_mesh as load_mesh
from .mesh import mesh_from_axes as mesh_from_axes
from .sharding import ShardingRules as ShardingRules
from .sharding import data_parallel as data_parallel
from .sharding import fsdp as fsdp
from .sharding import tensor as tensor
from .sharding import zero1 as zero1
from .sharding import zero2 as zero2

__all__: list[str]
