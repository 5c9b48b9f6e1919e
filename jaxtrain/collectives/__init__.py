"""Collectives of the training step: every reduction, by name.

Ring kernels, collective matmul and compression belong here; layers and models do not. To read
first: Patarasuk & Yuan 2009 (bandwidth-optimal all-reduce), Wang et al. 2023 (overlap by
decomposition into rings).
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
