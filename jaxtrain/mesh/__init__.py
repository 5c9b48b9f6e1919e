"""Machines and where tensors live on them: mesh files, chips, links, and the sharding tables.

Nothing here knows a model or an experiment. To read first: GSPMD (Xu et al. 2021) for meshes and
partition specs, ZeRO (Rajbhandari et al. 2020) for what the presets of `sharding.py` mean.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
