"""Updates of parameters: optimizers, learning rates, precision, clipping and averaging.

Optimizers see logical axes and never a mesh: a leaf stacked over layers is updated as one leaf for
each layer. Losses, gradients' reductions and the train step do not belong here. To read first:
Loshchilov & Hutter 2019 (decoupled weight decay) and Micikevicius et al. 2018 (mixed precision).
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
