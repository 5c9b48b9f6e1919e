"""Several processes of one run: how they join, what they tell each other, what they agree on.

`join.py` makes a process one of many, `agreement.py` gathers small texts from all of them within a
bound of time, and `requests.py` lets any of them ask for what all then do after the same step.
None of it goes over the devices' network: JAX's coordination service carries it.

Does not belong here: who starts processes and restarts them (fault_tolerance/). To read first:
"Large Scale Distributed Deep Networks" (Dean et al. 2012), and Bamboo (Thorpe et al. 2023) for what
preemption asks of a training run.
"""
