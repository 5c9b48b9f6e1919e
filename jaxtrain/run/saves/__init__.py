"""Saves of a run, and the way back to them.

Not here: how a state is written and read (checkpoint/).
"""
