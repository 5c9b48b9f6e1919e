"""One step on a mesh: the train state, gradients and their reductions, the update.

`train_step.py` is the algorithm; `gradients.py` has the parts that depend on the mesh.
`assembly.py` is an experiment on a mesh before a device is touched: every shape, every split, every
mistake.

Does not belong here: the work between steps (run/). To read first: ZeRO (Rajbhandari et al. 2020)
and the sequence-parallel paper (Korthikanti et al. 2022).
"""
