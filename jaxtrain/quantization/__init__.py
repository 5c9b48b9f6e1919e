"""Products of matrices in 8 bits: number formats, and the products that layers compute with them.

`formats.py` defines the formats and the conversion of arrays, `recipe.py` the choice of them.
`products.py` defines a layer's products and their backward pass. Codecs for gradients on the wire
are in compression/. To read first: Micikevicius et al. 2022 (FP8 formats for deep learning), Jacob
et al. 2018 (quantisation and integer arithmetic).
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
