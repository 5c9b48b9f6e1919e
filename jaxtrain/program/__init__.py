"""Reads a program as XLA prints it: what it sends, in which order, how often, and its matmuls.

Text is parsed into computations (`text.py`); loops are multiplied out (`loops.py`, `values.py`,
`totals.py`). `overlap.py` says which collectives stand behind work, `roofline.py` how long a chip
takes at its peaks, `branches.py` which collectives not all devices meet.

Not here: predictions from fields and a mesh (planner/). Read first: the HLO operation semantics of
OpenXLA; Williams et al. 2009 (Roofline).
"""
