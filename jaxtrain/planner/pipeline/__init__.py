"""Predicts what a pipelined step sends and computes, from its schedule's tables.

Parts common to every mesh are in planner/; nothing here imports a tracer. To read first: Narayanan
et al. 2021 (Megatron-LM on clusters), Qi et al. 2023 (zero bubble).
"""
