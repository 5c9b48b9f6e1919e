"""A program as XLA has it, read: what it sends, in which order, how often, and what it multiplies.

Text is parsed into computations (`text.py`); loops are multiplied out (`loops.py`, `values.py`,
`totals.py`). To read first: the HLO operation semantics of OpenXLA.
"""
