"""Exit codes of a run's processes, for a shell, a supervisor or a scheduler."""

from __future__ import annotations

DONE, FAILED, REFUSED = 0, 1, 2
"""Success; a check or the process failed; invalid input, which a restart would not change."""

EXHAUSTED, DETERMINISTIC, HUNG = 69, 70, 124
"""Of a supervisor: no restarts left after a crash; a failure that would repeat; no restarts left
after a hang."""

PREEMPTED, INTERRUPTED = 75, 130
"""Stopped after a save: the same command goes on; stopped with nothing saved, or by a command that
begins anew."""
