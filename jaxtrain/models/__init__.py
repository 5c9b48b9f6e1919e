"""What a model is: a frozen config with `build(key)` and `describe()`, and the module it builds.

A model uses logical axes and a `Communicator`; it knows no meshes, optimizers or data.
`description.py` is all that other rooms know of a model. `layered.py` is the base of a model,
`stage.py` its stage in a pipeline. Families have rooms of their own (transformer/). To read first:
the GPipe and Megatron-LM papers (Huang et al. 2019; Shoeybi et al. 2019), on models as layers.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
