"""The decoder: a config of blocks around the residual stream, and the module that it builds.

`decoder.py` has the config, `describe.py` its description for other rooms; a block is attention and
a feed-forward layer. Does not belong here: what every model has (models/). To read first: Vaswani
et al. 2017, Attention Is All You Need, in the form of Llama 2 (Touvron et al. 2023) and GPT-2
(Radford et al. 2019), which the decoder's fields span.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
