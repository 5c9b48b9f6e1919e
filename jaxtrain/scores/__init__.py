"""Functions of scores: what attention makes of scale * q.k before the softmax.

`function.py` has their base class and the calls of a tile, `biases.py` two of the field's. Does not
belong here: kernels (attention/), of which `Reference` and `Blockwise` compute functions; fused
ones refuse them, but for `hopper.FlashAttention`. To read first: Press et al. 2022, Train Short,
Test Long (ALiBi).
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
