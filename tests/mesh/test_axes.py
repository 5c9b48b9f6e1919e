"""The table of mesh axes: what the package knows of an axis is its row."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxtrain
from jaxtrain.mesh.axes import (
    BATCH_AXES,
    EXPERT_AXES,
    LOGICAL_AXES,
    MODES,
    STAGE,
    TABLE,
    TOKEN_AXES,
    axes_that_split,
)
from jaxtrain.mesh.roles import Roles, roles_of
from jaxtrain.mesh.sharding import ShardingRules, data_parallel, fsdp, table, tensor, zero2
from jaxtrain.step.layer_order import params_in_natural_order

ROOT = Path(__file__).parents[2]
ALL = {row.name: 2 for row in TABLE}


def test_rows_name_known_axes_and_modes() -> None:
    assert all(set(row.splits) <= set(LOGICAL_AXES) and row.splits for row in TABLE)
    assert all(set(row.modes) <= set(MODES) and row.modes for row in TABLE)
    order = [row.name for row in sorted(TABLE, key=lambda row: -row.kept)]
    assert order == ["data", "replica", "fsdp", "expert", "stage", "context", "tensor"]
    first, *rest, last = (f"`{name}`" for name in order)
    sentence = f"{first} is reduced first, then {', '.join(rest)} and {last}."
    assert sentence in " ".join((ROOT / "docs" / "processes.md").read_text().split())


def test_each_role_has_its_axes() -> None:
    assert axes_that_split("batch") == BATCH_AXES == ("replica", "data", "fsdp", "expert")
    assert (*BATCH_AXES, "context") == TOKEN_AXES
    assert (EXPERT_AXES, STAGE) == (("expert",), "stage")
    assert axes_that_split("embed") == ()


def test_presets_follow_the_table() -> None:
    assert dict(fsdp().params)["embed"] == ("fsdp", "expert")
    assert dict(zero2().optimizer_table)["embed"] == ("fsdp", "data")
    assert {axes for _, axes in tensor().params} == {("tensor",)}
    assert dict(data_parallel().activations) == {"batch": BATCH_AXES, "seq": ("context",)}


def test_roles_are_what_rules_and_mesh_split() -> None:
    rules = (fsdp() | tensor()).activations
    split = dict.fromkeys(("heads", "kv_heads", "mlp", "vocab"), ("tensor",))
    whole = Roles(BATCH_AXES, ("context",), **split, experts=("expert",), layers=("stage",))
    assert roles_of(rules, ALL) == whole
    outside = whole.outside_stack()
    assert outside.stream == outside.vocab == outside.mlp == ("tensor", "stage")
    assert outside.kv_heads == ("tensor", "stage") and outside.batch == BATCH_AXES
    assert roles_of(rules, {"fsdp": 2, "tensor": 1}) == Roles(batch=("fsdp",))
    assert roles_of(fsdp().activations, {"tensor": 2}) == Roles(), "no rule, no role"


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_documents_list_every_axis(row) -> None:
    assert f"| `{row.name}` | {row.meaning}" in (ROOT / "docs" / "meshes.md").read_text()
    assert row.name in (ROOT / "docs" / "glossary.md").read_text().split("mesh axis |")[1][:200]


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
@pytest.mark.parametrize("mode", MODES)
def test_a_mode_refuses_only_the_axes_that_it_does_not_run(decoder, row, mode) -> None:
    experiment = replace(
        decoder,
        execution=jaxtrain.Execution(mode=mode),
        microbatches=2,
        model=replace(decoder.model, layers=2),
    )
    mesh = jaxtrain.mesh_from_axes(**{row.name: 2})
    if mode in row.modes:
        assert jaxtrain.check(experiment, mesh).assembly.sizes == {row.name: 2}
    else:
        with pytest.raises(ValueError, match=f"{row.name}=2 and execution.mode='{mode}'"):
            jaxtrain.check(experiment, mesh)


REMEDIES = {
    "tensor": "add the tensor() preset, or set tensor=1",
    "data": "split batch over it in sharding.activations, or set data=1",
    "context": "split seq over it in sharding.activations, or set context=1",
}


@pytest.mark.parametrize("axis", REMEDIES)
def test_an_axis_that_splits_nothing_is_refused(decoder, opened, stepped, axis) -> None:
    """One table is enough: weights that rest on devices with the same rows are split, and the run
    is that of one device."""
    alone = replace(decoder, sharding=ShardingRules(activations=()))
    mesh = jaxtrain.mesh_from_axes(**{axis: 2})
    with pytest.raises(ValueError, match=re.escape(REMEDIES[axis])):
        jaxtrain.check(alone, mesh)
    embed = table({"embed": axis})
    in_optimizer = ShardingRules(optimizer=embed, activations=())
    assert jaxtrain.check(replace(decoder, sharding=in_optimizer), mesh)
    at_rest = ShardingRules(params=embed, activations=())
    split = opened(replace(decoder, sharding=at_rest), **{axis: 2})
    assert stepped(split)["loss"] == pytest.approx(stepped(opened(decoder))["loss"], rel=1e-6)


def test_experts_are_split_without_a_rule(decoder) -> None:
    (block,) = decoder.model.period
    mixture = replace(block, mlp=jaxtrain.MoeConfig(8, experts=4))
    sharding = ShardingRules(activations=table({"batch": "data"}))
    mesh, experiment = jaxtrain.mesh_from_axes(expert=2), replace(decoder, sharding=sharding)
    with pytest.raises(ValueError, match="expert=2 splits nothing"):
        jaxtrain.check(experiment, mesh)
    model = replace(decoder.model, period=(mixture,))
    assert jaxtrain.check(replace(experiment, model=model), mesh)


def test_a_mode_is_not_proposed_to_a_model_that_it_does_not_run(own, decoder) -> None:
    mesh = jaxtrain.mesh_from_axes(stage=2)
    with pytest.raises(ValueError, match="1 thing to mend"):
        jaxtrain.check(own, mesh)
    typo = replace(decoder, execution=jaxtrain.Execution(mode="explicitly"))
    with pytest.raises(ValueError, match="1 thing to mend"):
        jaxtrain.check(typo, jaxtrain.mesh_from_axes(data=2))
    model = replace(decoder.model, layers=2)
    with pytest.raises(ValueError, match="1 thing to mend"):
        jaxtrain.check(replace(typo, model=model, microbatches=2), mesh)


COPIES = (dict(replica=2, data=2, tensor=2), dict(replica=2, fsdp=2), dict(replica=2, stage=2))


@pytest.mark.parametrize("axes", COPIES, ids=str)
def test_copies_are_summed_as_data_is(decoder, opened, stepped, axes) -> None:
    """The same weights to the bit before a step, and the same losses, as on one device."""
    experiment = replace(decoder, microbatches=2, model=replace(decoder.model, layers=2))
    one, copies = opened(experiment), opened(experiment, **axes)
    assert all(map(np.array_equal, jax.tree.leaves(natural(one)), jax.tree.leaves(natural(copies))))
    for _ in range(3):
        assert stepped(copies)["loss"] == pytest.approx(stepped(one)["loss"], rel=1e-6)


def natural(session):
    return params_in_natural_order(session.assembly, session.state.params)


ROW = """    AxisRow("site", ("batch",), 7, "the batch, between sites"),
"""
SCRIPT = """
import dataclasses, sys
import jaxtrain
from jaxtrain.mesh.sharding import fsdp, tensor
sys.path.insert(0, {tests!r})
import tiny

experiment = tiny.decoder.__wrapped__(tiny.own.__wrapped__())
experiment = dataclasses.replace(experiment, steps=3)
losses = []
for axes in (dict(data=1), dict(site=2), dict(site=2, fsdp=2, tensor=2)):
    mesh = jaxtrain.mesh_from_axes(**axes)
    result = jaxtrain.train(experiment, mesh, run_dir={out!r} + str(axes))
    losses.append([line["loss"] for line in result.history])
report = jaxtrain.compile(experiment, jaxtrain.mesh_from_axes(site=2, fsdp=2, tensor=2))
assert report.fits and not report.violations, report.violations
print(losses)
"""


@pytest.mark.slow
def test_an_axis_that_splits_the_batch_is_one_row(tmp_path: Path) -> None:
    """In a copy of the package whose table has another row, and which differs in nothing else."""
    shutil.copytree(ROOT / "jaxtrain", tmp_path / "jaxtrain")
    axes = tmp_path / "jaxtrain" / "mesh" / "axes.py"
    before, after = axes.read_text().split("TABLE = (\n")
    axes.write_text(before + "TABLE = (\n" + ROW + after)
    script = SCRIPT.format(tests=str(ROOT / "tests"), out=str(tmp_path / "run"))
    flags = "--xla_force_host_platform_device_count=8"
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "XLA_FLAGS": flags}
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    one, *others = json.loads(done.stdout.splitlines()[-1])
    assert len(one) == 3 and others == [pytest.approx(one, rel=1e-6)] * 2
