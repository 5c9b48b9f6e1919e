"""Predicts the collectives of a layer's activations: tensor parallelism's sums and gathers, keys of
split rows, rows sent to experts. Those of weights and gradients are in planner/.

Nothing here imports a tracer. To read first: Korthikanti et al. 2022 (sequence parallelism), Liu et
al. 2023 (ring attention).
"""
