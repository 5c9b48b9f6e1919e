"""What a step will need, predicted on a laptop and checked against the compiled program.

Arithmetic on the fields of an experiment and a mesh belongs here; nothing that trains. Modules that
predict import no tracer. To read first: Narayanan et al. 2021 (Megatron-LM on clusters, costs by
formula), Korthikanti et al. 2022 (activation recomputation, bytes of sequence parallelism).
"""
