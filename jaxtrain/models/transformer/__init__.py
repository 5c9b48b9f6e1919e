"""The decoder's blocks: attention and a feed-forward layer around the residual stream.

To read first: Vaswani et al. 2017, Attention Is All You Need, in the form of Llama 2 (Touvron et
al. 2023).
"""
