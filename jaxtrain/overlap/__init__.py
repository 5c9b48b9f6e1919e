"""Overlap of communication and computation, fixed in the program rather than left to a compiler.

`alongside.py` runs two functions as one program, in which permutes of one travel while products of
the other run. `spans.py` chooses which products hide a permute. `tracing.py` turns a function into
a list of operations.

Collectives (collectives/) and layers (nn/) do not belong here, and know nothing of it.
"""
