"""Processes that fail: who starts them, notices, names which one failed of what, and begins again.

`supervisor.py` runs processes on machines (machines/); `deadlines.py` says from what they have
written down of themselves which is dead or hangs; `restarts.py` whether to begin again. All
processes end and start together, from the newest whole checkpoint: nobody mends a run in flight.
`faults.py` has what fails happen on purpose.

Does not belong here: what a process does of its own accord when it is asked to stop (run/, cli/).
To read first: Llama 3 (Grattafiori et al. 2024), section 3.3.4, for what fails and how often, and
MegaScale (Jiang et al. 2024) for how it is found.
"""
