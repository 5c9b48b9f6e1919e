"""The checkpoints of a run in both tiers: saved to each by its policy, restored from what is whole
across them."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable
from functools import cached_property
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
    check_writable,
    describe,
    whole_manifest,
)
from jaxtrain.cluster.agreement import all_gather_text, share_oserror
from jaxtrain.files.folder import plain_name
from jaxtrain.files.json_text import parse_json
from jaxtrain.files.regular import read_text, write_text
from jaxtrain.state_format import leaves as leaf_table
from jaxtrain.state_format.chunks import Chunk
from jaxtrain.state_format.hashing import LacksPackage
from jaxtrain.state_format.manifest import Foreign, Manifest, refuse_other_step
from jaxtrain.state_format.parts import owned_parts
from jaxtrain.state_format.reader import Read, read_from
from jaxtrain.state_format.slots import AS_THEY_REST, AllSlots

RUN = ".run"
"""A file in the run directory, beside that of the steps, which may be lost: which directory of a
local tier is this run's."""


class Checkpoints:
    """What a run saves to and restores from: the durable tier, and a local one if the policy has
    it. All processes make the same calls in the same order. Raises as `CheckpointManager` does."""

    def __init__(
        self,
        directory: Path,
        policy: SavePolicy,
        *,
        mtbf_s: float | None = None,
        foreign: Foreign = lambda metadata: [],
    ) -> None:
        self.durable = CheckpointManager(directory, policy, mtbf_s=mtbf_s)
        self.durable.foreign = foreign
        self.policy, self.directory = policy, self.durable.directory
        self.blocked_s = 0.0
        """How long the last `save` kept its caller, after it had waited for the save before."""
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

    def newest_whole(self) -> int | None:
        """The newest step that is whole in one of the tiers."""
        return self.durable.newest_whole(self._found)

    def from_local(self, step: int) -> bool:
        """Whether the local tier has all of that step."""
        return step in self._found

    def manifest(self, step: int) -> Manifest:
        """What is in `step`."""
        found = self._found.get(step)
        return self.durable.manifest(step) if found is None else found.manifest

    def restore(
        self, step: int, template: PyTree, slots: AllSlots = AS_THEY_REST
    ) -> tuple[PyTree, dict[str, Any]]:
        """As `CheckpointManager.restore`; a chunk that is damaged in one tier is read from the
        other."""
        found = self._found.get(step)
        if found is None:
            return self.durable.restore(step, template, slots)
        assert self._steps is not None
        read = self._steps.read(found, self._durable_read(step))
        return self.durable.restore_from(found.manifest, step, template, slots, read)

    def begin_after(self, step: int | None) -> dict[int, Path]:
        """Leave what is newer than `step` behind: damaged steps are set aside (to where is said),
        local ones removed. Of a step that came from the local tier the durable copy, if there is
        one, is verified: it may be why the local one was needed next."""
        if self._steps is not None:
            self._steps.drop_after(step or 0)
        if step is not None and self.from_local(step) and step in self.durable.steps():
            self.durable.verify_step(step)
        return self.durable.set_damaged_aside()

    def go_back_to(self, step: int) -> None:
        """Remove what is newer than `step` from both tiers; steps found damaged are set aside. The
        next save is an interval away. Raises CheckpointError."""
        self.wait()
        self.begin_after(step)
        for newer in [found for found in self._found if found > step]:
            del self._found[newer]
        self.durable.discard_after(step)
        self.put_off(step)

    def should_save(self, step: int) -> str | None:
        """ "durable" or "local" after these steps, or None; asked after every step."""
        local = self._clock is not None and self._clock.due(step)
        if self.durable.should_save(step):
            return "durable"
        return "local" if local else None

    def agrees(self, step: int) -> bool:
        """Whether `should_save(step)` is a collective of its own: nothing else may run then."""
        clocks = [self.durable.clock, *([self._clock] if self._clock else [])]
        return any(clock.agrees(step) for clock in clocks)

    def check_space(self, template: PyTree) -> None:
        """As `CheckpointManager.check_space`, and for the local tier; makes the directories."""
        self.durable.check_space(template)
        if self._tier is not None:
            processes = jax.process_count()
            share = leaf_table.stored_bytes(template) // processes * min(2, processes)
            root = Path(self._tier.directory.format(process=jax.process_index()))
            there = (p.stat().st_size for p in (root / (self._run() or "-")).rglob("*.pack"))
            missing = max(0, (FINISHED + 1) * share - sum(there))
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
        """As `CheckpointManager.save`; to the local tier too, and if not `durable` to that only.
        With both, each has its own copy of the state, and half of `spare_bytes` for it."""
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
        """A save after `step` could not begin: `should_save` asks for it an interval later."""
        if self._clock is not None:
            self._clock.saved(step)
        if durable:
            self.durable.clock.saved(step)

    def poll(self) -> None:
        """Ask, after a step, what became of the saves in flight; returns at once."""
        self._settle(LocalSteps.poll)
        self.durable.poll()

    def wait(self) -> None:
        """Return when the saves in flight are there."""
        self._settle(LocalSteps.wait)
        self.durable.wait()

    def close(self) -> None:
        """Wait for the saves in flight and release threads and connections."""
        self._settle(LocalSteps.close)
        self._steps = None
        self.durable.close()

    def take_troubles(self) -> list[str]:
        """What went wrong in the local tier since it was asked last. It ends nothing, and keeps
        nothing from the durable tier."""
        found, self._troubles = self._troubles, []
        if self._steps is not None:
            problems, self._steps.problems = self._steps.problems, []
            found += [f"local tier: {problem}; it is passed over" for problem in problems]
        return found

    def _settle(self, act: Callable[[LocalSteps], None]) -> None:
        steps = self._steps
        if steps is not None:
            self._locally(lambda: act(steps), steps.step)
            if self._clock is not None:
                self._clock.save_s = steps.took_s

    @cached_property
    def _found(self) -> dict[int, LocalStep]:
        """The steps the local tier had at the start of this run."""
        if self._tier is None or not all_gather_text(self._run())[0]:
            return {}
        found: dict[int, LocalStep] = {}

        def look() -> None:
            for step, whole in self._open().whole_steps().items():
                if why := self.durable.foreign(whole.manifest.metadata):
                    self._troubles.append(f"local tier: step {step}: {why[0]}; it is passed over")
                else:
                    found[step] = whole

        self._locally(look, 0)
        return found

    def _open(self) -> LocalSteps:
        if self._steps is None:
            assert self._tier is not None
            run = share_oserror(self._known_run)
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
        write_text(home / RUN, json.dumps({"run": run, "inode": home.stat().st_ino}))

    def name_again(self) -> None:
        """Of a run directory that was removed and is there again: the local directory is still its
        own. Raises OSError."""
        if self._steps is not None:
            self._name(self._steps.root.name)

    def _run(self) -> str:
        """What the local directory of this run is called. A copy of the run has another."""
        try:
            home = self.directory.parent
            known = parse_json(read_text(home / RUN))
            mine, run = known["inode"] == home.stat().st_ino, str(known["run"])
        except (OSError, ValueError, KeyError, TypeError):
            return ""
        return run if mine and plain_name(run) else ""

    def _durable_read(self, step: int) -> Read | None:
        """Reads the durable tier's copy of a chunk of the local one."""
        try:
            manifest = whole_manifest(self.directory, step)
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
        except LacksPackage:  # what is there can be read elsewhere
            raise
        except Exception as error:  # whatever it is: the durable tier goes on without this one
            assert self._tier is not None
            place = self._tier.directory
            self._troubles.append(f"local tier {place}, step {step}: {describe(error)}")
