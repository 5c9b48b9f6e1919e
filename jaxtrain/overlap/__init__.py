"""Overlap of communication and computation, said in the program rather than left to a compiler.

`alongside.py` runs two functions as one program in which permutes of the one travel while products
of the other run; `spans.py` chooses which product hides which permute, and `tracing.py` takes a
function apart into operations.

Collectives (collectives/) and layers (nn/) do not belong here, and know nothing of it.
"""
