"""A machine may lack packages that only parts of jaxtrain need: it trains, and goes on."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import jaxtrain
from jaxtrain import cli
from jaxtrain.inspection.verify import verify
from jaxtrain.session.notes import notes
from jaxtrain.state_format import hashing
from jaxtrain.state_format.hashing import LacksPackage
from jaxtrain.step.assembly import assemble

ROOT = Path(__file__).parents[2]

LACKING = ("xxhash", "tensorboardX", "pyarrow", "tokenizers")
PROGRAM = f"""
import sys
sys.modules.update(dict.fromkeys({LACKING}))  # an import of None fails as one of nothing does
import jaxtrain
from jaxtrain.data import BigramChain
block = jaxtrain.BlockConfig(
    jaxtrain.AttentionConfig(heads=2, head_dim=4), jaxtrain.MlpConfig(hidden=16)
)
experiment = jaxtrain.Experiment(
    model=jaxtrain.DecoderConfig(16, 8, 1, (block,), vocab_multiple=16),
    data=BigramChain(vocab=16, seq=8),
    optimizer=jaxtrain.SGD(0.5),
    steps=3,
    batch=8,
    checkpoints=jaxtrain.SavePolicy(every=1),
    logging=jaxtrain.Logging(every=1),
)
mesh = jaxtrain.mesh_from_axes(data=1)
for steps in (2, 3):
    jaxtrain.train(experiment, mesh, run_dir=sys.argv[1], steps=steps)
for path in {LACKING}:
    assert sys.modules[path] is None
from jaxtrain import cli
assert cli.main(["verify", sys.argv[1]]) == 0
"""


def test_it_trains_and_resumes_without_them(tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(run)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    lines = (run / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]
    assert not (run / "events").exists()


def test_a_check_says_what_is_done_without(
    own: jaxtrain.Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = replace(own, checkpoints=jaxtrain.SavePolicy(), logging=jaxtrain.Logging())
    mesh = jaxtrain.mesh_from_axes(data=1)
    assert not notes(assemble(saved, mesh))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("jaxtrain.session.notes.XXH3", None)
    found = notes(assemble(saved, mesh))
    assert [note.split(" is not installed")[0] for note in found] == [
        "logging: tensorboardX",
        "checkpoints: xxhash",
    ]
    assert not notes(assemble(own, mesh)), "neither is asked for"


def test_what_needs_xxhash_is_refused_and_not_taken_for_damaged(
    own: jaxtrain.Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passed over, its steps would be set aside and the run begin again."""
    run, mesh = tmp_path / "run", jaxtrain.mesh_from_axes(data=1)
    own = replace(own, checkpoints=jaxtrain.SavePolicy(every=1))
    jaxtrain.train(own, mesh, run_dir=run, cache_dir=tmp_path, steps=2)
    there = sorted(path.name for path in (run / "checkpoints").iterdir())
    monkeypatch.setattr(hashing, "XXH3", None)
    with pytest.raises(LacksPackage, match="pip install xxhash"):
        jaxtrain.train(own, mesh, run_dir=run, cache_dir=tmp_path, steps=3)
    with pytest.raises(LacksPackage, match="pip install xxhash"):
        verify(run)
    assert cli.main(["verify", str(run)]) == 2
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == there
    monkeypatch.undo()
    assert all(not verdict.damages for verdict in verify(run))
