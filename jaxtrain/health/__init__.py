"""Checks that a run computes correct numbers, as `Health` of an experiment requests: devices that
compute and store correctly (`checks.py`); kernels, collectives and compiler options that do not
change results (`self_check.py`).

Not here: ending and restarting processes (fault_tolerance/). Read first: Dixit et al., "Silent Data
Corruptions at Scale" (2021).
"""
