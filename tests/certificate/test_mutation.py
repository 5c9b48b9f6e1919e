"""Each registered reduction in turn is removed, and doubled: the certificate must fail each time.

Types catch a forgotten reduction over axes that are absent from a leaf's spec, and nothing catches
one too many; so this test is what says that `quick` would notice.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from jax import lax

import jaxtrain
from jaxtrain.certificate import certify
from jaxtrain.certificate.layouts import Layout, layouts
from jaxtrain.collectives.matmul import PRODUCT_SCATTERS
from jaxtrain.collectives.named import GRADIENT_SUMS, LINK_SUMS, SUM_SCATTERS, SUMS
from jaxtrain.context.ring import KEY_SUMS
from jaxtrain.experiment import load_experiment
from jaxtrain.optim.optimizer import Adafactor

EXPERIMENT = Path(__file__).parents[2] / "experiments" / "stdlib_lm.py"


def own_tile(x: Any, axes: tuple[str, ...], dim: int, by: Any) -> Any:
    size = x.shape[dim] // lax.axis_size(axes)
    return lax.dynamic_slice_in_dim(x, lax.axis_index(axes) * size, size, dim)


def own_products(xs: Any, weights: Any, axes: tuple[str, ...], ring: Any, dtype: Any) -> Any:
    whole = sum(x @ w for x, w in zip(xs, weights, strict=True))
    return own_tile(whole.astype(dtype), axes, 0, ring)


REMOVED: dict[int, Callable[..., Any]] = {
    id(SUMS): lambda x, axes: x,
    id(GRADIENT_SUMS): lambda x, axes, by: x,
    id(LINK_SUMS): lambda x, axes, by: x,
    id(SUM_SCATTERS): own_tile,
    id(PRODUCT_SCATTERS): own_products,
    id(KEY_SUMS): lambda own, returned: own,
}
EVERY = (SUMS, GRADIENT_SUMS, LINK_SUMS, SUM_SCATTERS, PRODUCT_SCATTERS, KEY_SUMS)
TABLES = {name: table for table in EVERY for name in table}
UNCLIPPED = Adafactor(0.01, min_dim_size_to_factor=8, clipping_threshold=None)
"""An optimizer whose sums, all doubled, do not cancel: LAMB divides one by another, and Adafactor's
clipping undoes its relative rate."""

HARMLESS = {("expert loads", "doubled")}
"""Loads are divided by their sum: twice of each is the same."""
MIXTURE = jaxtrain.MoeConfig(64, experts=4, balance=jaxtrain.moe.Balance(1.0))

DEFAULT = {
    ("small gradients", "doubled"),
    ("weight gradients", "removed"),
    ("key gradients", "removed"),
}
"""One all-reduce too many, and two sums that are gone."""


def ordered(name: str) -> tuple[list[Layout], int]:
    """The layouts of `quick`, those that use the reduction and are cheap to run first."""
    every, count = layouts(8, "quick")

    def cost(layout: Layout) -> tuple[bool, ...]:
        tensor = dict(layout.axes).get("tensor", 1) == 2
        uses = {
            "gradients": layout.sharding == "data parallel" and ("fsdp", 8) in layout.axes,
            "optimizer": layout.sharding == "fsdp" and layout.mode == "explicit",
            "optimizer gradients": layout.sharding == "fsdp, reduced once",
            "row": tensor and layout.mode == "explicit",
            "column gradients": tensor and layout.mode == "explicit",
            "heads": tensor and layout.mode == "explicit",
            "row matmul": tensor and layout.mode == "explicit, ring",
            "column gradients matmul": tensor and layout.mode == "explicit, ring",
            "weight gradients matmul": layout.mode == "explicit, ring"
            and layout.sharding == "fsdp"
            and "fsdp" in dict(layout.axes),
        }
        uses["weight gradients"] = (
            layout.mode in ("explicit", "explicit, recursive", "explicit, hierarchical sums")
            and layout.sharding == "fsdp"
            and "fsdp" in dict(layout.axes)
        )
        for ends in ("pipeline output", "pipeline input gradients"):
            uses[ends] = layout.pipeline == "1F1B" and layout.precision == "fp32"
        uses["documents"] = layout.context == "ring, zig-zag"
        uses["key gradients"] = layout.context == "ring, zig-zag"
        uses["gathered key gradients"] = layout.context == "gathered keys"
        uses["layer gradients"] = "layer by layer" in layout.mode
        for links in ("slow links", "fast links"):
            uses[links] = layout.mode == "explicit, hierarchical sums" and len(layout.axes) > 1
        plain = layout.reference() == Layout((("data", 1),)).reference()
        # Few devices in a stage and a layer run once: cheap to compile.
        large = layout.pipeline != "none" and ("stage", 8) in layout.axes
        return not uses.get(name, True), layout.mode == "gspmd", large, not plain

    return sorted(every, key=cost), count


def cases() -> list[Any]:
    return [
        pytest.param(
            name, how, id=f"{name} {how}", marks=() if (name, how) in DEFAULT else pytest.mark.slow
        )
        for name, how in itertools.product(TABLES, ("removed", "doubled"))
        if (name, how) not in HARMLESS
    ]


def test_no_name_is_in_two_tables() -> None:
    assert len(TABLES) == sum(len(table) for table in EVERY)


@pytest.mark.parametrize(("name", "how"), cases())
@pytest.mark.sampled(15)
def test_the_certificate_sees_it(
    name: str, how: str, monkeypatch: pytest.MonkeyPatch, remembered: None
) -> None:
    table = TABLES[name]
    right, wrong = table[name], REMOVED[id(table)]
    calls = []

    def mutant(x: Any, *where: Any) -> Any:
        calls.append(where)
        return wrong(x, *where) if how == "removed" else 2 * right(x, *where)

    monkeypatch.setitem(table, name, mutant)
    monkeypatch.setattr(certify, "layouts", lambda devices, which, **_: ordered(name))
    experiment = load_experiment(EXPERIMENT)
    if name == "optimizer":
        experiment = replace(experiment, optimizer=UNCLIPPED)
    if name == "documents":
        pairs = jaxtrain.FineTuning(preferences=jaxtrain.losses.DPO())
        experiment = replace(experiment, fine_tuning=pairs)
    if name == "heads":
        (block,) = experiment.model.period
        normed = replace(block.attention, qk_norm=block.norm, qk_norm_across_heads=True)
        model = replace(experiment.model, period=(replace(block, attention=normed),))
        experiment = replace(experiment, model=model)
    if name == "expert loads":
        (block,) = experiment.model.period
        model = replace(experiment.model, period=(replace(block, mlp=MIXTURE),))
        experiment = replace(experiment, model=model)
    found = [d for d, _ in certify.certify(experiment, stop_at_failure=True)]
    assert calls, f"no layout of quick uses the reduction {name!r}: nothing tests it"
    assert not found[-1].passed, f"{name!r} {how}, and all {len(found)} layouts passed"
    if found[-1].error:  # then it was the types that saw it, not a mistake of this test
        assert "out_specs" in found[-1].error or "varying" in found[-1].error, found[-1].error
