"""How a process of a run ends, for whoever started it: a shell, a supervisor or a scheduler."""

from __future__ import annotations

DONE, FAILED, REFUSED = 0, 1, 2
"""All went well; a check or the process failed; input was refused, and would be again."""

EXHAUSTED, DETERMINISTIC, HUNG = 69, 70, 124
"""Of a supervisor: no restarts are left after a crash; a failure that would come again; no restarts
are left after a hang."""

PREEMPTED, INTERRUPTED = 75, 130
"""Stopped after saving: the same command goes on; stopped with nothing saved."""
