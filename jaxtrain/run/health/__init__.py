"""Whether the numbers of a run are those that were meant, as `Health` of an experiment asks for it:
devices that compute and keep what they should (`checks.py`), and kernels, collectives and compiler
options that change nothing (`self_check.py`).

Does not belong here: who ends processes and starts them again (fault_tolerance/), and digests
themselves (step/). To read first: Dixit et al., "Silent Data Corruptions at Scale" (2021).
"""

from __future__ import annotations

from jaxtrain.run.health.checks import HealthChecks, WrongNumbers

__all__ = ["HealthChecks", "WrongNumbers"]
