"""Models: a frozen config with `build(key)` and `describe()`, and the Flax NNX module it builds.

A model uses logical axes and a `Communicator`; it knows no meshes, optimizers or data.
`description.py` is all that other rooms know of a model. `layered.py` is the base of a model,
`stage.py` its stage in a pipeline; the decoder is one family. To read first: Llama 2 (Touvron et
al. 2023) and GPT-2 (Radford et al. 2019), which the decoder's fields span.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
