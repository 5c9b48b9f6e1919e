"""Products of matrices in 8 bits: number formats, and the products that layers compute with them.

`formats.py` defines the formats and the conversion of arrays. `products.py` defines a layer's
products and their backward pass. Codecs for gradients on the wire are in collectives/. To read
first: Micikevicius et al. 2022 (FP8 formats for deep learning), Jacob et al. 2018 (quantisation and
integer arithmetic).
"""
