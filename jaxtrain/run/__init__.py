"""A training run: `loop.train` and what surrounds its steps.

`session.py` prepares a run (data, compiled program, state on its devices); the loop takes the
steps, evaluates, saves and stops. Observers are callbacks (`callback.py`), among them the run's own
progress line and metrics files (`hooks.py`). `check.py` reports a run without a device.

Not here: what happens within a step (step/). Read first: Check-N-Run (Eisenman et al. 2022) on
checkpoints, PaLM (Chowdhery et al. 2022, appendix B) on model FLOPs utilization.
"""
