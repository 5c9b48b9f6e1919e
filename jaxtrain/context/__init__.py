"""Context parallelism: attention of sequences that are cut over devices, along a mesh axis.

A *method* is a value that attends in such a cut (`methods.py`); `order.py` says which tokens of a
row a device has, `ring.py` how keys come by and gradients go home, `tiles.py` what is computed with
them, `kernel.py` makes one differentiable function of it, `exchange.py` trades tokens for heads.

Kernels themselves (attention/) and layers (nn/) do not belong here. To read first: Ring Attention
(Liu et al. 2023), and DeepSpeed-Ulysses (Jacobs et al. 2023).
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
