"""A step is the one its directory is named after, or it is damaged: its number is in the manifest,
in the metadata and in the state too, and they are held against each other."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import other_steps
import pytest

from jaxtrain.checkpoint import CheckpointManager, DamagedCheckpoint, LocalTier, SavePolicy
from jaxtrain.checkpoint.tiers import Checkpoints
from jaxtrain.inspection.verify import verify
from jaxtrain.state_format.manifest import HEAD, text_digest

STEPS = (2, 4, 6, 8)


def state(step: int) -> dict[str, Any]:
    return {"w": jnp.arange(16.0) + step, "step": jnp.int32(step)}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("saved") / "run"
    with CheckpointManager(run / "checkpoints", SavePolicy(keep=9)) as manager:
        for step in STEPS:
            manager.save(step, state(step), {"step": step})
    return run


def edited(run: Path, step: int, change: Callable[[dict[str, Any]], Any]) -> None:
    """Its manifest changed by hand, and given the digest of what it says now."""
    path = run / "checkpoints" / str(step) / "state" / "manifest.json"
    body = json.loads(path.read_text().partition("\n")[2])
    change(body)
    text = json.dumps(body)
    path.write_text(f"{HEAD} {text_digest(text.encode())}\n{text}")


def renamed_beyond_int32(steps: Path) -> None:
    (steps / "8").rename(steps / "4000000000")


DAMAGES = [*other_steps.DAMAGES, (renamed_beyond_int32, [4_000_000_000], 6)]


def uncounted(body: dict[str, Any]) -> None:
    """A state that does not count its steps."""
    del body["leaves"]["step"], body["chunks"]["step"]


LEFT: dict[str, Callable[[dict[str, Any]], Any]] = {
    "all": lambda body: None,
    "as an older version wrote it": lambda body: body.pop("step"),
    "the metadata alone": lambda body: (body.pop("step"), uncounted(body)),
    "the state alone": lambda body: (body.pop("step"), body["metadata"].pop("step")),
    "the manifest alone": lambda body: (body["metadata"].pop("step"), uncounted(body)),
}
"""Which of the numbers are there: any one of them is enough."""


@pytest.mark.parametrize("left", LEFT)
@pytest.mark.parametrize(("damage", "named", "good"), DAMAGES)
def test_another_steps_files_are_never_restored(
    saved: Path, tmp_path: Path, damage: Any, named: list[int], good: int, left: str
) -> None:
    run = shutil.copytree(saved, tmp_path / "run")
    for step in STEPS:
        edited(run, step, LEFT[left])
    assert not any(found.damages for found in verify(run)), "as it was: whole"
    damage(run / "checkpoints")
    verdicts = {found.step: found.damages for found in verify(run)}
    assert [step for step, damages in verdicts.items() if damages] == named
    for step in named:
        assert verdicts[step][0].startswith(f"the directory is named {step}, but its ")
    template = state(0) if left in ("all", "the state alone") or "older" in left else None
    with CheckpointManager(run / "checkpoints", SavePolicy()) as manager:
        assert manager.newest_whole() == good
        assert sorted(manager.damaged) == [step for step in named if step > good]
        with pytest.raises(DamagedCheckpoint, match=f"the directory is named {named[0]}, but"):
            manager.restore(named[0], state(0))
        found, _ = manager.restore(good, template or {"w": state(0)["w"]})
        np.testing.assert_array_equal(found["w"], state(good)["w"])


@pytest.mark.parametrize("kept", ["manifest", "metadata", "state"])
def test_no_number_is_changed_alone(saved: Path, tmp_path: Path, kept: str) -> None:
    """Step 2 in place of 8, two of its three numbers made 8."""
    run = shutil.copytree(saved, tmp_path / "run")
    other_steps.pasted(run / "checkpoints")

    def change(body: dict[str, Any]) -> None:
        if kept != "manifest":
            body["step"] = 8
        if kept != "metadata":
            body["metadata"]["step"] = 8
        if kept != "state":  # as the chunk of the true step 8 says
            body["chunks"]["step"][0][2] = theirs

    manifest = saved / "checkpoints" / "8" / "state" / "manifest.json"
    theirs = json.loads(manifest.read_text().partition("\n")[2])["chunks"]["step"][0][2]
    edited(run, 8, change)
    (damaged,) = [found for found in verify(run) if found.damages]
    words = {"manifest": "its manifest", "metadata": "its metadata", "state": "its state's count"}
    assert damaged.step == 8 and words[kept] in damaged.damages[0]
    assert not any(word in damaged.damages[0] for at, word in words.items() if at != kept)


def test_a_run_without_a_whole_step_says_what_is_aside(saved: Path, tmp_path: Path) -> None:
    run = shutil.copytree(saved, tmp_path / "run")
    for step in STEPS:
        (run / "checkpoints" / str(step)).rename(run / "checkpoints" / f"{step}.damaged")
    names = ", ".join(sorted(f"{step}.damaged" for step in STEPS))
    says = rf"no committed checkpoint but what starts passed over as damaged \({names}\); give"
    with pytest.raises(ValueError, match=says):
        verify(run)
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").mkdir()
    with pytest.raises(ValueError, match="no committed checkpoint; give the run directory"):
        verify(run)


def test_what_would_be_taken_for_damaged_is_not_saved(tmp_path: Path) -> None:
    local = LocalTier(every=1, directory=str(tmp_path / "memory"))
    with Checkpoints(tmp_path / "run" / "checkpoints", SavePolicy(local=local)) as tiers:
        for durable in (True, False):
            with pytest.raises(ValueError, match="leaf 'step' is 3, saved as step 4"):
                tiers.save(4, state(3), {}, durable=durable)
            with pytest.raises(ValueError, match=r"metadata\['step'\] is 3, saved as step 4"):
                tiers.save(4, state(4), {"step": 3}, durable=durable)
        # What cannot count steps may be called so.
        tiers.save(4, {"step": jnp.float32(0.5), "w": jnp.ones(3)}, {})
        tiers.save(5, {"step": jnp.arange(3), "w": jnp.ones(3)}, {})
        tiers.wait()
        assert tiers.durable.steps() == [4, 5] and tiers.newest_whole() == 5


@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize("how", ["renamed", "copied over the newest", "another process's"])
def test_a_local_tier_restores_no_other_step(tmp_path: Path, how: str, older: bool) -> None:
    local = LocalTier(every=1, directory=str(tmp_path / "memory"))

    def opened() -> Checkpoints:
        return Checkpoints(tmp_path / "run" / "checkpoints", SavePolicy(every=2, local=local))

    with opened() as tiers:
        for step in (2, 3, 4):
            tiers.save(step, state(step), {"step": step}, durable=step == 2)
    (home,) = (tmp_path / "memory").glob("*/0")
    if older:  # a record did not say which it is, but for the names of its chunks' packs
        for path in home.glob("*/*.json"):
            body = json.loads(path.read_text().partition("\n")[2])
            del body["held"]
            text = json.dumps(body)
            path.write_text(f"{text_digest(text.encode())}\n{text}")
    if how == "renamed":
        (home / "3").rename(home / "9")
    elif how == "copied over the newest":
        shutil.rmtree(home / "4")
        shutil.copytree(home / "3", home / "4")
    else:
        for path in list((home / "4").iterdir()):
            path.rename(path.with_name("1" + path.name[1:]))
    good = {"renamed": 4, "copied over the newest": 3, "another process's": 3}[how]
    with opened() as tiers:
        assert tiers.newest_whole() == good
        (told,) = tiers.take_troubles()
        assert "was written, and renamed; it is passed over" in told
        found, _ = tiers.restore(good, jax.tree.map(lambda x: x, state(0)))
        np.testing.assert_array_equal(found["w"], state(good)["w"])
