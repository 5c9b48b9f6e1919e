"""Trained weights: what a run begins with, texts continued by them, and folders of them handed on.

Does not belong here: checkpoints of a run (checkpoint/), adapters as modules (models/). To read
first: LoRA (Hu et al. 2021) and the safetensors format (`huggingface/`).
"""
