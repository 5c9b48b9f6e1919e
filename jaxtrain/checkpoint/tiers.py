"""Checkpoints of a run in both tiers: saved to each by its policy, restored from the newest
complete step."""

from __future__ import annotations

import errno
import json
import secrets
import time
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from jaxtrain.checkpoint.local_tier import FINISHED, LocalStep, LocalSteps
from jaxtrain.checkpoint.manager import CheckpointManager
from jaxtrain.checkpoint.policy import SaveClock, SavePolicy
from jaxtrain.checkpoint.storage import (
    CheckpointError,
    DamagedCheckpoint,
    FailedStorage,
    check_writable,
    describe,
    whole_manifest,
)
from jaxtrain.cluster.agreement import all_gather_text, from_first, share_failure
from jaxtrain.files.folder import plain_name
from jaxtrain.files.json_text import parse_json
from jaxtrain.files.store import AnyPath, identity_of, is_local, put, read_named
from jaxtrain.state_format import leaves as leaf_table
from jaxtrain.state_format.chunks import Chunk
from jaxtrain.state_format.hashing import LacksPackage
from jaxtrain.state_format.manifest import Foreign, Manifest, refuse_other_step
from jaxtrain.state_format.parts import owned_parts
from jaxtrain.state_format.reader import ReadChunk, read_from
from jaxtrain.state_format.slots import AS_THEY_REST, AllSlots

RUN = ".run"
"""A file in the run directory with the name of this run's directory in a local tier. It may be
lost."""


class Checkpoints:
    """The durable tier of a run, and a local one if the policy has it. All processes make the same
    calls in the same order. Raises as `CheckpointManager` does."""

    def __init__(
        self,
        directory: str | AnyPath,
        policy: SavePolicy,
        *,
        mtbf_s: float | None = None,
        foreign: Foreign = lambda metadata: [],
        run: Path | None = None,
    ) -> None:
        self.run = run
        """The run's directory on this machine, if it has one."""
        self.durable = CheckpointManager(directory, policy, mtbf_s=mtbf_s)
        self.durable.foreign = foreign
        self.policy, self.directory = policy, self.durable.directory
        self.blocked_s = 0.0
        """Seconds that the last `save` took, without waiting for the previous save."""
        self.copy_failure = ""
        """Why the last `save` could not copy the state on its devices, as `OwnedParts` has it."""
        self._tier = policy.local
        self._clock = SaveClock(self._tier.every, mtbf_s) if self._tier else None
        self._steps: LocalSteps | None = None
        self._troubles: list[str] = []

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def damaged(self) -> dict[int, DamagedCheckpoint]:
        """Steps that were found damaged and passed over."""
        return self.durable.damaged

    def latest(self) -> int | None:
        """The newest step committed in the durable tier."""
        return self.durable.latest()

    def is_saved(self, step: int) -> bool:
        """Returns True if a tier has the step, as `CheckpointManager.is_saved`."""
        return self.durable.is_saved(step)

    def newest_whole(self) -> int | None:
        """Returns the newest step that is complete in one of the tiers."""
        return self.durable.newest_whole(self._local_steps)

    def from_local(self, step: int) -> bool:
        """True if the local tier has all of that step."""
        return step in self._local_steps

    def manifest(self, step: int) -> Manifest:
        """Returns the manifest of `step`."""
        local = self._local_steps.get(step)
        return self.durable.manifest(step) if local is None else local.manifest

    def restore(
        self, step: int, template: PyTree, slots: AllSlots = AS_THEY_REST
    ) -> tuple[PyTree, dict[str, Any]]:
        """Does `CheckpointManager.restore`, and reads a chunk that is damaged in one tier from the
        other."""
        local = self._local_steps.get(step)
        if local is None:
            return self.durable.restore(step, template, slots)
        assert self._steps is not None
        read = self._steps.read(local, self._durable_read(step))
        return self.durable.restore_from(local.manifest, step, template, slots, read)

    def begin_after(self, step: int | None) -> dict[int, AnyPath]:
        """Sets damaged steps aside, removes local steps newer than `step`, and returns the new
        paths of the damaged ones. If `step` came from the local tier, verifies its durable copy
        too, if there is one."""
        if self._steps is not None:
            self._steps.drop_after(step or 0)
        if step is not None and self.from_local(step) and step in self.durable.agreed_steps():
            self.durable.verify_step(step)
        return self.durable.set_damaged_aside()

    def go_back_to(self, step: int) -> None:
        """Removes the steps newer than `step` from both tiers; damaged steps are set aside. The
        next save is an interval away. Raises CheckpointError."""
        self.wait()
        self.begin_after(step)
        for newer in [saved for saved in self._local_steps if saved > step]:
            del self._local_steps[newer]
        self.durable.discard_after(step)
        self.put_off(step)

    def should_save(self, step: int) -> str | None:
        """Returns "durable" or "local" if that tier saves after these steps, else None. Called
        after every step."""
        local = self._clock is not None and self._clock.due(step)
        if self.durable.should_save(step):
            return "durable"
        return "local" if local else None

    def agrees(self, step: int) -> bool:
        """True if `should_save(step)` runs a collective: nothing else may run then."""
        clocks = [self.durable.clock, *([self._clock] if self._clock else [])]
        return any(clock.agrees(step) for clock in clocks)

    def check_space(self, template: PyTree) -> None:
        """Does `CheckpointManager.check_space`, and the same for the local tier; makes the
        directories."""
        self.durable.check_space(template)
        if self._tier is not None:
            processes = jax.process_count()
            share = leaf_table.stored_bytes(template) // processes * min(2, processes)
            root = Path(self._tier.directory.format(process=jax.process_index()))
            sizes = (p.stat().st_size for p in (root / (self._run() or "-")).rglob("*.pack"))
            missing = max(0, (FINISHED + 1) * share - sum(sizes))
            check_writable(root, missing, instead="another LocalTier(directory=...)")

    def save(
        self,
        step: int,
        state: PyTree,
        metadata: dict[str, Any],
        slots: AllSlots = AS_THEY_REST,
        *,
        durable: bool = True,
        spare_bytes: int = 0,
    ) -> None:
        """Saves to the local tier, and if `durable` also to the durable one, as
        `CheckpointManager.save`. With both, each has its own copy of the state, and half of
        `spare_bytes` for it."""
        blocked, self.copy_failure = 0.0, ""
        if self._clock is not None and durable:
            spare_bytes //= 2
        if self._clock is not None:
            self._locally(lambda: self._open().wait(), step)
            began = time.perf_counter()
            records = leaf_table.records_of(state, slots)
            refuse_other_step(step, metadata, leaf_table.named_leaves(state))

            def begin() -> None:
                parts = owned_parts(leaf_table.arrays_of(state), slots, spare_bytes)
                self.copy_failure = parts.copy_failure
                self._open().save(step, parts, records, metadata)

            self._locally(begin, step)
            self._clock.saved(step)
            blocked = time.perf_counter() - began
        if durable:
            spare_bytes = 0 if self.copy_failure else spare_bytes
            self.durable.save(step, state, metadata, slots, spare_bytes=spare_bytes)
            blocked += self.durable.blocked_s
            self.copy_failure = self.copy_failure or self.durable.copy_failure
        self.blocked_s = blocked

    def put_off(self, step: int, *, durable: bool = True) -> None:
        """Delays the next save by an interval, since a save after `step` could not begin."""
        if self._clock is not None:
            self._clock.saved(step)
        if durable:
            self.durable.clock.saved(step)

    def poll(self) -> None:
        """Checks, after a step, whether the saves in flight have failed; returns at once."""
        self._settle(LocalSteps.poll)
        self.durable.poll()

    def wait(self) -> None:
        """Returns when the saves in flight are complete."""
        self._settle(LocalSteps.wait)
        self.durable.wait()

    def close(self) -> None:
        """Waits for the saves in flight, and releases threads and connections."""
        self._settle(LocalSteps.close)
        self._steps = None
        self.durable.close()

    def take_troubles(self) -> list[str]:
        """Returns the problems of the local tier since the last call. They end nothing, and do not
        affect the durable tier."""
        troubles, self._troubles = self._troubles, []
        if self._steps is not None:
            problems, self._steps.problems = self._steps.problems, []
            troubles += [f"local tier: {problem}; it is passed over" for problem in problems]
        return troubles

    def _settle(self, act: Callable[[LocalSteps], None]) -> None:
        steps = self._steps
        if steps is not None:
            self._locally(lambda: act(steps), steps.step)
            if self._clock is not None:
                self._clock.save_s = steps.took_s

    @cached_property
    def _local_steps(self) -> dict[int, LocalStep]:
        """The steps the local tier had at the start of this run."""
        if self._tier is None or not from_first(self._run):
            return {}
        steps: dict[int, LocalStep] = {}

        def look() -> None:
            for step, local in self._open().whole_steps().items():
                if reasons := self.durable.foreign(local.manifest.metadata):
                    self._troubles.append(
                        f"local tier: step {step}: {reasons[0]}; it is passed over"
                    )
                else:
                    steps[step] = local

        self._locally(look, 0)
        return steps

    def _open(self) -> LocalSteps:
        if self._steps is None:
            assert self._tier is not None
            run = share_failure(self._known_run)
            self._steps = LocalSteps(self._tier, all_gather_text(run)[0])
        return self._steps

    def _known_run(self) -> str:
        run = self._run()
        if not run and jax.process_index() == 0:
            run = secrets.token_hex(8)
            self._name(run)
        return run

    def _name(self, run: str) -> None:
        home = self.directory.parent
        home.mkdir(parents=True, exist_ok=True)
        put(home / RUN, json.dumps({"run": run, "inode": identity_of(home)}).encode())

    def name_again(self) -> None:
        """Writes the name of the local directory again after the run directory was removed and
        restored. Raises OSError."""
        if self._steps is not None:
            self._name(self._steps.root.name)

    def _run(self) -> str:
        """Returns the name of this run's local directory, "" if unknown. A copy of the run has
        another. Raises OSError for a store that does not answer."""
        home = self.directory.parent
        try:
            stored = parse_json(read_named(home, RUN))
            is_same, run = stored["inode"] == identity_of(home), str(stored["run"])
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return ""
        except OSError:
            if not is_local(home):
                raise  # nobody can say that there is no local tier
            return ""
        return run if is_same and plain_name(run) else ""

    def _durable_read(self, step: int) -> ReadChunk | None:
        """Returns a reader of the durable tier's copies of local chunks."""
        try:
            manifest = whole_manifest(self.directory, step)
        except FailedStorage as error:
            return partial(_unanswered, error.problem)
        except CheckpointError:
            return None
        chunks, durable = manifest.earlier().chunks, read_from(manifest.directory)

        def read(chunk: Chunk, dtype: np.dtype) -> np.ndarray:
            other = chunks.get((chunk.leaf, chunk.box))
            if other is None or other.digest != chunk.digest:
                raise ValueError("the durable tier has no such chunk")
            return durable(other, dtype)

        return read

    def _locally(self, act: Callable[[], None], step: int) -> None:
        try:
            act()
        except LacksPackage:  # where the package exists it can be read
            raise
        except Exception as error:  # of any type: the durable tier goes on without this one
            assert self._tier is not None
            place = self._tier.directory
            self._troubles.append(f"local tier {place}, step {step}: {describe(error)}")


def _unanswered(problem: str, chunk: Chunk, dtype: np.dtype) -> np.ndarray:
    """Raises OSError: a chunk that a store cannot give now is not damaged."""
    raise OSError(errno.EIO, problem)
