"""A training run: `loop.train` and what stands around its steps.

`session.py` makes a run ready (data, compiled program, state on its devices); the loop takes the
steps, evaluates, saves and stops. What watches it are callbacks (`callback.py`), its own line of
progress and files of metrics among them (`hooks.py`). `check.py` tells all of it without a device.

Does not belong here: what happens within a step (step/). To read first: Check-N-Run (Eisenman et
al. 2022) on checkpoints, PaLM (Chowdhery et al. 2022, appendix B) on model FLOPs utilization.
"""
