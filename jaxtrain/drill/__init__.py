"""Every fault on purpose, and whether the run is the same for it.

`drill.py` has all faults happen to one run; `machine_drill.py` has machines of another come and go.

Does not belong here: the faults themselves, which any run can be given (fault_tolerance/). To read
first: "Chaos Engineering" (Basiri et al. 2016).
"""
