"""What of a layer's activations is sent: the sums and gathers of tensor parallelism, the keys of
rows that are cut, the rows of experts that are apart. Weights and gradients are in planner/.

Nothing here imports a tracer. To read first: Korthikanti et al. 2022 (sequence parallelism), Liu et
al. 2023 (ring attention).
"""
