"""Predicts what a training step needs: collectives, FLOPs, seconds.

The modules compute with the fields of an experiment and a mesh, so a laptop is enough; nothing here
trains, and modules that predict do not import JAX's tracer. `facts.py` has what they read,
`traffic.py` what a step sends (of activations `token_traffic.py`, of a pipeline
`pipeline_traffic.py`). contract/ holds them to the compiled program. To read first: Narayanan et
al. 2021 (Megatron-LM on clusters, costs by formula; zero bubble: Qi et al. 2023), Korthikanti et
al. 2022 (activation recomputation, bytes of sequence parallelism).
"""
