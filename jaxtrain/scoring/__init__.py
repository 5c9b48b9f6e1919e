"""The loss of each token by itself, where a step and an evaluation have their sum.

To read first: Rafailov et al. 2023, on what a reference model is for.
"""
