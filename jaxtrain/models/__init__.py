"""Models: a frozen config with `build(key)` and `describe()`, and the Flax NNX module it builds.

A model speaks logical axes and asks a `Communicator`; meshes, optimizers and data are not known
here. `description.py` is all that the rest of the house knows of a model, `layered.py` what one is
made from, `stage.py` what a pipeline makes of it; the decoder is one family. To read first: Llama 2
(Touvron et al. 2023) and GPT-2 (Radford et al. 2019), between which the decoder's fields reach.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
