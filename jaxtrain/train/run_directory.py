"""A run's directory: whose it is, and what a start finds there."""

from __future__ import annotations

from pathlib import Path


def refuse_fewer_steps(run: Path, done: int | None, asked: int) -> None:
    """Raises ValueError where more steps are done than a run is to take in all.

    done: the newest step in the directory that is whole, None where there is none.
    """
    if done is not None and done > asked:
        raise ValueError(
            f"run directory {run} is at step {done} already, and this run is to end at step "
            f"{asked}: nothing would be trained; ask for {done} steps or more to go on from there, "
            f"or give a run of {asked} steps another --run-dir"
        )
