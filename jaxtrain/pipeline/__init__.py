"""Pipeline parallelism: schedules as integer tables, and one executor that runs every table.

Belongs here: which stage works on what in which tick, proofs of that, its cost and its memory, and
the program that follows it. What a layer computes does not; nor do gradients' sums over data.

Narayanan et al. 2021, "Efficient large-scale language model training on GPU clusters using
Megatron-LM" (interleaving); Qi et al. 2023, "Zero bubble pipeline parallelism".
"""
