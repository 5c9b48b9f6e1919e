"""The certificate: what it passes, what it fails, and that it skips nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxtrain
from jaxtrain.experiment import load_experiment
from jaxtrain.mesh.mesh import mesh_from_axes
from jaxtrain.train import certify
from jaxtrain.train.assembly import assemble
from jaxtrain.train.certify import Difference
from jaxtrain.train.layouts import LOOPS, MODES, PIPELINES, Layout, arranged, layouts
from jaxtrain.train.shrink import shrink

EXPERIMENT = Path(__file__).parents[2] / "experiments" / "stdlib_lm.py"
PLAIN = Layout((("data", 1),)).reference()


def report(differences: list[Difference]) -> str:
    return "\n".join(map(str, differences))


def shown(layout: Layout) -> set[str]:
    """The mode, and in an explicit one the loop and the pipeline, which are ours there."""
    if layout.mode == "gspmd":
        return {layout.mode}
    return {layout.mode, layout.loop, layout.pipeline}


def chosen(every: list[Layout], count: int) -> list[Layout]:
    """Few fp32 layouts that show as many modes, and loops and pipelines in an explicit one, as they
    can: the one that shows the most of what is left, again and again."""
    fit = [x for x in every if x.precision == "fp32" and x.axes != (("data", 8),)]
    left, kept = {*MODES, *LOOPS, *PIPELINES}, []
    while len(kept) < count:
        best = max(fit, key=lambda layout: len(shown(layout) & left))
        kept.append(best)
        assert shown(best) & left, f"no layout shows {left}"
        left -= shown(best)
    return kept


def in_parts(every: list[Layout], parts: int) -> list[list[Layout]]:
    """Neighbours have references in common."""
    order = sorted(every, key=lambda layout: str(layout.reference()))
    return [order[len(order) * i // parts : len(order) * (i + 1) // parts] for i in range(parts)]


QUICK = layouts(8, "quick")[0]
CHOSEN = chosen(QUICK, 4)
PARTS = 20


def passes(some: list[Layout], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certify, "layouts", lambda devices, which: (some, len(some)))
    found = [difference for difference, _ in certify.certify(EXPERIMENT)]
    assert [d.layout for d in found] == some
    assert all(d.passed for d in found), report(found)


@pytest.mark.parametrize(
    "layout",
    [*CHOSEN[:2], *(pytest.param(layout, marks=pytest.mark.slow) for layout in CHOSEN[2:])],
    ids=str,
)
def test_layouts_equal_one_device(
    layout: Layout, monkeypatch: pytest.MonkeyPatch, remembered: None
) -> None:
    passes([layout], monkeypatch)


@pytest.mark.parametrize(
    "part",
    [
        pytest.param(part, marks=pytest.mark.slow if part % 4 == 1 else pytest.mark.exhaustive)
        for part in range(PARTS)
    ],
)
def test_quick_passes(part: int, monkeypatch: pytest.MonkeyPatch, remembered: None) -> None:
    passes(in_parts(QUICK, PARTS)[part], monkeypatch)


def test_the_parts_are_the_whole() -> None:
    parts = in_parts(QUICK, PARTS)
    assert sorted(map(str, chain(*parts))) == sorted(map(str, QUICK))


@pytest.mark.exhaustive
def test_all_passes(remembered: None) -> None:
    found = [difference for difference, _ in certify.certify(EXPERIMENT, which="all")]
    assert len(found) == layouts(8, "all")[1]
    assert all(d.passed for d in found), report(found)


# What the verdict rests on, with runs made up.

Change = Callable[[Any, Layout], Any]


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> Callable[[Change], Iterator[Any]]:
    """certify() where every run has one outcome, but for what `change` does off the reference."""
    rng = np.random.default_rng(0)
    outcome = certify._Outcome(
        init={"a": rng.normal(size=(3, 4)), "b": rng.normal(size=5)},
        losses=np.linspace(3, 2, 5),
        norms=np.ones(5),
        grads={"a": rng.normal(size=(3, 4)), "b": np.zeros(5)},
    )

    def start(change: Change) -> Iterator[Any]:
        def run(experiment: Any, layout: Layout) -> Any:
            return outcome if layout == layout.reference() else change(outcome, layout)

        monkeypatch.setattr(certify, "_run", run)
        return certify.certify(EXPERIMENT)

    return start


def scaled(name: str, relative: float) -> Change:
    def change(outcome: Any, layout: Layout) -> Any:
        value = getattr(outcome, name)
        if isinstance(value, dict):
            return outcome._replace(**{name: {k: v * (1 + relative) for k, v in value.items()}})
        return outcome._replace(**{name: value * (1 + relative)})

    return change


CHANGES: dict[str, tuple[Change, set[str]]] = {
    "nothing": (lambda outcome, layout: outcome, set()),
    "loss within the bound": (scaled("losses", 9e-6), set()),
    "loss beyond": (scaled("losses", 1.1e-5), {"fp32"}),
    "gradient within the bound": (scaled("grads", -9e-6), set()),
    "gradient beyond": (scaled("grads", 1.1e-5), {"fp32"}),
    "gradient norm beyond": (scaled("norms", -1.1e-5), {"fp32"}),
    "gradient beyond what bf16 may": (scaled("grads", 3.1e-2), {"fp32", "bf16"}),
    "initial parameters by the last bit": (scaled("init", 2.0**-52), {"fp32", "bf16"}),
    "loss not a number": (scaled("losses", np.nan), {"fp32", "bf16"}),
    "gradients not a number": (scaled("grads", np.nan), {"fp32", "bf16"}),
    "loss infinite": (scaled("losses", np.inf), {"fp32", "bf16"}),
}


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("name", CHANGES)
def test_a_difference_beyond_the_bound_fails_and_no_other(name: str, made_up: Any) -> None:
    change, failing = CHANGES[name]
    for difference, _certificate in made_up(change):
        assert difference.passed == (difference.layout.precision not in failing), str(difference)
    assert len(_certificate.differences) == _certificate.closed_count == len(layouts(8, "quick")[0])
    wanted = sum(d.layout.precision in failing for d in _certificate.differences)
    assert len(_certificate.failed) == wanted
    assert _certificate.as_json()["layouts"] == _certificate.closed_count


def test_one_wrong_element_of_one_leaf_is_named(made_up: Any) -> None:
    def change(outcome: Any, layout: Layout) -> Any:
        wrong = outcome.grads["a"].copy()
        wrong[1, 2] += 1e-4 * np.abs(wrong).max()
        return outcome._replace(grads={**outcome.grads, "a": wrong})

    difference, _ = next(made_up(change))
    assert difference.worst_leaf == "a"
    assert difference.grad_rel == pytest.approx(1e-4)
    assert not difference.passed
    assert "(a)" in str(difference)


@pytest.mark.parametrize("error", [ValueError, TypeError, NotImplementedError])
def test_a_layout_that_does_not_run_has_failed_and_the_others_go_on(
    made_up: Any, error: type[Exception]
) -> None:
    def change(outcome: Any, layout: Layout) -> Any:
        if layout.sharding == "zero1":
            raise error("no such thing\nsecond line")
        return outcome

    certificate = list(made_up(change))[-1][1]
    assert {d.layout.sharding for d in certificate.failed} == {"zero1"}
    assert certificate.failed[0].error == f"{error.__name__}: no such thing"
    assert len(certificate.differences) == certificate.closed_count


def test_stop_at_failure_stops_there(made_up: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made_up(scaled("losses", 1.0))
    assert len(list(certify.certify(EXPERIMENT, stop_at_failure=True))) == 1


def test_a_skipped_layout_is_noticed(made_up: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    every, count = layouts(8, "quick")
    monkeypatch.setattr(certify, "layouts", lambda devices, which: (every[:-1], count))
    with pytest.raises(AssertionError, match="a layout was skipped"):
        list(made_up(lambda outcome, layout: outcome))


def test_a_users_own_model_is_refused(own: jaxtrain.Experiment) -> None:
    with pytest.raises(ValueError, match="built-in models"):
        next(certify.certify(own))


@pytest.mark.parametrize("devices", [0, -2])
def test_no_devices_are_refused(devices: int) -> None:
    with pytest.raises(ValueError, match=f"devices={devices} must be an integer of 1 or more"):
        next(certify.certify(EXPERIMENT, devices=devices))


@pytest.mark.parametrize("devices", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (5, 6))])
def test_every_layout_of_any_count_of_devices_is_accepted(devices: int) -> None:
    small = shrink(load_experiment(EXPERIMENT), devices=devices)
    every, count = layouts(devices, "all")
    assert len(every) == count
    for layout in dict.fromkeys([*every, *(layout.reference() for layout in every)]):
        assemble(arranged(small, layout), mesh_from_axes(**dict(layout.axes)))


def test_dropout_of_a_layout_is_that_of_every_block(decoder: jaxtrain.Experiment) -> None:
    (block,) = decoder.model.period
    noisy = replace(block, dropout=0.3)
    model = replace(decoder.model, layers=3, prefix=(noisy,), period=(noisy,), suffix=(noisy,))
    found = arranged(replace(decoder, model=model), Layout((("data", 1),), dropout=0.1))
    assert [b.dropout for b in found.model.blocks] == [0.1, 0.1, 0.1]
    assert found.model.dropout == 0.1


@pytest.mark.parametrize("devices", [1, 4, 6, 8])
def test_shrinking_keeps_the_features(decoder: jaxtrain.Experiment, devices: int) -> None:
    block = jaxtrain.BlockConfig(
        jaxtrain.AttentionConfig(heads=8, kv_heads=2, window=64, softcap=20.0, qkv_bias=True),
        jaxtrain.MlpConfig(hidden=512, gated=False, bias=True),
    )
    wide = replace(block, attention=replace(block.attention, window=None))
    model = replace(decoder.model, embed=512, layers=13, prefix=(block,), period=(block, wide))
    model = replace(model, learned_positions=4096, logit_softcap=30.0)
    small = shrink(replace(decoder, model=model), devices=devices).model
    assert small.violations() == []
    assert [b.attention.window is None for b in small.blocks] == [False, False, True, False, True]
    for found in small.blocks:
        assert found.attention.heads == 2 * found.attention.kv_heads == 2 * devices
        assert found.attention.softcap == 20.0 and found.attention.qkv_bias
        assert not found.mlp.gated and found.mlp.bias
    assert small.learned_positions == 16 and small.logit_softcap == 30.0
    assert small.padded_vocab > small.vocab, "padded rows take part"
