"""Trained weights: the initial parameters of a run, generation of text, and export of folders.

Does not belong here: checkpoints of a run (checkpoint/), adapters as modules (models/). To read
first: LoRA (Hu et al. 2021) and the safetensors format (`huggingface/`).
"""
