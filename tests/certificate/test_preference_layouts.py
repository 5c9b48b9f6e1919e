"""A loss of pairs on meshes: the certificate."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import jaxtrain
from jaxtrain.certificate import certify
from jaxtrain.certificate.layouts import Layout, experiment_on
from jaxtrain.certificate.shrink import shrink
from jaxtrain.experiment import load_experiment

EXPERIMENT = Path(__file__).parents[2] / "experiments" / "stdlib_lm.py"
LAYOUTS = [
    Layout((("context", 4), ("tensor", 2)), loop="scanned, remat dots_and_attention"),
    Layout((("data", 2), ("fsdp", 2), ("tensor", 2)), "gspmd", precision="bf16"),
    Layout((("data", 2), ("context", 4)), "gspmd", loop="scanned, prefetch, remat full"),
    Layout(
        (("fsdp", 2), ("stage", 2), ("context", 2)),
        pipeline="zero bubble",
        microbatches=4,
        periods=3,
    ),
    Layout((("tensor", 8),), "explicit, ring", "zero2", dropout=0.1, optimizer="SGD, averages"),
]


def experiment() -> jaxtrain.Experiment:
    pairs = jaxtrain.FineTuning(preferences=jaxtrain.losses.DPO())
    return replace(load_experiment(EXPERIMENT), fine_tuning=pairs)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_layouts_equal_one_device(
    layout: Layout, monkeypatch: pytest.MonkeyPatch, remembered: None
) -> None:
    monkeypatch.setattr(certify, "layouts", lambda devices, which, **_: ([layout], 1))
    ((difference, _),) = certify.certify(experiment())
    assert difference.passed, str(difference)


def test_layouts_differ_in_what_pairs_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers are apart in all of them, and rows have what a loss of pairs reads."""
    seen: list[Layout] = []

    def refuse(experiment: object, layout: Layout, *_: object) -> None:
        seen.append(layout)
        raise ValueError("not to be run")

    monkeypatch.setattr(certify, "program", refuse)
    asked = [Layout((("data", 2),), packing=packing) for packing in (True, False)]
    monkeypatch.setattr(certify, "layouts", lambda *_, **__: (asked, 2))
    with pytest.raises(ValueError, match="not to be run"):
        list(certify.certify(experiment()))
    assert seen and all(layout.packing for layout in seen)


def test_pairs_are_made_of_documents(tmp_path: Path) -> None:
    small = experiment_on(shrink(experiment(), devices=8), LAYOUTS[0])
    dataset = small.data.open("train", seed=0, cache_dir=tmp_path)
    rows = dataset.rows(np.arange(64))
    assert {*rows["segments"].max(axis=1) % 2} == {0}, "pairs"
    rejected = rows["segments"] % 2 == 0
    assert set(np.unique(rows["weights"][rejected])) == {0.0, 0.25}
    assert set(np.unique(rows["weights"][~rejected])) == {0.0, 1.0}
    expected = np.log(dataset.vocab) + np.sin(rows["targets"])
    np.testing.assert_allclose(rows["reference"], expected, rtol=1e-6)
