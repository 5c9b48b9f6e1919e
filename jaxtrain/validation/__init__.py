"""What is wrong with an experiment, alone and on a mesh, and with the model that it names.

Every function gives a list of violations, each with its remedy: whoever asks raises all at once.

Does not belong here: what one value can tell of its own fields (its `__post_init__`), and what only
a disk or a device knows (run/check.py).
"""
