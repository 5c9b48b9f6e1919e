"""Products of matrices in numbers of 8 bits: formats, and the products that layers make of them.

What a number is and how an array becomes such numbers is in `formats.py`, how a layer multiplies
by them and what its backward pass does in `products.py`. Codecs for gradients on the wire are in
collectives/. To read first: Micikevicius et al. 2022 (FP8 formats for deep learning), Jacob et al.
2018 (quantisation and integer arithmetic).
"""
