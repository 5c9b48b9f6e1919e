"""Model families of Hugging Face `transformers`: their config.json and tensors, and the decoder's.

A `Family` converts its config.json to a `DecoderConfig` and back, and maps its tensors to leaves.
Does not belong here: files of weights (huggingface/). To read first: Wolf et al., "Transformers:
State-of-the-Art Natural Language Processing" (2020).
"""
