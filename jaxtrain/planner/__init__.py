"""Predicts what a training step needs, and checks the prediction against the compiled program.

The modules compute with the fields of an experiment and a mesh, so a laptop is enough; nothing here
trains. Modules that predict do not import JAX's tracer. To read first: Narayanan et al. 2021
(Megatron-LM on clusters, costs by formula), Korthikanti et al. 2022 (activation recomputation,
bytes of sequence parallelism).
"""
