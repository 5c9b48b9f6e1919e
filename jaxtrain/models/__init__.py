"""Models: a frozen config with `build(key)`, and the Flax NNX module it builds.

A model speaks logical axes and asks a `Communicator`; meshes, optimizers and data are not known
here. To read first: Llama 2 (Touvron et al. 2023) and GPT-2 (Radford et al. 2019), between which
the decoder's fields reach.
"""
