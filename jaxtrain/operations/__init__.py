"""Operations: the work of a block, in values, one file a kind of work.

An operation expands into nodes of the block's graph of values (`node.py`). A node says what its
derivatives read, which collective computes it, what it multiplies by and under what name remat
policies save it. What a step sends and computes, LoRA's matrices, zero bubble's W and MFU are sums
over nodes (`jaxtrain.planner`), so an operation of one's own needs nothing but `nodes`. No JAX is
here, and no size of a mesh. To read first: sequence parallelism (Korthikanti et al. 2022), and zero
bubble pipelines (Qi et al. 2023).
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
