"""What a pipelined step sends and computes, by arithmetic on its schedule's tables.

What is the same on every mesh is in planner/; nothing here imports a tracer. To read first:
Narayanan et al. 2021 (Megatron-LM on clusters), Qi et al. 2023 (zero bubble).
"""
