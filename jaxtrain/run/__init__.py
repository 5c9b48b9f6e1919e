"""A training run: `loop.train` and what surrounds its steps.

The loop takes the steps of a session (session/), evaluates, saves (`saves.py`) and stops. Observers
are callbacks (`callback.py`), among them the run's own progress line and metrics files
(`hooks.py`). `listing.py` lists the runs of a folder.

Not here: what happens within a step (step/), checks of what it computes (health/), how a state is
written (checkpoint/), processes that end (fault_tolerance/). Read first: Check-N-Run (Eisenman et
al. 2022) on checkpoints, PaLM (Chowdhery et al. 2022, appendix B) on model FLOPs utilization.
"""
