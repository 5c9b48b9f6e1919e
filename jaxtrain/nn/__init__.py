"""Layers, written once against a `Communicator`: the same lines run on one device and on a mesh.

No layer names a mesh axis, and neither models nor attention (attention/) live here. To read first:
Megatron-LM (Shoeybi et al. 2019), and Korthikanti et al. 2022 for its sequence-parallel form.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
