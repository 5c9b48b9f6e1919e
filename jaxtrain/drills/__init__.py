"""Injects every fault into a run, and checks that its results stay the same.

`drill.py` injects all faults into one run; `machine_drill.py` removes and returns machines.

Not here: the faults themselves, which any run can be given (fault_tolerance/). Read first: "Chaos
Engineering" (Basiri et al. 2016).
"""
