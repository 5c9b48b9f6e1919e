"""Where a run begins, as it is asked for and as its config.json records it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jaxtrain.checkpoint.run_config import BRANCH, anew_in, read_config
from jaxtrain.checkpoint.run_config import NAME as CONFIG
from jaxtrain.checkpoint.storage import FailedStorage, committed_steps
from jaxtrain.cluster.agreement import from_first
from jaxtrain.files.pointer import checkpoints_in, place_of
from jaxtrain.session.branch import Branch
from jaxtrain.weights.run_step import FORM, run_and_step
from jaxtrain.weights.start import manifest_of


def branch_from(
    source: str | Path | None, run: Path | None, last: int, *, fresh: bool
) -> Branch | None:
    """Returns where a run begins, the same on all processes; None for a run that is no branch.

    source: RUN or RUN@STEP, the newest step if none is given; None for what is recorded in `run`,
    the directory that the run goes on in (None: it has none). last: the step that it ends with.
    fresh: it begins anew there. Raises ValueError where there is no such step, nothing would be
    trained after it, or `run` began elsewhere.
    """
    begins = from_first(lambda: _beginning(source, run, fresh=fresh))
    if begins is None:
        return None
    branch = Branch(begins["run"], begins["step"], begins if "differs" in begins else None)
    branch.refuse_fewer_steps(last)
    return branch


def _beginning(
    source: str | Path | None, run: Path | None, *, fresh: bool
) -> dict[str, Any] | None:
    config = None if run is None or fresh else read_config(run)
    recorded = recorded_in(config)
    if source is None:
        return recorded
    path, step = run_and_step(source)
    place = path.resolve()
    begins = {"run": place_of(path), "step": step}
    if run and (place.is_relative_to(run.resolve()) or place_of(path) == place_of(run)):
        otherwise = "begin anew there" if fresh else "go on with that run"
        raise ValueError(
            f"a branch of {path} is a run of its own, not in {run}; give another --run-dir or "
            f"--name, or leave --from out to {otherwise}"
        )
    if recorded and step in (None, recorded["step"]):
        if recorded["run"] == begins["run"]:
            return recorded  # the other run may have removed the step meanwhile
        if _digest_of(path, recorded["step"]) == recorded["digest"]:  # it was moved
            return {**recorded, "run": begins["run"]}
    if config is not None:
        began = "is no branch of another"
        if recorded:
            began = f"began at {recorded['run']}@{recorded['step']}"
        raise ValueError(
            f"the run in {run} {began}, and --from is {source}: leave --from out to go on with it, "
            f"or {anew_in(run)}"
        )
    refuse_no_directory(path)
    steps = committed_steps(checkpoints_in(path))
    if step is not None and steps and step not in steps:
        raise ValueError(f"{path} has no step {step}; saved there: {', '.join(map(str, steps))}")
    return {**begins, "step": manifest_of(path, step)[0]}


def _digest_of(run: Path, step: int) -> str | None:
    """Returns the digest of a step's state, None where there is no such step."""
    try:
        return manifest_of(run, step)[1].digest
    except FailedStorage:
        raise
    except ValueError:
        return None


def refuse_no_directory(path: Path) -> None:
    """Raises ValueError where there is no directory, with the one in runs/ that may be meant."""
    if not path.is_dir():
        near = Path("runs") / path
        hint = f"; did you mean {near}?" if near.is_dir() else f"; give {FORM}"
        raise ValueError(f"there is no directory {path}{hint}")


def recorded_in(config: dict[str, Any] | None) -> dict[str, Any] | None:
    """Returns where the run of a config.json began: its directory `run`, the `step`, and what
    `differs`; None if it is no branch. Raises ValueError for an entry of another form."""
    entry = (config or {}).get(BRANCH)
    if entry is None:
        return None
    kinds = {"run": str, "step": int, "digest": str, "differs": dict}
    fits = isinstance(entry, dict) and all(type(entry.get(k)) is v for k, v in kinds.items())
    if not fits or not entry["run"].isprintable() or entry["step"] < 1:
        raise ValueError(
            f"{CONFIG} has {BRANCH}={json.dumps(entry)}, which does not say where a run began"
        )
    return entry
