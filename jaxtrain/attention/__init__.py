"""Attention: what is computed, and the kernels that compute it.

A kernel is a value, called with (q, k, v, starts, scoring), that gives (o, log-sum-exp).
`kernels.py` has the dense reference and the choice by platform, `fused.py` what the fused ones
share: cuDNN's, Triton's, splash, and the portable `blockwise.py`, over tiles of `tiling.py` whose
partial results `online_softmax.py` merges. `documents.py` says what they are told of packed rows
and of places, scores/ has functions of scores.

Does not belong here: projections, rotary embeddings and heads (models/), or a mesh. To read first:
FlashAttention (Dao et al. 2022), and online softmax (Milakov and Gimelshein 2018).
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
