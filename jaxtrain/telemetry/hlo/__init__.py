"""Reads a program as XLA prints it: what it sends, in which order, how often, and its matmuls.

Text is parsed into computations (`text.py`); loops are multiplied out (`loops.py`, `values.py`,
`totals.py`). Read first: the HLO operation semantics of OpenXLA.
"""
