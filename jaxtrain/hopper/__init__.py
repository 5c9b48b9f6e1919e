"""Attention for Hopper GPUs, by kernels of our own in Pallas' Mosaic back end.

`attention.py` has the kernel as a value; `forward.py`, `query_gradients.py` and `key_gradients.py`
what runs on the GPU, by `tiles.py`, `scores.py` and `gradients.py`; `functions.py` the functions of
scores. They are tested in JAX's
simulator of a GPU and have not run on a chip. The simulator's products are done at once: that each
is awaited before what it reads is written, tests see in the traced program alone.

Does not belong here: what attention computes (attention/), products of experts (moe/). To read
first: FlashAttention-2 (Dao 2023), and FlashAttention-3 (Shah et al. 2024) for what Hopper's
asynchronous instructions allow beyond it.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
