"""How a run stands on fewer machines."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from jaxtrain.experiment import load_experiment
from jaxtrain.machines.elastic import elastic
from jaxtrain.mesh.axes import BATCH_AXES
from jaxtrain.mesh.mesh import load_mesh, mesh_from_axes
from jaxtrain.mesh.mesh_file import mesh_text
from jaxtrain.session.check import check

ROOT = Path(__file__).parents[2]
EXPERIMENT = replace(load_experiment(ROOT / "experiments" / "stdlib_lm.py"), batch=32)

STAND = {
    "data first": (dict(data=4, fsdp=2), 4, 1, {1: "data=1 x fsdp=2, microbatches=4"}),
    "half of it": (dict(data=4, fsdp=2), 4, 2, {2: "data=2 x fsdp=2, microbatches=4"}),
    "three of four": (dict(data=4, fsdp=2), 4, 1, {3: "data=2 x fsdp=2, microbatches=2"}),
    "then fsdp": (dict(data=2, fsdp=4), 4, 1, {1: "data=1 x fsdp=2, microbatches=4"}),
    "fsdp, then tensor": (dict(fsdp=4, tensor=2), 8, 1, {1: "fsdp=1 x tensor=1, microbatches=4",
                                                         2: "fsdp=1 x tensor=2, microbatches=4"}),
    "a pipeline": (dict(data=2, stage=4), 2, 4, {1: "data=1 x stage=4, microbatches=8"}),
    "whole": (dict(data=2, fsdp=4), 2, 1, {2: "data=2 x fsdp=4, microbatches=1"}),
}  # fmt: skip
"""Mesh axes, machines, microbatches, and what is to stand on some of the machines."""


@pytest.mark.parametrize("name", STAND)
def test_data_is_cut_first_and_microbatches_make_up_for_it(name: str) -> None:
    axes, machines, micro, wanted = STAND[name]
    experiment, spec = replace(EXPERIMENT, microbatches=micro), mesh_from_axes(**axes)
    found = elastic(experiment, spec, machines).plans
    for number, told in wanted.items():
        assert str(found[number]) == told
    whole = found[machines]
    for number, each in found.items():
        assert each.machines <= number
        cut = dict(each.axes)
        assert math.prod(cut.values()) * machines == spec.devices * each.machines
        assert all(cut[axis] <= size for axis, size in axes.items())
        rows = [
            32 / s.microbatches / math.prod(dict(s.axes).get(axis, 1) for axis in BATCH_AXES)
            for s in (each, whole)
        ]
        assert rows[0] <= rows[1] and rows[0] == int(rows[0])
        check(
            replace(experiment, microbatches=each.microbatches),
            mesh_from_axes(**cut),
            data_here=False,
        )


def test_a_state_that_fewer_chips_have_no_room_for_does_not_stand() -> None:
    """8 B parameters with AdamW and a sum of gradients, in fp32: 16 bytes each."""
    experiment, spec = load_experiment(ROOT / "experiments" / "llama3_8b.py"), load_mesh("h100_64")
    state = 16 * check(experiment, spec, data_here=False).parameters
    assert state / 2 > spec.usable_bytes > state / 4, "of the sizes that divide, 4 chips are least"
    for machines, least in ((8, 1), (16, 1), (32, 2)):
        found = elastic(experiment, spec, machines).plans
        assert sorted(found) == list(range(least, machines + 1))
        assert dict(found[least].axes)["data"] == 1


REFUSED = {
    "machines": ("h100_8", 3, "8 devices, of which 3 machines cannot have as many each"),
    "none": ("h100_8", 0, "of which 0 machines"),
    "slices": ("v5e_16", 4, "come and go together; use a machine for each slice"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_shared_out_is_refused(name: str) -> None:
    mesh, machines, said = REFUSED[name]
    with pytest.raises(ValueError, match=said):
        elastic(EXPERIMENT, load_mesh(mesh), machines)


@pytest.mark.parametrize("path", sorted((ROOT / "meshes").glob("*.toml")), ids=lambda p: p.stem)
def test_a_mesh_file_written_again_is_the_same_but_for_its_axes(path: Path, tmp_path: Path) -> None:
    spec = load_mesh(path)
    (tmp_path / path.name).write_text(mesh_text(spec, spec.axes))
    assert replace(load_mesh(tmp_path / path.name), path=spec.path) == spec
    if spec.topology is None and spec.devices > 1:
        (axis, size), *others = spec.axes
        (tmp_path / "half.toml").write_text(mesh_text(spec, ((axis, size // 2), *others)))
        half = load_mesh(tmp_path / "half.toml")
        assert half.devices == spec.devices // 2 and half.chip == spec.chip
        assert half.links == spec.links and half.facts == spec.facts
        assert half.devices_per_host == min(spec.devices_per_host, half.devices)
