"""A training run: `loop.train` and what surrounds its steps.

The loop takes the steps of a session (session/), evaluates, saves (`saves.py`) and stops. Observers
are callbacks (`callback.py`), among them the run's own progress line and metrics files
(`hooks.py`). `health_checks.py` finds devices that compute wrong numbers, `self_check.py` kernels,
collectives and compiler options that change results.

Not here: what happens within a step (step/), how a state is written (checkpoint/), processes that
end (fault_tolerance/). Read first: Check-N-Run (Eisenman et al. 2022) on checkpoints, Dixit et al.
2021 on silent data corruption, PaLM (Chowdhery et al. 2022, appendix B) on model FLOPs utilization.
"""
