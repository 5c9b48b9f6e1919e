"""Mixtures of experts: who goes where, and each expert's rows times its matrix.

`layer.py` is the layer: the router's choice (`router.py`), the rows in the order of experts, and
back (`rows.py`). `tally.py` is what a step counts, and the auxiliary losses. What multiplies rows
is a value, a `GroupedMatmul` (`grouped.py`), which says how rows must lie for it: the portable loop
over blocks, megablox on TPUs, a kernel of Pallas-Triton on GPUs; `kernels.py` chooses by platform.

Does not belong here: which device has which tokens or weights (nn/), or a mesh. To read first:
Switch Transformer (Fedus et al. 2022), and MegaBlocks (Gale et al. 2022).
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
