"""`bench checkpoint`: what it measures is what it says, and it leaves nothing behind."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from jaxtrain import cli
from jaxtrain.bench import checkpoint as bench


@pytest.mark.exhaustive
def test_all_ways_are_measured_and_nothing_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "ROUNDS", 2)
    given = ["bench", "checkpoint", "--sizes", "1MiB,2MiB", "--dir", str(tmp_path), "--json"]
    assert cli.main(given) == 0
    found = json.loads(capsys.readouterr().out)
    rows = found["checkpoints"]
    assert [(r["bytes"], r["way"]) for r in rows] == [
        (size, way) for size in (1 << 20, 2 << 20) for way in ("jaxtrain", "orbax", "numpy")
    ]
    for row in rows:
        assert 0 < row["blocked_s"] <= row["save_s"] + row["next_step_s"]
        assert row["save_bytes_per_s"] == pytest.approx(row["bytes"] / row["save_s"])
        assert row["restore_bytes_per_s"] == pytest.approx(row["bytes"] / row["restore_s"])
    for cost in found["digests"]:
        assert cost["write_share"] == pytest.approx(1 - cost["write_without_s"] / cost["write_s"])
        assert cost["bytes"] <= max(r["bytes"] for r in rows)
    assert not list(tmp_path.iterdir())


def test_too_little_room_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = shutil.disk_usage(tmp_path)._replace(free=10**6)
    monkeypatch.setattr(bench.shutil, "disk_usage", lambda _: full)
    with pytest.raises(ValueError, match=r"writes up to 8,000,000 .*smaller --sizes"):
        bench.bench_checkpoint((10**6,), directory=tmp_path)
    assert not list(tmp_path.iterdir())
