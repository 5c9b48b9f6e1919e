"""Pipeline parallelism: schedules as integer tables, and one executor that runs every table.

Belongs here: the work of each stage in each tick, proofs of valid tables, their cost and memory,
and the program that follows them. Layers do not belong here; nor do gradients' sums over data.

Narayanan et al. 2021, "Efficient large-scale language model training on GPU clusters using
Megatron-LM" (interleaving); Qi et al. 2023, "Zero bubble pipeline parallelism".
"""
