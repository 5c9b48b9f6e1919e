"""Several processes of one run: how they join, exchange small texts, and agree.

`join.py` makes a process one of several, `agreement.py` gathers small texts from all of them within
a time limit, and `requests.py` lets any of them request an action that all take after the same
step. All of it goes through JAX's coordination service, not through the devices' network.
`run_lock.py` lets one run at a time use a run directory.

Not here: starting and restarting processes (fault_tolerance/). Read first: "Large Scale Distributed
Deep Networks" (Dean et al. 2012), and Bamboo (Thorpe et al. 2023) on preemption in training.
"""
