"""Checks the prediction of a step against its compiled program, on devices present or absent.

`contract.py` compares collectives, kind by kind and byte by byte; `compile.py` compiles a step for
a mesh and reports what it needs. Does not belong here: the predictions themselves (planner/).

To read first: Narayanan et al. 2021 (Megatron-LM on clusters, costs by formula).
"""
