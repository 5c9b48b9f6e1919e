"""Asynchronous checkpoints with exact resume, on Orbax, behind an interface that drops nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jaxtrain.checkpoint import leaves as leaf_table
from jaxtrain.checkpoint.storage import (
    FORMAT,
    CheckpointError,
    check_writable,
    committed_steps,
    describe,
    discard_steps,
    json_text,
    newest,
    read_record,
)

MEND = "make room or mend the directory and start again: the run resumes from its newest checkpoint"


@dataclass(frozen=True)
class SavePolicy:
    """When to save, and how many saves to keep."""

    every: int = 500
    """Save after each step that is a multiple of this."""
    keep: int = 3
    """Keep this many of the newest checkpoints; an older one goes when a newer is committed."""

    def __post_init__(self) -> None:
        wrong = [
            f"{name}={value!r}"
            for name, value in (("every", self.every), ("keep", self.keep))
            if not isinstance(value, int) or isinstance(value, bool) or value < 1
        ]
        if wrong:
            raise ValueError(
                f"a save policy counts in whole steps from 1, got {' and '.join(wrong)}; "
                "use for example every=500, keep=3"
            )


class CheckpointManager:
    """The checkpoints of one run, in one directory.

    Laws: a save is committed or it does not exist; what is restored equals to the bit what was
    saved, on any mesh; every failure is raised, by the call it happened in or by the next one.

    `save` copies the state off the devices and returns; bytes reach the disk behind the next steps
    (Mohan et al. 2021). One save is in flight at a time. With several processes all of them make
    the same calls in the same order, on a directory they share. Not safe to use from two threads.

    Orbax is imported by the first `save` or `restore`: what is asked before the first step of a
    fresh run (`latest`, `should_save`, `check_space`) stays cheap.
    """

    def __init__(self, directory: Path, policy: SavePolicy) -> None:
        self.directory = Path(directory).absolute()  # Orbax refuses a relative one
        self.policy = policy
        self._orbax: Any = None
        self._in_flight: int | None = None

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def steps(self) -> list[int]:
        """The committed steps, ascending."""
        return committed_steps(self.directory)

    def latest(self) -> int | None:
        """The newest committed step; one that is still being written does not count."""
        return newest(self.steps())

    def should_save(self, step: int) -> bool:
        """Whether the policy saves after `step` steps are done."""
        return step > 0 and step % self.policy.every == 0

    def check_space(self, template: Any) -> None:
        """Refuse, before a run, a directory too full for as many of this state as the policy keeps.

        One more than `keep` exist while the newest is written; those already there are paid for.
        """
        missing = max(1, self.policy.keep + 1 - len(self.steps()))
        check_writable(self.directory, missing * leaf_table.stored_bytes(template))

    def save(self, step: int, state: Any, metadata: dict[str, Any]) -> None:
        """Start saving `state` and `metadata` as `step`; the arrays may be donated right after.

        Waits for the save before it, if that is still in flight. `metadata` is small JSON; it comes
        back as JSON reads it (tuples as lists).

        Raises:
            ValueError: a leaf is not a `jax.Array`, paths collide, or the metadata is not JSON.
            CheckpointError: the save before this one, or this one, failed (after a failure the
                next call starts afresh); or `step` is not newer than every committed step.
        """
        self.wait()
        arrays, records = leaf_table.to_store(state)
        record = {"format": FORMAT, "leaves": {k: tuple(v) for k, v in records.items()}}
        json_text(metadata, what=f"metadata of step {step}")
        self._refuse_old(step)
        with self._translated("could not be saved", step):
            # Before Orbax is asked: it answers a step it does not want with False, not an error.
            manager, args = self._open()
            stored = args.Composite(
                state=args.StandardSave(arrays),
                metadata=args.JsonSave({**record, "metadata": metadata}),
            )
            with self._settled_if_interrupted(manager):
                self._in_flight = step
                started = manager.save(step, args=stored)
        if not started:
            self._in_flight = None
            raise CheckpointError(
                "Orbax did not start to save it",
                step=step,
                directory=self.directory,
                remedy="remove step directories there that no run of ours wrote",
            )

    def restore(self, step: int, template: Any) -> tuple[Any, dict[str, Any]]:
        """The state saved as `step`, placed as `template` says, and its metadata.

        `template` is the state's tree with `jax.ShapeDtypeStruct` leaves that carry shardings (or
        arrays that do); its containers may differ from those that were saved, its paths may not.
        Each process reads only what its devices hold.

        Raises:
            ValueError: the stored leaves are not those of `template`. All that are missing, extra
                or of another shape or dtype are listed, and nothing is read.
            CheckpointError: there is no such committed step, or it cannot be read.
        """
        self.wait()
        record = read_record(self.directory, step)
        records = {
            name: leaf_table.LeafRecord(tuple(shape), dtype, impl)
            for name, (shape, dtype, impl) in record["leaves"].items()
        }
        wanted = leaf_table.named_leaves(template)
        if problems := leaf_table.mismatches(wanted, records):
            raise ValueError(
                f"checkpoint step {step} in {self.directory} does not fit the state asked for in "
                f"{len(problems)} places:\n  " + "\n  ".join(problems) + "\nresume with the "
                "experiment that saved it, or start a new run with another --run-dir"
            )
        older = max((other for other in self.steps() if other < step), default=None)
        then = "begins again" if older is None else f"goes on from the older step {older}"
        damaged = f"if it is damaged, delete {self.directory / str(step)}: the run {then}"
        with self._translated("could not be restored", step, remedy=damaged):
            manager, args = self._open()
            request = args.StandardRestore(leaf_table.to_request(wanted))
            arrays = manager.restore(step, args=args.Composite(state=request))["state"]
        placed = leaf_table.from_store(wanted, arrays, records)
        return jax.tree.unflatten(jax.tree.structure(template), placed), record["metadata"]

    def shapes(self, step: int) -> dict[str, tuple[int, ...]]:
        """The shape of each leaf saved with `step`, by path; reads one small file."""
        leaves = read_record(self.directory, step)["leaves"]
        return {name: tuple(shape) for name, (shape, _, _) in leaves.items()}

    def metadata(self, step: int) -> dict[str, Any]:
        """The metadata saved with `step`; reads one small file, without Orbax."""
        return read_record(self.directory, step)["metadata"]

    def discard_after(self, step: int) -> list[int]:
        """Delete every checkpoint newer than `step`, and say which they were.

        For a run that goes on from an older step: its history branches there, and the steps that
        are abandoned would stand in the way of saving it (see `save`).
        """
        self.wait()
        abandoned = [other for other in self.steps() if other > step]
        with self._translated("newer steps could not be discarded", step):
            _meet("looked")  # before the first of them goes
            if jax.process_index() == 0 and self.directory.is_dir():
                discard_steps(self.directory, abandoned)
            _meet("discarded")
            if self._orbax is not None:
                self._orbax.reload()
        return abandoned

    def wait(self) -> None:
        """Return when the save in flight is committed.

        Raises:
            CheckpointError: it was not, and why.
        """
        if self._in_flight is None:
            return
        step = self._in_flight
        with self._translated("could not be saved", step):
            self._orbax.wait_until_finished()
        self._in_flight = None
        if step not in self.steps():  # believe the directory only
            raise CheckpointError(
                "the writer ended without an error, but the step is not there",
                step=step,
                directory=self.directory,
                remedy="see whether something else removes files there",
            )

    def close(self) -> None:
        """Wait for the save in flight and release Orbax's threads. May be called again."""
        self.wait()
        if self._orbax is not None:
            orbax, self._orbax = self._orbax, None
            orbax.close()

    def _open(self) -> tuple[Any, Any]:
        """Orbax's manager and its argument types, made at first use."""
        # Imported here: it costs more than a second, which a fresh run need not wait for.
        import orbax.checkpoint as ocp

        if self._orbax is None:
            options = ocp.CheckpointManagerOptions(
                preservation_policy=ocp.checkpoint_managers.LatestN(self.policy.keep),
                cleanup_tmp_directories=True,  # what a killed run left half written
            )
            self._orbax = ocp.CheckpointManager(self.directory, options=options)
        return self._orbax, ocp.args

    def _refuse_old(self, step: int) -> None:
        last = self.latest()
        if last is not None and step <= last:
            raise CheckpointError(
                f"a save is newer than all others, and step {last} is committed",
                step=step,
                directory=self.directory,
                remedy=f"resume from step {last}, or call discard_after({step - 1}) first",
            )

    @contextmanager
    def _settled_if_interrupted(self, manager: Any) -> Iterator[None]:
        """An interrupt leaves no save half handed over: what Orbax began has ended when it goes on,
        the step is committed or it is not, and may be saved again."""
        try:
            yield
        except Exception:
            raise
        except BaseException:
            self._orbax, self._in_flight = None, None
            with suppress(Exception):  # the directory tells what came of it
                manager.close()
            raise

    @contextmanager
    def _translated(self, problem: str, step: int, *, remedy: str = MEND) -> Iterator[None]:
        """Raise whatever storage raises as a CheckpointError that keeps it as the cause."""
        try:
            yield
        except Exception as error:
            # Its idea of which steps exist may be wrong now; the next call makes one that looks.
            self._orbax, self._in_flight = None, None
            raise CheckpointError(
                f"{problem}: {describe(error)}", step=step, directory=self.directory, remedy=remedy
            ) from error


def _meet(name: str) -> None:
    """Wait until every process is here."""
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(f"jaxtrain.checkpoint.{name}")
