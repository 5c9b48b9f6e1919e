"""A step directory that was renamed, swapped or pasted over: a start passes over it and says so,
and whatever else reads a run's steps refuses it."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from other_steps import DAMAGES

import jaxtrain
from jaxtrain import FineTuning, FromRun, cli
from jaxtrain.checkpoint import DamagedCheckpoint, SavePolicy


def run(
    folder: Path, experiment: jaxtrain.Experiment, steps: int, name: str = "run"
) -> tuple[jaxtrain.Result, str]:
    """A start of the run, and what it told."""
    stream = io.StringIO()
    result = jaxtrain.train(
        replace(experiment, steps=14, checkpoints=SavePolicy(every=2, keep=9)),
        jaxtrain.mesh_from_axes(data=1),
        run_dir=folder / name,
        cache_dir=folder / "cache",
        steps=steps,
        stream=stream,
    )
    return result, stream.getvalue()


def test_a_run_goes_on_from_the_newest_step_that_is_its_own(
    own: jaxtrain.Experiment, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Losses and state of the run that was never touched, to the bit; `verify` names the others."""
    whole, _ = run(tmp_path, own, 14, "whole")
    run(tmp_path, own, 8, "saved")
    for damage, named, good in DAMAGES:
        steps = shutil.copytree(tmp_path / "saved", tmp_path / damage.__name__) / "checkpoints"
        damage(steps)
        assert cli.main(["verify", str(steps.parent)]) == 1
        said = capsys.readouterr().out
        assert [step for step in range(20) if f"step {step}: DAMAGED" in said] == named
        found, told = run(tmp_path, own, 14, damage.__name__)
        for step in named:
            assert f"DAMAGED checkpoint step {step} " in told
            assert f"the directory is named {step}, but its manifest says step" in told
            assert (steps / f"{step}.damaged").is_dir()
        assert f"going on from step {good}" in told
        losses = [row["loss"] for row in whole.history[good:]]
        assert [row["loss"] for row in found.history] == losses, damage.__name__
        assert found.session is not None and whole.session is not None
        a, b = (jax.tree.leaves(each.session.state) for each in (found, whole))
        assert all(
            np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in zip(a, b, strict=True)
        )
        assert cli.main(["verify", str(steps.parent)]) == 0
        capsys.readouterr()


def test_whatever_reads_a_step_of_a_run_refuses_another_steps_files(
    decoder: jaxtrain.Experiment, tmp_path: Path
) -> None:
    run(tmp_path, decoder, 2)
    steps = tmp_path / "run" / "checkpoints"
    (steps / "2").rename(steps / "4")
    tuned = replace(decoder, fine_tuning=FineTuning(FromRun(tmp_path / "run")))
    readers: list[Callable[[], Any]] = [
        lambda: jaxtrain.export(tmp_path / "run", tmp_path / "out"),
        lambda: jaxtrain.generate_text(tmp_path / "run", "a"),
        lambda: run(tmp_path, tuned, 2, "tuned"),
        lambda: run(tmp_path, decoder, 6),
    ]
    for read in readers:
        with pytest.raises(DamagedCheckpoint, match="the directory is named 4, but its manifest"):
            read()
    assert not (tmp_path / "out").exists()
