"""Verification of a run's checkpoints: reads every byte and compares it with its stored digest."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from jaxtrain.checkpoint.run_config import (
    NAME,
    REFERENCE,
    REFERENCE_KIND,
    stored_experiment,
)
from jaxtrain.checkpoint.storage import (
    CheckpointError,
    DamagedCheckpoint,
    FailedStorage,
    answering,
    committed_steps,
    steps_aside,
    whole_manifest,
)
from jaxtrain.files.array_file import DamagedFile, open_arrays
from jaxtrain.files.pointer import CHECKPOINTS, checkpoints_in
from jaxtrain.files.regular import refuse_links
from jaxtrain.files.store import AnyPath, any_path, local_copy, names_in
from jaxtrain.state_format.manifest import Foreign
from jaxtrain.state_format.reader import verify_chunks


class Verdict(NamedTuple):
    """Result for one step: number of chunks and bytes read, a line for each damage, and why the
    step is not of this run's experiment."""

    step: int
    chunks: int
    bytes: int
    damages: list[str]
    foreign: list[str]

    @property
    def usable(self) -> bool:
        """True if a start of the run goes on from the step, were it the newest."""
        return not self.damages and not self.foreign


def verify(run_dir: str | AnyPath, foreign: Foreign = lambda metadata: []) -> list[Verdict]:
    """Returns a verdict on each committed step of a run directory's durable tier, oldest first; the
    directory may be in a store. Writes nothing, needs no device, and may run during a run. foreign:
    returns why a step with this metadata is not of the run's experiment.

    Raises ValueError where no step is committed there, or links lead out of it.
    """
    run = any_path("run_dir", run_dir)
    if isinstance(run, Path):
        refuse_links(run)
    directory = checkpoints_in(run)
    steps = committed_steps(directory)
    if not steps:
        aside = ", ".join(steps_aside(directory))
        only = f" but what starts passed over as damaged ({aside})" if aside else ""
        raise ValueError(
            f"{directory} has no committed checkpoint{only}; give the run directory that holds "
            f"{CHECKPOINTS}/, as `jaxtrain train --run-dir` was given it"
        )
    verdicts = [_verdict(directory, step, foreign) for step in steps]
    # A run beside this may have removed a step while it was read.
    remaining = committed_steps(directory)
    return [verdict for verdict in verdicts if verdict.step in remaining]


def damaged_reference(run_dir: str | AnyPath) -> list[str]:
    """Returns a line for each damaged file of losses in the model that a run began with."""
    folder, damages = any_path("run_dir", run_dir) / REFERENCE, []
    for name in sorted(name for name in names_in(folder) if not name.startswith(".")):
        with local_copy(folder / name) as path:
            try:
                open_arrays(path, kind=REFERENCE_KIND, verify=True)
            except DamagedFile as error:
                reason = str(error).partition(";")[0]
                damages.append(reason.replace(str(path), str(folder / name)))
    return damages


def require_experiment(run_dir: str | AnyPath) -> Any:
    """Returns the experiment in a run directory's config.json, as it is stored. Raises ValueError
    where there is none: no start goes on with such a run."""
    experiment = stored_experiment(any_path("run_dir", run_dir))
    if experiment is None:
        raise ValueError(
            f"{NAME} in {run_dir} names no experiment; put back the one that the run wrote"
        )
    return experiment


def _verdict(directory: AnyPath, step: int, foreign: Foreign) -> Verdict:
    try:
        manifest = whole_manifest(directory, step)
    except DamagedCheckpoint as error:
        return Verdict(step, 0, 0, error.damages, [])
    except FailedStorage:
        raise
    except CheckpointError as error:
        return Verdict(step, 0, 0, [str(error)], [])
    chunks = [chunk for leaf_chunks in manifest.chunks.values() for chunk in leaf_chunks]
    read = len(chunks), sum(chunk.size for chunk in chunks)
    with answering(directory, step):
        return Verdict(step, *read, verify_chunks(manifest), foreign(manifest.metadata))
