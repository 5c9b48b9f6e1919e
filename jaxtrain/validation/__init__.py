"""Checks an experiment, alone and on a mesh, and the model that it names.

Every function returns a list of violations, each with its remedy; the caller raises all of them at
once.

Not here: checks that one value can make of its own fields (its `__post_init__`), and checks that
need a disk or a device (session/check.py).
"""
