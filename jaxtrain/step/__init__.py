"""What one step does on a mesh: the train state, gradients and their reductions, the update.

`train_step.py` is the algorithm; what a mesh changes of it is in `gradients.py`. `assembly.py` is
an experiment on a mesh before a device is touched: every shape, every split, every mistake.

Does not belong here: what comes between steps (run/). To read first: ZeRO (Rajbhandari et al. 2020)
and the sequence-parallel paper (Korthikanti et al. 2022).
"""
