"""Failing processes: starts them, notices a failure, names its process, and restarts.

`supervisor.py` runs processes on machines (machines/); `deadlines.py` finds dead or hanging ones
from their reports; `restarts.py` decides on a restart. All processes end and start together, from
the newest undamaged checkpoint: a run is never repaired in flight. `faults.py` injects faults.

Not here: how a process stops on request (run/, cli/). Read first: Llama 3 (Grattafiori et al.
2024), section 3.3.4, for what fails and how often, and MegaScale (Jiang et al. 2024) for detection.
"""
